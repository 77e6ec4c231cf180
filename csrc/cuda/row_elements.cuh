// Parts of rows as kernels hold them.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace torchembed {
namespace {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// Four elements as they lie in memory.
template <class Value>
using Four = std::conditional_t<sizeof(Value) == 4, float4, uint2>;

inline __device__ void unpack(float (&to)[4], const float4& four, const float*) {
  to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

inline __device__ void unpack(float (&to)[4], const uint2& four, const __nv_bfloat16*) {
  to[0] = __uint_as_float(four.x << 16), to[1] = __uint_as_float(four.x & 0xFFFF0000u);
  to[2] = __uint_as_float(four.y << 16), to[3] = __uint_as_float(four.y & 0xFFFF0000u);
}

inline __device__ void unpack(float (&to)[4], const uint2& four, const __half*) {
  const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&four.x));
  const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&four.y));
  to[0] = low.x, to[1] = low.y, to[2] = high.x, to[3] = high.y;
}

inline __device__ int index_at(const void* indices, bool wide, int64_t at) {
  return wide ? static_cast<int>(static_cast<const int64_t*>(indices)[at])
              : static_cast<const int32_t*>(indices)[at];
}

}  // namespace
}  // namespace torchembed
