// The epilogues of the passes over a tile of the product. Two warpgroups have 64 rows each. Results
// are written over the tiles that were read: each thread writes only what it alone has read, so no
// barrier is needed in between.

#pragma once

#include <cstdint>

#include "hopper.cuh"
#include "shallow_product.h"

namespace torchembed {
namespace {

constexpr int kGroups = 2, kGroupRows = 64;
constexpr int kWarps = kGroups * kGroupThreads / 32;

template <ProductPass kPass>
constexpr bool kIsForward = kPass == ProductPass::kFirstForward || kPass == ProductPass::kForward;

template <ProductPass kPass>
constexpr bool kReadsPairs =
    kPass != ProductPass::kFirstForward && kPass != ProductPass::kRectified;

template <ProductPass kPass>
constexpr bool kWritesPairs =
    kPass != ProductPass::kInputBackward && kPass != ProductPass::kRectified;

// The part of a tile that a thread has, as wgmma distributes its result.
struct Lane {
  int group, row;  // the warpgroup, and the first of the thread's two rows in it, which are 8 apart
  int pair;        // which pair of each octet of columns

  __device__ uint32_t place(int half, int octet) const {
    return place_in_tile(group * kGroupRows + row + 8 * half, octet, pair);
  }
  // True on the thread of each warpgroup that issues copies and gives buffers back.
  __device__ static bool is_first() { return threadIdx.x % kGroupThreads == 0; }
};

// A forward pass, in place: x0 becomes z, and x becomes the layer's output. z is rounded to 16 bits
// only where it is stored; the output is computed from the float32 value.
template <class Value, ProductPass kPass>
__device__ void cross_forward(const Lane& lane, const float (&sum)[32], const uint32_t (&bias)[8],
                              uint32_t first, uint32_t second) {
#pragma unroll
  for (int octet = 0; octet < 8; ++octet) {
    const float2 of_bias = unpacked<Value>(bias[octet]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t place = lane.place(half, octet);
      const float* const product = sum + 4 * octet + 2 * half;
      const float2 z = {product[0] + of_bias.x, product[1] + of_bias.y};
      const float2 x0 = unpacked<Value>(load_shared(first + place));
      float2 x = x0;
      if constexpr (kPass == ProductPass::kForward) {
        x = unpacked<Value>(load_shared(second + place));
      }
      store_shared(first + place, packed<Value>(z.x, z.y));
      store_shared(second + place,
                   packed<Value>(__fmaf_rn(x0.x, z.x, x.x), __fmaf_rn(x0.y, z.y, x.y)));
    }
  }
}

// Adds a pair of one of the lane's two rows to the sums of its columns. The first row assigns, so
// that the sums need no clearing between tiles.
__device__ void add_row(float (&column_sums)[16], int octet, int half, float2 pair) {
  float* const total = column_sums + 2 * octet;
  total[0] = half == 0 ? pair.x : total[0] + pair.x;
  total[1] = half == 0 ? pair.y : total[1] + pair.y;
}

// A backward pass, in place: the gradient becomes grad_x, and x0 becomes grad_z. Returns the sums
// of grad_z over the lane's rows, before rounding. Rows past the end add nothing: tensor maps fill
// them with zeros.
template <class Value>
__device__ void cross_backward(const Lane& lane, const float (&sum)[32], uint32_t first,
                               uint32_t second, float (&column_sums)[16]) {
#pragma unroll
  for (int octet = 0; octet < 8; ++octet) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t place = lane.place(half, octet);
      const float* const product = sum + 4 * octet + 2 * half;
      const float2 grad = unpacked<Value>(load_shared(first + place));
      const float2 x0 = unpacked<Value>(load_shared(second + place));
      const float2 grad_x = {product[0] + grad.x, product[1] + grad.y};
      const float2 grad_z = {grad_x.x * x0.x, grad_x.y * x0.y};
      store_shared(first + place, packed<Value>(grad_x.x, grad_x.y));
      store_shared(second + place, packed<Value>(grad_z.x, grad_z.y));
      add_row(column_sums, octet, half, grad_z);
    }
  }
}

// The backward pass of a rectifier, in place: the output becomes the gradient of the rectifier's
// input. Returns its sums over the lane's rows.
template <class Value>
__device__ void rectified_backward(const Lane& lane, const float (&sum)[32], uint32_t first,
                                   float (&column_sums)[16]) {
#pragma unroll
  for (int octet = 0; octet < 8; ++octet) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t place = lane.place(half, octet);
      const float* const product = sum + 4 * octet + 2 * half;
      const float2 output = unpacked<Value>(load_shared(first + place));
      const float2 grad = {output.x > 0.0f ? product[0] : 0.0f,
                           output.y > 0.0f ? product[1] : 0.0f};
      store_shared(first + place, packed<Value>(grad.x, grad.y));
      add_row(column_sums, octet, half, grad);
    }
  }
}

// Adds the lanes' sums of a tile's columns over all rows of the block, in one order: lanes by
// shuffles, then warps through shared memory. The first warpgroup adds up. The second one only
// arrives at the barrier kWritten and goes on with its next tile; before it overwrites its sums it
// waits at kRead until the first one has read them.
__device__ void put_sums(const Lane& lane, float (&column_sums)[16], uint32_t shared, float* sums,
                         int num_columns, bool is_first_tile, bool is_last_tile) {
  constexpr int kWritten = 1 + kGroups, kRead = kWritten + 1, kAll = kGroups * kGroupThreads;
  const int warp = threadIdx.x / 32;
  if (lane.group == 1 && !is_first_tile) sync_threads(kRead, kAll);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
#pragma unroll
    for (int apart = 4; apart < 32; apart *= 2) {
      column_sums[i] += __shfl_xor_sync(0xFFFFFFFFu, column_sums[i], apart);
    }
    const int column = i / 2 * 8 + lane.pair * 2 + i % 2;
    if (threadIdx.x % 32 < 4) {
      store_shared(shared + (warp * kTileColumns + column) * 4, __float_as_uint(column_sums[i]));
    }
  }
  if (lane.group == 1) {
    arrive_threads(kWritten, kAll);
    return;
  }
  sync_threads(kWritten, kAll);
  if (threadIdx.x < kTileColumns && threadIdx.x < num_columns) {
    float total = 0.0f;
    for (int i = 0; i < kWarps; ++i) {
      total += __uint_as_float(load_shared(shared + (i * kTileColumns + threadIdx.x) * 4));
    }
    sums[threadIdx.x] = total;
  }
  if (!is_last_tile) arrive_threads(kRead, kAll);
}

// Adds grad * z of a layer to `sum`, and of the first layer the gradient itself, that of the
// residual connection.
template <class Value>
__device__ void add_layer(const Lane& lane, float (&sum)[32], uint32_t first, uint32_t second,
                          bool is_first_layer) {
#pragma unroll
  for (int octet = 0; octet < 8; ++octet) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t place = lane.place(half, octet);
      float* const total = sum + 4 * octet + 2 * half;
      const float2 grad = unpacked<Value>(load_shared(first + place));
      const float2 z = unpacked<Value>(load_shared(second + place));
      if (is_first_layer) {
        total[0] += grad.x;
        total[1] += grad.y;
      }
      total[0] = __fmaf_rn(grad.x, z.x, total[0]);
      total[1] = __fmaf_rn(grad.y, z.y, total[1]);
    }
  }
}

template <class Value>
__device__ void put_tile(const Lane& lane, const float (&sum)[32], uint32_t tile) {
#pragma unroll
  for (int octet = 0; octet < 8; ++octet) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* const total = sum + 4 * octet + 2 * half;
      store_shared(tile + lane.place(half, octet), packed<Value>(total[0], total[1]));
    }
  }
}

}  // namespace
}  // namespace torchembed
