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

// `value` as a Value, by the upper bits of `random`: noise below the last bit that Value keeps is
// added, and the sum is cut off. What Value holds stays; infinities, NaN and float16's overflow are
// rounded to nearest.
template <class Value>
__device__ float rounded_at_random(float value, uint64_t random) {
  const uint32_t bits = __float_as_uint(value);
  const bool is_finite = (bits & 0x7F800000u) != 0x7F800000u;
  const uint32_t upper = static_cast<uint32_t>(random >> 32);
  if constexpr (std::is_same_v<Value, __nv_bfloat16>) {
    return is_finite ? __uint_as_float((bits + (upper >> 16)) & 0xFFFF0000u) : value;
  } else {
    const uint32_t noise = upper >> 19;
    const float normal = __uint_as_float((bits + noise) & 0xFFFFE000u);
    // Below 2**-14 float16 is spaced evenly, by 2**-24.
    const float steps = floorf(fabsf(value) * 0x1p24f + static_cast<float>(noise) * 0x1p-13f);
    const float subnormal =
        __uint_as_float(__float_as_uint(steps * 0x1p-24f) | (bits & 0x80000000u));
    const float found = fabsf(value) < 0x1p-14f ? subnormal : normal;
    return is_finite && fabsf(found) <= 65504.0f ? found : value;
  }
}

// How a row of Values is rounded; nothing for float.
template <class Value>
struct RowRounding {
  bool is_random = false;
  uint64_t key = 0;  // of the row and the step

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
    // A key's bits of column c + n are those of another key of column c.
    if (update.first_columns != nullptr) key += update.first_columns[table] * kRandomStep;
  }

  // The same as held by `lane`.
  __device__ RowRounding of_lane(int lane) const {
    return {is_random, __shfl_sync(kAllLanes, key, lane)};
  }

  // Stores the elements of the lane to its place in the row.
  template <bool kIsCold, int kDim>
  __device__ void store(Value* row, Elements<kDim> elements) const {
    using Shape = RowShape<kDim>;
    if (is_random) {
      const uint64_t first = Shape::kVector * lane_of_warp();
      elements.for_each([&](float value, int i) {
        const int column = i / Shape::kVector * Shape::kPart + i % Shape::kVector;
        return rounded_at_random<Value>(value, random_bits_of(key, first + column));
      });
    }
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part) {
      const float* const at = elements.at + part * Shape::kVector;
      const uint2 four{pair(at[0], at[1]), pair(at[2], at[3])};
      store_four<kIsCold>(row + part * Shape::kPart, four);
    }
  }

 private:
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
