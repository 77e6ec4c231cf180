// What passes make of a tile of the product: two groups of four warps have 64 rows each, and write
// what leaves in the place of what came.

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

// A warp's part of what a group of warps has of a tile.
struct Lane {
  int group, row;  // of the first of its rows, 8 apart, among the group's
  int pair;        // of each 8 columns

  __device__ uint32_t place(int half, int piece) const {
    return place_in_tile(group * kGroupRows + row + 8 * half, piece, pair);
  }
  // Of the group's threads, the one that asks for copies.
  __device__ static bool is_first() { return threadIdx.x % kGroupThreads == 0; }
};

// Of a forward pass, in place: a pair of x0 becomes z, and one of x the layer's output.
template <class Value, ProductPass kPass>
__device__ void cross_forward(const Lane& lane, const float (&sum)[32], const uint32_t (&bias)[8],
                              uint32_t first, uint32_t second) {
#pragma unroll
  for (int piece = 0; piece < 8; ++piece) {
    const float2 of_bias = unpacked<Value>(bias[piece]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t place = lane.place(half, piece);
      const float* const product = sum + 4 * piece + 2 * half;
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

// Adds a pair of the lane's row to the sums of its columns, which the first row begins.
__device__ void add_row(float (&column_sums)[16], int piece, int half, float2 pair) {
  float* const total = column_sums + 2 * piece;
  total[0] = half == 0 ? pair.x : total[0] + pair.x;
  total[1] = half == 0 ? pair.y : total[1] + pair.y;
}

// A pair of the gradient becomes grad_x, and one of x0 grad_z, whose sums over the lane's rows are
// returned.
template <class Value>
__device__ void cross_backward(const Lane& lane, const float (&sum)[32], uint32_t first,
                               uint32_t second, float (&column_sums)[16]) {
#pragma unroll
  for (int piece = 0; piece < 8; ++piece) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t place = lane.place(half, piece);
      const float* const product = sum + 4 * piece + 2 * half;
      const float2 grad = unpacked<Value>(load_shared(first + place));
      const float2 x0 = unpacked<Value>(load_shared(second + place));
      const float2 grad_x = {product[0] + grad.x, product[1] + grad.y};
      const float2 grad_z = {grad_x.x * x0.x, grad_x.y * x0.y};
      store_shared(first + place, packed<Value>(grad_x.x, grad_x.y));
      store_shared(second + place, packed<Value>(grad_z.x, grad_z.y));
      add_row(column_sums, piece, half, grad_z);
    }
  }
}

// A pair of the output becomes the gradient of what was rectified, whose sums over the lane's rows
// are returned.
template <class Value>
__device__ void rectified_backward(const Lane& lane, const float (&sum)[32], uint32_t first,
                                   float (&column_sums)[16]) {
#pragma unroll
  for (int piece = 0; piece < 8; ++piece) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t place = lane.place(half, piece);
      const float* const product = sum + 4 * piece + 2 * half;
      const float2 output = unpacked<Value>(load_shared(first + place));
      const float2 grad = {output.x > 0.0f ? product[0] : 0.0f,
                           output.y > 0.0f ? product[1] : 0.0f};
      store_shared(first + place, packed<Value>(grad.x, grad.y));
      add_row(column_sums, piece, half, grad);
    }
  }
}

// Adds up what lanes have of a tile's columns, over all rows of the block.
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

// Adds grad * z of a layer, and the gradient itself of the first one.
template <class Value>
__device__ void add_layer(const Lane& lane, float (&sum)[32], uint32_t first, uint32_t second,
                          bool is_first_layer) {
#pragma unroll
  for (int piece = 0; piece < 8; ++piece) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t place = lane.place(half, piece);
      float* const total = sum + 4 * piece + 2 * half;
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
  for (int piece = 0; piece < 8; ++piece) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* const total = sum + 4 * piece + 2 * half;
      store_shared(tile + lane.place(half, piece), packed<Value>(total[0], total[1]));
    }
  }
}

}  // namespace
}  // namespace torchembed
