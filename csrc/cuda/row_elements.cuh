// Rows as the 32 lanes of a warp hold them, for the kernels that update rows.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace torchembed {
namespace {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr int kLanes = 32;

__device__ int lane_of_warp() { return threadIdx.x % kLanes; }

// How the lanes of a warp share a row: kParts times each has kVector neighbouring elements, which
// it loads and stores by one instruction, and neighbouring lanes have neighbouring ones. A row of
// less than 128 columns has a half or a quarter of the lanes, so that a warp holds kRows of them.
template <int kDim>
struct RowShape {
  static constexpr int kVector = 4;
  static constexpr int kLanesOfRow = kDim >= 128 ? kLanes : kDim == 64 ? kLanes / 2 : kLanes / 4;
  static constexpr int kRows = kLanes / kLanesOfRow;
  static constexpr int kPart = kVector * kLanesOfRow;
  static constexpr int kParts = kDim / kPart;
  static constexpr int kCount = kVector * kParts;
  static_assert(kParts * kPart == kDim, "lanes have equally many elements");
};

// The lane's number among those that share its row.
template <int kDim>
__device__ int lane_of_row() {
  return threadIdx.x % RowShape<kDim>::kLanesOfRow;
}

// A lane's elements of a row.
template <int kDim>
struct Elements {
  static constexpr int kCount = RowShape<kDim>::kCount;

  float at[kCount];

  template <class Function>
  __device__ void for_each(const Function& function) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) at[i] = function(at[i], i);
  }
};

// A matrix as a lane sees it: the lane's own elements of each row.
template <class Value, int kDim>
class LaneOfMatrix {
 public:
  explicit __device__ LaneOfMatrix(Value* matrix)
      : matrix_(matrix), offset_(RowShape<kDim>::kVector * sizeof(Value) * lane_of_row<kDim>()) {
    // The empty asm hides from the compiler how the offset is computed. It would otherwise fold it
    // into the address of each matrix; so it takes one multiply-add for a row's address, whose
    // result all matrices of the same width share.
    asm("" : "+l"(offset_));
  }

  // The first of the lane's elements; those of the next part are RowShape::kPart elements on.
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

// A lane's elements of a row in the dtype that they have in memory, loaded by one instruction for
// each part. Conversion waits until they are used, so that loads in flight take no more registers
// than needed.
template <class Value, int kDim>
struct Packed {
  using Shape = RowShape<kDim>;
  using Four = std::conditional_t<sizeof(Value) == 4, float4, uint2>;

  Four parts[Shape::kParts];

  __device__ void load(const Value* row) {
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part) {
      parts[part] = *reinterpret_cast<const Four*>(row + part * Shape::kPart);
    }
  }

  // Bypasses the first-level cache, which is not coherent with stores of other multiprocessors.
  __device__ void load_fresh(const Value* row) {
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part) {
      parts[part] = __ldcg(reinterpret_cast<const Four*>(row + part * Shape::kPart));
    }
  }

  __device__ Elements<kDim> elements() const {
    Elements<kDim> found;
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part) {
      const float4 four = converted(parts[part]);
      float* const at = found.at + part * Shape::kVector;
      at[0] = four.x, at[1] = four.y, at[2] = four.z, at[3] = four.w;
    }
    return found;
  }

 private:
  static __device__ float4 converted(const Four& four) {
    if constexpr (std::is_same_v<Value, float>) {
      return four;
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

// kIsCold stores are the first to be evicted from the cache.
template <bool kIsCold = false, class Four, class Value>
__device__ void store_four(Value* target, const Four& four) {
  if constexpr (kIsCold) {
    __stcs(reinterpret_cast<Four*>(target), four);
  } else {
    *reinterpret_cast<Four*>(target) = four;
  }
}

template <bool kIsCold = false, int kDim>
__device__ void store_elements(float* row, const Elements<kDim>& elements) {
  using Shape = RowShape<kDim>;
#pragma unroll
  for (int part = 0; part < Shape::kParts; ++part) {
    const float* const at = elements.at + part * Shape::kVector;
    store_four<kIsCold>(row + part * Shape::kPart, make_float4(at[0], at[1], at[2], at[3]));
  }
}

// The sum of squares over a row, in the order of the Triton kernel: four neighbouring elements,
// then the 32 such sums of a part, then the parts. A butterfly of shuffles adds the same pairs on
// every lane, and float addition commutes, so all lanes get the same bits and none must broadcast
// its result.
template <int kDim>
__device__ float sum_squares_by_fours(const Elements<kDim>& row) {
  using Shape = RowShape<kDim>;
  float sums[Shape::kParts];
#pragma unroll
  for (int part = 0; part < Shape::kParts; ++part) {
    const float* const at = row.at + part * Shape::kVector;
    float sum = at[0] * at[0];
#pragma unroll
    for (int i = 1; i < Shape::kVector; ++i) sum += at[i] * at[i];
#pragma unroll
    for (int apart = kLanes / 2; apart > 0; apart /= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, apart);
    }
    sums[part] = sum;
  }
#pragma unroll
  for (int apart = Shape::kParts / 2; apart > 0; apart /= 2) {
#pragma unroll
    for (int part = 0; part < apart; ++part) sums[part] += sums[part + apart];
  }
  return sums[0];
}

// The same of a row that has a part of the lanes. The Triton kernel adds the sums of four elements
// that lie half a row apart, then those that lie a quarter apart, and so on, where a row counts as
// long as the next power of two and ends in zeros: first the parts, then the lanes.
template <int kDim>
__device__ float sum_squares_of_narrow_row(const Elements<kDim>& row) {
  using Shape = RowShape<kDim>;
  static_assert(Shape::kParts <= 4);
  float sums[4] = {};
#pragma unroll
  for (int part = 0; part < Shape::kParts; ++part) {
    const float* const at = row.at + part * Shape::kVector;
    sums[part] = at[0] * at[0];
#pragma unroll
    for (int i = 1; i < Shape::kVector; ++i) sums[part] += at[i] * at[i];
  }
#pragma unroll
  for (int apart = 2; apart > 0; apart /= 2) {
#pragma unroll
    for (int part = 0; part < apart; ++part) {
      if (part + apart < Shape::kParts) sums[part] += sums[part + apart];
    }
  }
  float sum = sums[0];
#pragma unroll
  for (int apart = Shape::kLanesOfRow / 2; apart > 0; apart /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, apart);
  }
  return sum;
}

// The same where the Triton kernel's threads have eight neighbouring elements, as they have of rows
// of 16 bits: eight neighbouring elements one after the other, then the 32 such sums of two parts,
// or the 16 of a single one, then the pairs of parts. Of eight neighbouring elements an even lane
// has the first four and the next lane the others, so the odd lanes' sums count.
template <int kDim>
__device__ float sum_squares_by_eights(const Elements<kDim>& row) {
  using Shape = RowShape<kDim>;
  constexpr int kOfPair = Shape::kParts == 1 ? 1 : 2, kPairs = Shape::kParts / kOfPair;
  static_assert(kPairs * kOfPair == Shape::kParts);
  float sums[kPairs];
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    float both = 0.0f;
#pragma unroll
    for (int part = kOfPair * pair; part < kOfPair * (pair + 1); ++part) {
      const float* const at = row.at + part * Shape::kVector;
      float first = at[0] * at[0];
#pragma unroll
      for (int i = 1; i < Shape::kVector; ++i) first += at[i] * at[i];
      float sum = __shfl_up_sync(kAllLanes, first, 1);
#pragma unroll
      for (int i = 0; i < Shape::kVector; ++i) sum += at[i] * at[i];
      both = part == kOfPair * pair ? sum : both + sum;
    }
#pragma unroll
    for (int apart = kLanes / 2; apart > 1; apart /= 2) {
      both += __shfl_xor_sync(kAllLanes, both, apart);
    }
    sums[pair] = both;
  }
#pragma unroll
  for (int apart = kPairs / 2; apart > 0; apart /= 2) {
#pragma unroll
    for (int pair = 0; pair < apart; ++pair) sums[pair] += sums[pair + apart];
  }
  return __shfl_sync(kAllLanes, sums[0], 1);
}

// The sum of squares over a row's gradient in the order of the Triton kernel for rows of Values.
template <class Value, int kDim>
__device__ float sum_squares(const Elements<kDim>& row) {
  if constexpr (RowShape<kDim>::kRows > 1) {
    return sum_squares_of_narrow_row(row);
  } else if constexpr (sizeof(Value) == sizeof(float)) {
    return sum_squares_by_fours(row);
  } else {
    return sum_squares_by_eights(row);
  }
}

}  // namespace
}  // namespace torchembed
