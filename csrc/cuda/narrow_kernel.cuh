// Updates of rows as update_kernel.cuh, with the same sums, for float32 rows of less than 128
// columns.
//
// One narrow row does not have work for all lanes of a warp, and what leads to a row costs as many
// instructions as for a wide one. So a warp has two or four rows at a time, each on a team of its
// lanes. The teams divide the occurrences of a block of short runs: each has neighbouring runs as
// they come, and about equally many occurrences. They go through them side by side, one occurrence
// of each team at a time; a team that is done early computes what nobody reads. Of chunks each team
// has one of its own.
//
// The byte floor is that of update_kernel.cuh.

#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "arrivals.cuh"
#include "narrow_sums.cuh"
#include "row_step.cuh"
#include "update_kernel.cuh"
#include "update_rows.h"

namespace torchembed {
namespace {

// Pipeline stages of a warp. Rows in three parts take much shared memory, and so have fewer.
template <int kDim>
constexpr int kTeamStages = RowShape<kDim>::kParts > 1 ? 3 : 4;
template <class Grad, int kDim, Rule kRule>
constexpr int kBytesOfTeams = kTeamStages<kDim> * Arrivals<float, Grad, kDim, kRule>::kStageBytes;
// Lanes have three times as many elements of such rows, and need registers for them.
template <class Grad, int kDim, Rule kRule>
constexpr int kMostWarpsOfTeams = std::min(RowShape<kDim>::kParts > 1 ? 16 : kMostWarps,
                                           kMostSharedBytes / kBytesOfTeams<Grad, kDim, kRule>);

// As sum_chunk, for a chunk of each team; for none where `run` is -1.
template <class Grad, int kDim, Rule kRule>
__device__ void sum_chunks_of_teams(const RowUpdate& update,
                                    const Matrices<float, Grad, kDim>& matrices, float lr,
                                    int window, int run) {
  bool counts = run >= 0;
  const int start = counts ? update.starts[run] : 0;
  const int length = counts ? update.starts[run + 1] - start : 0;
  const int num_chunks = length / kChunk, num_groups = num_chunks / kChunk;
  const int num_left = num_chunks % kChunk;
  const int first_window = start / kChunk, first_group = first_window / kChunk;
  const int chunk = window - first_window;

  Elements<kDim> total{};
  add_gradients_of_team(total, update, matrices.grad, start + chunk * kChunk, counts ? kChunk : 0);
  const LaneOfMatrix<float, kDim> chunk_sums(update.chunk_sums), group_sums(update.group_sums);
  if (counts) store_elements(chunk_sums.at(window), total);
  const int group = chunk / kChunk;
  const bool is_grouped = counts && group < num_groups;
  if (__any_sync(kAllLanes, is_grouped)) {
    const bool is_last = is_last_team_of<kDim>(
        is_grouped, update.num_grouped + first_group + (is_grouped ? group : 0), kChunk);
    if (is_last) {
      total = Elements<kDim>{};
      add_sums_of_team(total, chunk_sums, first_window + group * kChunk, kChunk);
      store_elements(group_sums.at(first_group + group), total);
    }
    counts = counts && (!is_grouped || is_last);
  }
  if (!__any_sync(kAllLanes, counts)) return;
  counts = is_last_team_of<kDim>(counts, update.num_summed + first_window, num_groups + num_left);
  if (!__any_sync(kAllLanes, counts)) return;

  int row = 0;
  Row<float, kDim, kRule> old{};
  total = Elements<kDim>{};
  if (counts) {
    row = index_at(update.unique_rows, update.rows_are_wide, run);
    old.load(update, matrices, row);
    add_sums_of_team(total, group_sums, first_group, num_groups);
    add_sums_of_team(total, chunk_sums, first_window + num_groups * kChunk, num_left);
  }
  __syncwarp();
  const int rest = length % kChunk;
  add_gradients_of_team(total, update, matrices.grad, start + length - rest, counts ? rest : 0);
  old.step(update, matrices, lr, row, total, {}, counts);
}

// Updates the rows of short runs, one run on each lane that has one.
template <class Grad, int kDim, Rule kRule>
__device__ void update_short_runs_by_teams(const RowUpdate& update,
                                           const Matrices<float, Grad, kDim>& matrices, float lr,
                                           const Arrivals<float, Grad, kDim, kRule>& arrivals,
                                           uint32_t run_of_lane, bool has_run) {
  constexpr int kTeam = RowShape<kDim>::kLanesOfRow, kTeams = RowShape<kDim>::kRows;
  constexpr int kStagesOfTeam = kTeamStages<kDim>;
  const int lane = lane_of_warp();
  int row = 0, start = 0, length = 0;
  if (has_run) {
    row = index_at(update.unique_rows, update.rows_are_wide, run_of_lane);
    start = update.starts[run_of_lane];
    length = update.starts[run_of_lane + 1] - start;
    if (length >= kChunk) length = 0;
  }
  int up_to = length;  // occurrences of this run and of those before
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, up_to, step);
    if (lane >= step) up_to += other;
  }
  const int num_occurrences = same_on_all_lanes(__shfl_sync(kAllLanes, up_to, kLanes - 1));
  if (num_occurrences == 0) return;
  // The first run that ends after the occurrence, as in update_short_runs.
  const auto find_run = [&](int occurrence) {
    int run = 0;
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
      if (__shfl_sync(kAllLanes, up_to, run + step - 1) <= occurrence) run += step;
    }
    return run;
  };
  // A team ends with the run that holds the last occurrence of its equal share, and starts where
  // the team before ends. Shares are rounded up, so the first team has an occurrence.
  const int share_end = ((team_of_warp<kDim>() + 1) * num_occurrences + kTeams - 1) / kTeams;
  const int end_of_team = __shfl_sync(kAllLanes, up_to, find_run(share_end - 1));
  const int end_before = __shfl_up_sync(kAllLanes, end_of_team, kTeam);
  const int start_of_team = team_of_warp<kDim>() == 0 ? 0 : end_before;
  const int num_of_team = end_of_team - start_of_team;
  const int most_of_team = greatest_of_lanes(num_of_team);

  Elements<kDim> total{};
#pragma unroll 1
  for (int done = 0; done < most_of_team; done += kTeam) {
    // Lanes past the end look up the last occurrence again, so that no lane reads out of bounds.
    const int number_of_lane = done + lane_of_row<kDim>();
    const int occurrence = min(start_of_team + number_of_lane, end_of_team - 1);
    const int run = find_run(occurrence);
    const int left = __shfl_sync(kAllLanes, up_to, run) - occurrence;
    const int end = __shfl_sync(kAllLanes, start + length, run);
    const int row_of_run = __shfl_sync(kAllLanes, row, run);
    Occurrence mine;
    mine.find(update, end - left);
    float row_state = 0.0f;
    if constexpr (kRule == Rule::kRowwiseAdagrad) row_state = update.state0[row_of_run];
    const bool is_last = left == 1 && number_of_lane < num_of_team;
    // Bits of the occurrences of the lane's team that end runs, and of those that do in any team.
    const unsigned ends_run = __ballot_sync(kAllLanes, is_last) >> (team_of_warp<kDim>() * kTeam);
    unsigned ends_any = __ballot_sync(kAllLanes, is_last);
#pragma unroll
    for (int apart = kLanes / 2; apart >= kTeam; apart /= 2) ends_any |= ends_any >> apart;
    const int here = min(kTeam, most_of_team - done), here_of_team = num_of_team - done;

    const auto fetch = [&](int number, int stage) {
      if (number < here) {
        const int from = value_of_lane<kDim>(mine.gradient_row, number);
        const int to = value_of_lane<kDim>(row_of_run, number);
        if (ends_run >> number & 1) arrivals.fetch_row(stage, matrices, to);
        if (number < here_of_team) arrivals.fetch_gradient(stage, matrices, from);
      }
      // Committed also where nothing was fetched, as in update_short_runs.
      commit_fetches();
    };
#pragma unroll
    for (int i = 0; i < kStagesOfTeam - 1; ++i) fetch(i, i);
#pragma unroll 1
    for (int first = 0; first < here; first += kStagesOfTeam) {
#pragma unroll
      for (int i = 0; i < kStagesOfTeam; ++i) {
        const int number = first + i;
        if (number >= here) break;
        fetch(number + kStagesOfTeam - 1, (i + kStagesOfTeam - 1) % kStagesOfTeam);
        wait_for_fetches<kStagesOfTeam - 1>();
        add_gradient_of_team(total, update, arrivals.gradient(i), mine, number, true);
        if (ends_any >> number & 1) {
          Row<float, kDim, kRule> old;
          old.weight = arrivals.weight(i);
          if constexpr (kRule == Rule::kRowwiseAdagrad) {
            old.state0 = value_of_lane<kDim>(row_state, number);
          }
          if constexpr (has_row_state<kRule>) old.state0 = arrivals.state0(i);
          if constexpr (kRule == Rule::kAdam) old.state1 = arrivals.state1(i);
          const int to = value_of_lane<kDim>(row_of_run, number);
          const bool ends = ends_run >> number & 1;
          old.step(update, matrices, lr, to, total, {}, ends);
          if (ends) total = Elements<kDim>{};
        }
      }
    }
    // Only empty groups are left. The next round must count its groups from none.
    wait_for_fetches<0>();
  }
}

template <class Grad, int kDim, Rule kRule>
__global__ void __launch_bounds__(kMostWarpsOfTeams<Grad, kDim, kRule>* kLanes, 1)
    narrow_kernel(const RowUpdate update) {
  constexpr int kTeams = RowShape<kDim>::kRows;
  extern __shared__ char shared[];
  const Arrivals<float, Grad, kDim, kRule> arrivals(shared,
                                                    threadIdx.x / kLanes * kTeamStages<kDim>);
  // The whole grid reads the same flag, so either all rows are updated or none.
  if (update.skip != nullptr && *update.skip != 0.0f) return;
  const uint32_t num_runs = *update.num_runs, num_windows = update.num_chunks;
  const Matrices<float, Grad, kDim> matrices(update);
  const float lr = *update.lr;
  const uint32_t num_warps = gridDim.x * (blockDim.x / kLanes);
  const uint32_t warp = blockIdx.x * (blockDim.x / kLanes) + threadIdx.x / kLanes;
  const uint32_t lane = lane_of_warp();
  const uint32_t runs_of_block = count_runs_of_block<kTeams>(update, num_runs, num_warps);
  const uint32_t runs_of_round = runs_of_block * num_warps;

  uint32_t window = 0, next_windows = warp;
  int run_of_window = -1;
  unsigned chunks = 0;
  uint32_t taken = take_block(update);
  for (bool has_runs = true; has_runs || chunks != 0 || next_windows < num_windows;) {
    if (chunks == 0 && next_windows < num_windows) {
      window = next_windows + lane * num_warps;
      run_of_window = window < num_windows ? update.chunk_runs[window] : -1;
      chunks = __ballot_sync(kAllLanes, run_of_window >= 0);
      next_windows += kLanes * num_warps;
    }
    for (int few = 0; few < kChunksOfBlock && chunks != 0; ++few) {
      int next = -1;  // the lane that holds the team's chunk
#pragma unroll
      for (int team = 0; team < kTeams; ++team) {
        if (team == team_of_warp<kDim>()) next = __ffs(chunks) - 1;
        chunks &= chunks - 1;
      }
      const int window_of_team = __shfl_sync(kAllLanes, window, max(next, 0));
      const int run_of_team = __shfl_sync(kAllLanes, run_of_window, max(next, 0));
      sum_chunks_of_teams<Grad, kDim, kRule>(update, matrices, lr, window_of_team,
                                             next < 0 ? -1 : run_of_team);
    }
    if (!has_runs) continue;
    const uint32_t block = __shfl_sync(kAllLanes, taken, 0);
    const uint32_t first_run = block / num_warps * runs_of_round + block % num_warps;
    has_runs = first_run < num_runs;
    if (has_runs) {
      // The next block is taken before this one is worked on, as in update_kernel.
      taken = take_block(update);
      const uint32_t run = first_run + lane * num_warps;
      update_short_runs_by_teams<Grad, kDim, kRule>(update, matrices, lr, arrivals, run,
                                                    lane < runs_of_block && run < num_runs);
    }
  }
}

template <class Grad, int kDim, Rule kRule>
cudaError_t launch_narrow_kernel(const RowUpdate& update, int device, cudaStream_t stream) {
  return launch_in_clusters(narrow_kernel<Grad, kDim, kRule>, kBytesOfTeams<Grad, kDim, kRule>,
                            kMostWarpsOfTeams<Grad, kDim, kRule>, update, device, stream);
}

template <class Grad, int kDim>
cudaError_t launch_narrow_rule(const RowUpdate& update, int device, cudaStream_t stream) {
  switch (update.rule) {
    case Rule::kSgd:
      return launch_narrow_kernel<Grad, kDim, Rule::kSgd>(update, device, stream);
    case Rule::kAdagrad:
      // Of rows of 64 columns Triton's kernel is as fast.
      if constexpr (kDim == 64) break;
      return launch_narrow_kernel<Grad, kDim, Rule::kAdagrad>(update, device, stream);
    case Rule::kRowwiseAdagrad:
      return launch_narrow_kernel<Grad, kDim, Rule::kRowwiseAdagrad>(update, device, stream);
    case Rule::kAdam:
      return launch_narrow_kernel<Grad, kDim, Rule::kAdam>(update, device, stream);
  }
  return cudaErrorInvalidValue;
}

template <int kDim>
cudaError_t launch_narrow_update(const RowUpdate& update, int device, cudaStream_t stream) {
  switch (update.grad_type) {
    case RowType::kFloat32:
      return launch_narrow_rule<float, kDim>(update, device, stream);
    case RowType::kFloat16:
      return launch_narrow_rule<__half, kDim>(update, device, stream);
    case RowType::kBFloat16:
      return launch_narrow_rule<__nv_bfloat16, kDim>(update, device, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace torchembed
