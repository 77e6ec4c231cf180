// Asynchronous copies (cp.async) of rows and gradients from global into shared memory.
//
// A copy in flight takes no registers, so that each warp can have many in flight while it computes
// with those that have completed. Each lane copies exactly the bytes that it reads itself: waiting
// for its own copies is enough, and no barrier between lanes is needed.

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
// cp.async needs compute capability 8.0. Older GPUs are never given these kernels, but nvcc
// compiles them for each generation.
#define TORCHEMBED_ASYNC(...)
#endif

// Starts a copy of kBytes from `source` to `target`, an address in shared memory. Both must be
// aligned to kBytes. Only copies of 16 bytes can bypass the first-level cache (.cg).
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

// The same of bytes that nobody else reads: their place in the cache is the first to be given up.
template <int kBytes>
__device__ void fetch_cold_bytes(uint32_t target, const void* source, uint64_t policy) {
  if constexpr (kBytes == 16) {
    TORCHEMBED_ASYNC("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(target),
                     "l"(source), "l"(policy) : "memory");
  } else {
    static_assert(kBytes == 8);
    TORCHEMBED_ASYNC("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], 8, %2;" ::"r"(target),
                     "l"(source), "l"(policy) : "memory");
  }
}

__device__ uint64_t policy_of_cold_bytes() {
  uint64_t policy = 0;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

// Makes one group of the copies started since the last group. A group may be empty, so that the
// number of groups says how far the pipeline is even where a warp has run out of rows.
__device__ void commit_fetches() { TORCHEMBED_ASYNC("cp.async.commit_group;" :: : "memory"); }

// Waits until all groups but the last kNumLeft have completed.
template <int kNumLeft>
__device__ void wait_for_fetches() {
  TORCHEMBED_ASYNC("cp.async.wait_group %0;" ::"n"(kNumLeft) : "memory");
}

// A warp's pipeline stages in shared memory. A stage holds a row of Values, its states where these
// are rows too, and a gradient; of narrow rows it holds as many as the warp does.
template <class Value, class Grad, int kDim, Rule kRule>
class Arrivals {
  using Shape = RowShape<kDim>;
  static constexpr int kNumStates = kRule == Rule::kAdam ? 2 : has_row_state<kRule> ? 1 : 0;

 public:
  static constexpr int kRowBytes = Shape::kRows * kDim * sizeof(Value);
  static constexpr int kStateBytes = Shape::kRows * kDim * sizeof(float);
  static constexpr int kGradBytes = Shape::kRows * kDim * sizeof(Grad);
  static constexpr int kStageBytes = kRowBytes + kNumStates * kStateBytes + kGradBytes;

  __device__ Arrivals(char* shared, int first_stage)
      : lane_(shared + first_stage * kStageBytes + first_element() * int(sizeof(float))),
        address_(static_cast<uint32_t>(__cvta_generic_to_shared(lane_))),
        // lane_ steps by the bytes of a lane's float32 elements, but its 16-bit ones take half as
        // many: the difference is subtracted here, so that one base address serves rows, states
        // and gradients.
        row_offset_(-first_element() * int(sizeof(float) - sizeof(Value))),
        gradient_offset_(kStageBytes - kGradBytes -
                         first_element() * int(sizeof(float) - sizeof(Grad))) {}

  // Starts to copy the row and its states.
  __device__ void fetch_row(int stage, const Matrices<Value, Grad, kDim>& matrices, int row) const {
    const uint32_t target = address_ + stage * kStageBytes;
    fetch_parts(target + row_offset_, matrices.weight.at(row));
    if constexpr (kNumStates > 0) fetch_parts(target + kRowBytes, matrices.state0.at(row));
    if constexpr (kNumStates > 1) {
      fetch_parts(target + kRowBytes + kStateBytes, matrices.state1.at(row));
    }
  }

  // The same, with a policy_of_cold_bytes.
  __device__ void fetch_cold_row(int stage, const Matrices<Value, Grad, kDim>& matrices, int row,
                                 uint64_t policy) const {
    const uint32_t target = address_ + stage * kStageBytes;
    fetch_cold_parts(target + row_offset_, matrices.weight.at(row), policy);
    if constexpr (kNumStates > 0) {
      fetch_cold_parts(target + kRowBytes, matrices.state0.at(row), policy);
    }
    if constexpr (kNumStates > 1) {
      fetch_cold_parts(target + kRowBytes + kStateBytes, matrices.state1.at(row), policy);
    }
  }

  __device__ void fetch_gradient(int stage, const Matrices<Value, Grad, kDim>& matrices,
                                 int row) const {
    fetch_parts(address_ + stage * kStageBytes + gradient_offset_, matrices.grad.at(row));
  }

  __device__ Packed<Value, kDim> weight(int stage) const { return at<Value>(stage, row_offset_); }
  __device__ Packed<float, kDim> state0(int stage) const { return at<float>(stage, kRowBytes); }
  __device__ Packed<float, kDim> state1(int stage) const {
    return at<float>(stage, kRowBytes + kStateBytes);
  }
  __device__ Packed<Grad, kDim> gradient(int stage) const {
    return at<Grad>(stage, gradient_offset_);
  }

 private:
  template <class Element>
  static constexpr int kLaneBytes = Shape::kVector * sizeof(Element);

  // The place of the lane's first element among those of the rows of a stage.
  static __device__ int first_element() {
    return lane_of_warp() / Shape::kLanesOfRow * kDim + lane_of_row<kDim>() * Shape::kVector;
  }

  template <class Element>
  static __device__ void fetch_parts(uint32_t target, Element* row) {
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part) {
      fetch_bytes<kLaneBytes<Element>>(target + part * Shape::kLanesOfRow * kLaneBytes<Element>,
                                       row + part * Shape::kPart);
    }
  }

  template <class Element>
  static __device__ void fetch_cold_parts(uint32_t target, Element* row, uint64_t policy) {
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part) {
      fetch_cold_bytes<kLaneBytes<Element>>(
          target + part * Shape::kLanesOfRow * kLaneBytes<Element>, row + part * Shape::kPart,
          policy);
    }
  }

  template <class Element>
  __device__ Packed<Element, kDim> at(int stage, int offset) const {
    Packed<Element, kDim> packed;
    packed.load(reinterpret_cast<const Element*>(lane_ + stage * kStageBytes + offset));
    return packed;
  }

  const char* lane_;
  uint32_t address_;
  int row_offset_;
  int gradient_offset_;
};

}  // namespace
}  // namespace torchembed
