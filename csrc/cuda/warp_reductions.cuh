// Reductions over the lanes of a warp, all of which take part and get the result.

#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

namespace torchembed {
namespace {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr int kLanes = 32;

__device__ int lane_of_warp() { return static_cast<int>(threadIdx.x % kLanes); }

template <class Value, class Function>
__device__ Value reduced(Value value, const Function& function) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    value = function(value, __shfl_xor_sync(kAllLanes, value, step));
  }
  return value;
}

__device__ int64_t sum_of_lanes(int64_t value) {
  return reduced(value, [](int64_t a, int64_t b) { return a + b; });
}

__device__ int sum_of_lanes(int value) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  return __reduce_add_sync(kAllLanes, value);
#else
  return reduced(value, [](int a, int b) { return a + b; });
#endif
}

__device__ unsigned least_of_lanes(unsigned value) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  return __reduce_min_sync(kAllLanes, value);
#else
  return reduced(value, [](unsigned a, unsigned b) { return min(a, b); });
#endif
}

__device__ uint64_t least_of_lanes(uint64_t value) {
  const auto high = static_cast<unsigned>(value >> 32), low = static_cast<unsigned>(value);
  const unsigned least_high = least_of_lanes(high);
  const unsigned least_low = least_of_lanes(high == least_high ? low : UINT_MAX);
  return static_cast<uint64_t>(least_high) << 32 | least_low;
}

__device__ int64_t greatest_of_lanes(int64_t value) {
  return reduced(value, [](int64_t a, int64_t b) { return max(a, b); });
}

// The bits that are set on any lane.
__device__ unsigned bits_of_lanes(unsigned value) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  return __reduce_or_sync(kAllLanes, value);
#else
  return reduced(value, [](unsigned a, unsigned b) { return a | b; });
#endif
}

}  // namespace
}  // namespace torchembed
