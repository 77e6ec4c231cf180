// Rows as the eight lanes that share one hold them: in what the kernel of update_rows.cu computes.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "update_rows.h"

#pragma nv_diag_suppress 177  // on GPUs before Ampere nothing here is used

namespace torchembed {
namespace {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr int kDim = kUpdateDim;
constexpr int kLanes = 8;  // of a row
// Of a row a lane takes kParts vectors of 4 elements, which lie kStride elements apart.
constexpr int kStride = kLanes * 4;
constexpr int kParts = kDim / kStride;

__device__ int group_of_thread() { return threadIdx.x % 32 / kLanes; }
__device__ int lane_of_row() { return threadIdx.x % kLanes; }

struct Elements {
  float at[kParts][4];
};

template <class Function>
__device__ void for_each_element(const Function& function) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < 4; ++i) function(part, i);
  }
}

// Four elements as they lie in memory.
template <class Value>
using Four = std::conditional_t<sizeof(Value) == 4, float4, uint2>;

__device__ void unpack(float (&to)[4], const float4& four, const float*) {
  to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

__device__ void unpack(float (&to)[4], const uint2& four, const __nv_bfloat16*) {
  to[0] = __uint_as_float(four.x << 16), to[1] = __uint_as_float(four.x & 0xFFFF0000u);
  to[2] = __uint_as_float(four.y << 16), to[3] = __uint_as_float(four.y & 0xFFFF0000u);
}

__device__ void unpack(float (&to)[4], const uint2& four, const __half*) {
  const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&four.x));
  const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&four.y));
  to[0] = low.x, to[1] = low.y, to[2] = high.x, to[3] = high.y;
}

// A lane's elements of a row as they lie in memory.
template <class Value>
struct Packed {
  Four<Value> at[kParts];

  // `row` is the lane's own first element of it.
  __device__ void load(const Value* row) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      at[part] = *reinterpret_cast<const Four<Value>*>(row + part * kStride);
    }
  }

  __device__ Elements elements() const {
    Elements found;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      unpack(found.at[part], at[part], static_cast<const Value*>(nullptr));
    }
    return found;
  }
};

template <class Value>
__device__ Elements load_elements(const Value* row) {
  Packed<Value> packed;
  packed.load(row);
  return packed.elements();
}

__device__ void store_elements(float* row, const Elements& elements) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const float (&four)[4] = elements.at[part];
    *reinterpret_cast<float4*>(row + part * kStride) =
        make_float4(four[0], four[1], four[2], four[3]);
  }
}

// The sum of squares over a run's lanes, each with the same bits.
__device__ float sum_squares(const Elements& gradient) {
  float sums[kParts];
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const float (&four)[4] = gradient.at[part];
    sums[part] = four[0] * four[0];
#pragma unroll
    for (int i = 1; i < 4; ++i) sums[part] += four[i] * four[i];
  }
#pragma unroll
  for (int apart = kParts / 2; apart > 0; apart /= 2) {
#pragma unroll
    for (int part = 0; part < apart; ++part) sums[part] += sums[part + apart];
  }
#pragma unroll
  for (int apart = kLanes / 2; apart > 0; apart /= 2) {
    sums[0] += __shfl_xor_sync(kAllLanes, sums[0], apart);
  }
  return sums[0];
}

}  // namespace
}  // namespace torchembed
