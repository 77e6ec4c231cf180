// Sums of the gradients of runs, in the order of run_sums.py.

#pragma once

#include <cuda_runtime.h>

#include "row_elements.cuh"
#include "update_rows.h"

namespace torchembed {
namespace {

constexpr int kChunk = kRunChunk;
static_assert(kChunk == kLanes, "a lane looks up one occurrence of a chunk");
// Rows that are read together.
constexpr int kSumUnroll = 8;

__device__ int index_at(const void* indices, bool wide, int64_t at) {
  return wide ? static_cast<int>(static_cast<const int64_t*>(indices)[at])
              : static_cast<const int32_t*>(indices)[at];
}

// Where the gradient of one occurrence lies.
struct Occurrence {
  int gradient_row = 0;
  float scale = 1.0f;

  __device__ void find(const RowUpdate& update, int sorted_position) {
    gradient_row = update.order[sorted_position];
    if (update.scales != nullptr) scale = update.scales[gradient_row];
    if (update.gradient_rows != nullptr) {
      gradient_row = index_at(update.gradient_rows, update.gradient_rows_are_wide, gradient_row);
    }
  }
};

// Adds to `total` the gradient that `occurrence` of `lane` found.
template <class Grad>
__device__ void add_gradient(Elements& total, const RowUpdate& update, const Packed<Grad>& found,
                             const Occurrence& occurrence, int lane) {
  Elements gradient = found.elements();
  if (update.scales != nullptr) {
    const float scale = __shfl_sync(kAllLanes, occurrence.scale, lane);
    gradient.for_each([&](float value, int) { return value * scale; });
  }
  total.for_each([&](float value, int i) { return value + gradient.at[i]; });
}

// Adds the gradients of `count` sorted positions, at most kLanes, from `start` on.
template <class Grad>
__device__ void add_gradients(Elements& total, const RowUpdate& update,
                              const LaneOfMatrix<const Grad>& grad, int start, int count) {
  Occurrence mine;
  if (lane_of_warp() < count) mine.find(update, start + lane_of_warp());
#pragma unroll 1
  for (int first = 0; first < count; first += kSumUnroll) {
    Packed<Grad> found[kSumUnroll];
#pragma unroll
    for (int i = 0; i < kSumUnroll; ++i) {
      const int row = __shfl_sync(kAllLanes, mine.gradient_row, first + i);
      found[i].load(grad.at(row));
    }
#pragma unroll
    for (int i = 0; i < kSumUnroll; ++i) {
      if (first + i < count) add_gradient(total, update, found[i], mine, first + i);
    }
  }
}

// Adds `count` rows of sums from row `first_row` on, which other warps may have written.
__device__ void add_sums(Elements& total, const LaneOfMatrix<float>& sums, int first_row,
                         int count) {
#pragma unroll 1
  for (int first = 0; first < count; first += kSumUnroll) {
    Packed<float> found[kSumUnroll];
#pragma unroll
    for (int i = 0; i < kSumUnroll; ++i) {
      found[i].load_fresh(sums.at(first_row + min(first + i, count - 1)));
    }
#pragma unroll
    for (int i = 0; i < kSumUnroll; ++i) {
      if (first + i >= count) break;
      const Elements sum = found[i].elements();
      total.for_each([&](float value, int j) { return value + sum.at[j]; });
    }
  }
}

// Says that a warp has stored one of `count` sums, and returns whether all of them are now there.
__device__ bool is_last_of(int32_t* num_stored, int count) {
  // The first lane speaks for all: theirs are stored before its fence, and they read after it.
  __syncwarp();
  __threadfence();
  int before = 0;
  if (lane_of_warp() == 0) before = atomicAdd(num_stored, 1);
  const bool is_last = __shfl_sync(kAllLanes, before, 0) == count - 1;
  if (is_last) {
    __threadfence();
    __syncwarp();
  }
  return is_last;
}

}  // namespace
}  // namespace torchembed
