// Rows as the 32 lanes of a warp hold them, four elements a lane, for the kernels of
// update_rows.cu.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "update_rows.h"

namespace torchembed {
namespace {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr int kLanes = 32;
constexpr int kDim = kUpdateDim;
static_assert(kDim == 4 * kLanes, "a lane has four elements of a row");

__device__ int lane_of_warp() { return threadIdx.x % kLanes; }

// A lane's elements of a row.
struct Elements {
  float at[4];

  template <class Function>
  __device__ void for_each(const Function& function) {
#pragma unroll
    for (int i = 0; i < 4; ++i) at[i] = function(at[i], i);
  }
};

// A matrix as a lane sees it: the lane's own elements of each row.
template <class Value>
class LaneOfMatrix {
 public:
  explicit __device__ LaneOfMatrix(Value* matrix)
      : matrix_(matrix), offset_(4 * sizeof(Value) * lane_of_warp()) {
    // The empty asm hides from the compiler how the offset is computed. It would otherwise fold it
    // into the address of each matrix; so it takes one multiply-add for a row's address, whose
    // result all matrices of the same width share.
    asm("" : "+l"(offset_));
  }

  __device__ Value* at(int row) const {
    constexpr int64_t kRowBytes = kDim * sizeof(Value);
    using Byte = std::conditional_t<std::is_const_v<Value>, const char, char>;
    return reinterpret_cast<Value*>(reinterpret_cast<Byte*>(matrix_) + (row * kRowBytes + offset_));
  }

 private:
  Value* matrix_;
  int64_t offset_;
};

// `value`, which is the same on all lanes of the warp, in a form that tells the compiler so: the
// result of a reduction over the warp may be kept in a uniform register, and branches on it do not
// diverge.
__device__ int same_on_all_lanes(int value) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kAllLanes, value);
#else
  return value;
#endif
}

// A lane's elements of a row in the dtype that they have in memory, loaded by one instruction.
// Conversion waits until they are used, so that loads in flight take no more registers than needed.
template <class Value>
struct Packed {
  std::conditional_t<sizeof(Value) == 4, float4, uint2> four;

  __device__ void load(const Value* row) { four = *reinterpret_cast<const decltype(four)*>(row); }

  // Bypasses the first-level cache, which is not coherent with stores of other multiprocessors.
  __device__ void load_fresh(const Value* row) {
    four = __ldcg(reinterpret_cast<const decltype(four)*>(row));
  }

  __device__ Elements elements() const {
    if constexpr (std::is_same_v<Value, float>) {
      return {four.x, four.y, four.z, four.w};
    } else if constexpr (std::is_same_v<Value, __nv_bfloat16>) {
      return {__uint_as_float(four.x << 16), __uint_as_float(four.x & 0xFFFF0000u),
              __uint_as_float(four.y << 16), __uint_as_float(four.y & 0xFFFF0000u)};
    } else {
      const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&four.x));
      const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&four.y));
      return {low.x, low.y, high.x, high.y};
    }
  }
};

__device__ void store_elements(float* row, const Elements& elements) {
  const auto& at = elements.at;
  *reinterpret_cast<float4*>(row) = make_float4(at[0], at[1], at[2], at[3]);
}

// The sum of squares over a row. A butterfly of shuffles adds the same pairs on every lane, and
// float addition commutes, so all lanes get the same bits and none must broadcast its result.
__device__ float sum_squares(const Elements& row) {
  float sum = row.at[0] * row.at[0];
#pragma unroll
  for (int i = 1; i < 4; ++i) sum += row.at[i] * row.at[i];
#pragma unroll
  for (int apart = kLanes / 2; apart > 0; apart /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, apart);
  }
  return sum;
}

}  // namespace
}  // namespace torchembed
