// Sums of the gradients of the runs that a warp has at a time, which are narrow: those of
// run_sums.cuh for a half or a quarter of the lanes each, here called a team. All lanes of the warp
// call these functions together; a team with nothing to sum says so by a count of 0.

#pragma once

#include <cuda_runtime.h>

#include "row_elements.cuh"
#include "run_sums.cuh"
#include "update_rows.h"

namespace torchembed {
namespace {

// Rows of a team whose loads are issued before the first of them is used.
template <int kDim>
constexpr int kTeamUnroll = RowShape<kDim>::kParts > 1 ? 2 : 4;

template <int kDim>
__device__ int team_of_warp() {
  return lane_of_warp() / RowShape<kDim>::kLanesOfRow;
}

// The value that lane `lane` of the lane's own team has.
template <int kDim, class Value>
__device__ Value value_of_lane(Value value, int lane) {
  return __shfl_sync(kAllLanes, value, lane, RowShape<kDim>::kLanesOfRow);
}

// The greatest of the values that the lanes of the warp have.
__device__ int greatest_of_lanes(int value) { return __reduce_max_sync(kAllLanes, value); }

// Adds `found` to the totals of the teams for which `counts`. It is the gradient of the occurrence
// that lane `lane` of the team holds.
template <class Grad, int kDim>
__device__ void add_gradient_of_team(Elements<kDim>& total, const RowUpdate& update,
                                     const Packed<Grad, kDim>& found, const Occurrence& occurrence,
                                     int lane, bool counts) {
  Elements<kDim> gradient = found.elements();
  if (update.scales != nullptr) {
    const float scale = value_of_lane<kDim>(occurrence.scale, lane);
    gradient.for_each([&](float value, int) { return value * scale; });
  }
  if (counts) total.for_each([&](float value, int i) { return value + gradient.at[i]; });
}

// Adds the gradients of `count` sorted positions, at most kChunk, from `start` on.
template <class Grad, int kDim>
__device__ void add_gradients_of_team(Elements<kDim>& total, const RowUpdate& update,
                                      const LaneOfMatrix<const Grad, kDim>& grad, int start,
                                      int count) {
  constexpr int kTeam = RowShape<kDim>::kLanesOfRow, kUnroll = kTeamUnroll<kDim>;
  // Each lane looks up several occurrences, all at once.
  Occurrence mine[kChunk / kTeam];
#pragma unroll
  for (int i = 0; i < kChunk / kTeam; ++i) {
    const int number = i * kTeam + lane_of_row<kDim>();
    if (number < count) mine[i].find(update, start + number);
  }
  const int most = greatest_of_lanes(count);
#pragma unroll
  for (int i = 0; i < kChunk / kTeam; ++i) {
#pragma unroll 1
    for (int first = 0; first < kTeam && i * kTeam + first < most; first += kUnroll) {
      Packed<Grad, kDim> found[kUnroll];
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        // Past the end lanes hold row 0, as in add_gradients.
        found[j].load(grad.at(value_of_lane<kDim>(mine[i].gradient_row, first + j)));
      }
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        const int number = i * kTeam + first + j;
        add_gradient_of_team(total, update, found[j], mine[i], first + j, number < count);
      }
    }
  }
}

// Adds `count` rows of sums from row `first_row` on, which other warps may have written.
template <int kDim>
__device__ void add_sums_of_team(Elements<kDim>& total, const LaneOfMatrix<float, kDim>& sums,
                                 int first_row, int count) {
  constexpr int kUnroll = kTeamUnroll<kDim>;
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

// For the teams for which `counts`: counts a sum that the team has stored, one of `count`, and
// returns true on the team that counted last, which then sees the sums of all.
template <int kDim>
__device__ bool is_last_team_of(bool counts, int32_t* num_stored, int count) {
  // Release and acquire are those of is_last_of.
  __syncwarp();
  __threadfence();
  int before = 0;
  if (counts && lane_of_row<kDim>() == 0) before = atomicAdd(num_stored, 1);
  const bool is_last = value_of_lane<kDim>(before, 0) == count - 1 && counts;
  __threadfence();
  __syncwarp();
  return is_last;
}

}  // namespace
}  // namespace torchembed
