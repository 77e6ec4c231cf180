// Rounding of updated rows to the 16-bit dtypes, up or down at random or to nearest: bit for bit
// that of rounding.py.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "random_bits.cuh"
#include "row_elements.cuh"
#include "update_rows.h"

namespace torchembed {
namespace {

// `value` as a Value, by the upper 16 bits of `random`: noise below the last bit that Value keeps
// is added, and the sum is cut off. What Value holds stays; infinities, NaN and float16's overflow
// are rounded to nearest.
template <class Value>
__device__ float rounded_at_random(float value, uint32_t random) {
  const uint32_t bits = __float_as_uint(value);
  const bool is_finite = (bits & 0x7F800000u) != 0x7F800000u;
  if constexpr (std::is_same_v<Value, __nv_bfloat16>) {
    return is_finite ? __uint_as_float((bits + (random >> 16)) & 0xFFFF0000u) : value;
  } else {
    const uint32_t noise = random >> 19;
    const float normal = __uint_as_float((bits + noise) & 0xFFFFE000u);
    // Below 2**-14 float16 is spaced evenly, by 2**-24.
    const float steps = floorf(fabsf(value) * 0x1p24f + static_cast<float>(noise) * 0x1p-13f);
    const float subnormal =
        __uint_as_float(__float_as_uint(steps * 0x1p-24f) | (bits & 0x80000000u));
    const float found = fabsf(value) < 0x1p-14f ? subnormal : normal;
    return is_finite && fabsf(found) <= 65504.0f ? found : value;
  }
}

// How a row of Values is rounded; nothing for float. 64 random bits are drawn for each group of
// four columns, and give 16 to each, the upper ones to the first.
template <class Value>
struct RowRounding {
  bool is_random = false;
  int first_column = 0;  // its place among the four columns of its group
  uint64_t key = 0;      // of the row and the step, for the groups from that of the first column on

  // Finds the key of `row`. All lanes may have rows of their own.
  __device__ void find(const RowUpdate& update, int row) {
    is_random = update.row_keys != nullptr;
    if (!is_random) return;
    // The last table that begins at or before the row, so never one without rows.
    int table = 0;
    for (int left = update.num_tables - 1; left > 0;) {
      const int half = (left + 1) / 2;
      if (update.row_offsets[table + half] <= row) table += half;
      left -= half;
    }
    const int64_t step = static_cast<int64_t>(*update.step);
    key = random_bits_of(random_bits_of(update.row_keys[table], row), step);
    if (update.first_columns == nullptr) return;
    // A key's bits of group g + n are those of another key of group g.
    const uint64_t first = update.first_columns[table];
    key += first / 4 * kRandomStep;
    first_column = first % 4;
  }

  // The same as held by `lane`.
  __device__ RowRounding of_lane(int lane) const {
    return {is_random, __shfl_sync(kAllLanes, first_column, lane),
            __shfl_sync(kAllLanes, key, lane)};
  }

  // Stores the elements of the lane to its place in the row.
  template <bool kIsCold, int kDim>
  __device__ void store(Value* row, Elements<kDim> elements) const {
    using Shape = RowShape<kDim>;
    if (is_random) {
      static_assert(Shape::kVector == 4 && Shape::kPart % 4 == 0);
#pragma unroll
      for (int part = 0; part < Shape::kParts; ++part) {
        const uint64_t random = bits_of_four(part * Shape::kPart / 4 + lane_of_warp());
        float* const at = elements.at + part * Shape::kVector;
#pragma unroll
        for (int i = 0; i < Shape::kVector; ++i) {
          at[i] = rounded_at_random<Value>(at[i], static_cast<uint32_t>(random << 16 * i >> 32));
        }
      }
    }
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part) {
      const float* const at = elements.at + part * Shape::kVector;
      const uint2 four{pair(at[0], at[1]), pair(at[2], at[3])};
      store_four<kIsCold>(row + part * Shape::kPart, four);
    }
  }

 private:
  // The random bits of columns [4 * four, 4 * four + 4) of the row.
  __device__ uint64_t bits_of_four(int four) const {
    uint64_t bits = random_bits_of(key, four);
    if (first_column != 0) {  // they are in two groups
      bits <<= 16 * first_column;
      bits |= random_bits_of(key, four + 1) >> (64 - 16 * first_column);
    }
    return bits;
  }

  static __device__ uint32_t pair(float low, float high) {
    if constexpr (std::is_same_v<Value, __nv_bfloat16>) {
      const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
      return *reinterpret_cast<const uint32_t*>(&both);
    } else {
      const __half2 both = __floats2half2_rn(low, high);
      return *reinterpret_cast<const uint32_t*>(&both);
    }
  }
};

// Float32 rows are not rounded.
template <>
struct RowRounding<float> {
  __device__ void find(const RowUpdate&, int) {}
  __device__ RowRounding of_lane(int) const { return {}; }
};

}  // namespace
}  // namespace torchembed
