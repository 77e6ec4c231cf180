// Sums of the gradients of runs, in the order of run_sums.py, so that both kernels give the same
// bits.

#pragma once

#include <cuda_runtime.h>

#include "row_elements.cuh"
#include "update_rows.h"

namespace torchembed {
namespace {

constexpr int kChunk = kRunChunk;
static_assert(kChunk == kLanes, "a lane looks up one occurrence of a chunk");
// Rows whose loads are issued before the first of them is used.
template <int kDim>
constexpr int kSumUnroll = kDim <= 128 ? 8 : 1024 / kDim;

__device__ int index_at(const void* indices, bool wide, int64_t at) {
  return wide ? static_cast<int>(static_cast<const int64_t*>(indices)[at])
              : static_cast<const int32_t*>(indices)[at];
}

// The place of the gradient of one occurrence of a row, and its factor.
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

// Adds `found`, the gradient of the occurrence that `lane` holds, to `total`. All lanes call it,
// since the factor comes from that lane by a shuffle.
template <class Grad, int kDim>
__device__ void add_gradient(Elements<kDim>& total, const RowUpdate& update,
                             const Packed<Grad, kDim>& found, const Occurrence& occurrence,
                             int lane) {
  Elements<kDim> gradient = found.elements();
  if (update.scales != nullptr) {
    const float scale = __shfl_sync(kAllLanes, occurrence.scale, lane);
    gradient.for_each([&](float value, int) { return value * scale; });
  }
  total.for_each([&](float value, int i) { return value + gradient.at[i]; });
}

// Adds the gradients of `count` sorted positions, at most kLanes, from `start` on. Each lane looks
// up one occurrence, then all lanes read each gradient.
template <class Grad, int kDim>
__device__ void add_gradients(Elements<kDim>& total, const RowUpdate& update,
                              const LaneOfMatrix<const Grad, kDim>& grad, int start, int count) {
  constexpr int kUnroll = kSumUnroll<kDim>;
  Occurrence mine;
  if (lane_of_warp() < count) mine.find(update, start + lane_of_warp());
#pragma unroll 1
  for (int first = 0; first < count; first += kUnroll) {
    Packed<Grad, kDim> found[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      // Past the end lanes hold row 0, which is loaded and not added: loads without a branch can
      // all be in flight.
      const int row = __shfl_sync(kAllLanes, mine.gradient_row, first + i);
      found[i].load(grad.at(row));
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i < count) add_gradient(total, update, found[i], mine, first + i);
    }
  }
}

// Adds `count` rows of sums from row `first_row` on, which other warps may have written.
template <int kDim>
__device__ void add_sums(Elements<kDim>& total, const LaneOfMatrix<float, kDim>& sums,
                         int first_row, int count) {
  constexpr int kUnroll = kSumUnroll<kDim>;
#pragma unroll 1
  for (int first = 0; first < count; first += kUnroll) {
    Packed<float, kDim> found[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      found[i].load_fresh(sums.at(first_row + min(first + i, count - 1)));
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i >= count) break;
      const Elements<kDim> sum = found[i].elements();
      total.for_each([&](float value, int j) { return value + sum.at[j]; });
    }
  }
}

// Counts a sum that the warp has stored, one of `count`, and returns true on the warp that counted
// last, which then sees the sums of all. No warp waits for another one.
__device__ bool is_last_of(int32_t* num_stored, int count) {
  // A release: __syncwarp orders the stores of all lanes before the first lane's fence, and the
  // fence orders them before its count. Without it another warp could see the count and read old
  // sums.
  __syncwarp();
  __threadfence();
  int before = 0;
  if (lane_of_warp() == 0) before = atomicAdd(num_stored, 1);
  const bool is_last = __shfl_sync(kAllLanes, before, 0) == count - 1;
  if (is_last) {
    // The matching acquire: the sums of other warps must not be read before their counts were.
    __threadfence();
    __syncwarp();
  }
  return is_last;
}

}  // namespace
}  // namespace torchembed
