// The counter-based random bits of random_bits.h, which is for the host alone.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace torchembed {
namespace {

constexpr uint64_t kRandomStep = 0x9E3779B97F4A7C15;

__device__ uint64_t mixed(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

__device__ uint64_t random_bits_of(uint64_t key, uint64_t counter) {
  return mixed(key + (counter + 1) * kRandomStep);
}

}  // namespace
}  // namespace torchembed
