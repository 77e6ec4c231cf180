// Rows and gradients on their way from memory into a multiprocessor's shared memory.
//
// They take no registers there, so that many can be on their way to each warp while it computes
// with those that have come. Each lane copies what it reads itself, so that no lane waits for
// another.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "row_elements.cuh"
#include "row_step.cuh"

namespace torchembed {
namespace {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define TORCHEMBED_ASYNC(...) asm volatile(__VA_ARGS__)
#else
#define TORCHEMBED_ASYNC(...)  // not launched there
#endif

// Lets kBytes come from `source` to `target`, an address in shared memory.
template <int kBytes>
__device__ void fetch_bytes(uint32_t target, const void* source) {
  if constexpr (kBytes == 16) {
    TORCHEMBED_ASYNC("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target),
                     "l"(source) : "memory");
  } else {
    static_assert(kBytes == 8);
    TORCHEMBED_ASYNC("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(target),
                     "l"(source) : "memory");
  }
}

// Makes one group of what was fetched since the last one.
__device__ void commit_fetches() { TORCHEMBED_ASYNC("cp.async.commit_group;" :: : "memory"); }

// Until all groups but the last kNumLeft have come.
template <int kNumLeft>
__device__ void wait_for_fetches() {
  TORCHEMBED_ASYNC("cp.async.wait_group %0;" ::"n"(kNumLeft) : "memory");
}

// A warp's stages, each with room for a row, its state where that is a row too, and a gradient.
template <class Grad, bool kRowwise>
class Arrivals {
 public:
  static constexpr int kRowBytes = kDim * sizeof(float), kGradBytes = kDim * sizeof(Grad);
  static constexpr int kStageBytes = (kRowwise ? 1 : 2) * kRowBytes + kGradBytes;

  __device__ Arrivals(char* shared, int first_stage)
      : lane_(shared + first_stage * kStageBytes + lane_of_warp() * 16),
        address_(static_cast<uint32_t>(__cvta_generic_to_shared(lane_))),
        gradient_offset_(kStageBytes - kGradBytes -
                         lane_of_warp() * (16 - 4 * static_cast<int>(sizeof(Grad)))) {}

  __device__ void fetch(int stage, const Matrices<Grad>& matrices, int gradient_row,
                        int row) const {
    const uint32_t target = address_ + stage * kStageBytes;
    fetch_bytes<16>(target, matrices.weight.at(row));
    if constexpr (!kRowwise) fetch_bytes<16>(target + kRowBytes, matrices.state.at(row));
    fetch_bytes<4 * sizeof(Grad)>(target + gradient_offset_, matrices.grad.at(gradient_row));
  }

  __device__ Packed<float> weight(int stage) const { return at<float>(stage, 0); }
  __device__ Packed<float> state(int stage) const { return at<float>(stage, kRowBytes); }
  __device__ Packed<Grad> gradient(int stage) const { return at<Grad>(stage, gradient_offset_); }

 private:
  template <class Value>
  __device__ Packed<Value> at(int stage, int offset) const {
    Packed<Value> packed;
    packed.load(reinterpret_cast<const Value*>(lane_ + stage * kStageBytes + offset));
    return packed;
  }

  const char* lane_;
  uint32_t address_;
  int gradient_offset_;
};

}  // namespace
}  // namespace torchembed
