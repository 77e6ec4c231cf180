// The gradients that a warp goes through, found ahead of their use.

#pragma once

#include <cuda_runtime.h>

#include "run_sums.cuh"
#include "update_kernel.cuh"
#include "update_rows.h"

namespace torchembed {
namespace {

// Occurrences of short runs, or those of one chunk of a long run: at most one on each lane.
struct Batch {
  // These three are the same on all lanes.
  int count = 0;
  unsigned ends_run = 0;  // bits of the occurrences that are the last ones of short runs
  int window = -1;        // in which the chunk starts; -1 for short runs
  int row = 0;            // of the occurrence's short run; of a chunk the run
  float row_state = 0.0f;
  Occurrence occurrence;
};

// A warp's batches: blocks of short runs, one run on each lane, and chunks of long ones. What leads
// to a gradient is a chain of loads (run, position, row of the gradient, gradient). Each of them is
// started by the batch before, so that its latency is hidden behind the work on that one.
//
// A warp sums its chunks when the short runs reach their windows, not before: neighbouring runs
// have gradients in common, which are then read from memory once.
template <Rule kRule>
class RunStream {
 public:
  // Takes the warp's first block.
  __device__ explicit RunStream(const RowUpdate& update)
      : update_(update),
        num_runs_(*update.num_runs),
        num_warps_(gridDim.x * (blockDim.x / kLanes)),
        runs_of_block_(count_runs_of_block(update, num_runs_, num_warps_)),
        next_windows_(blockIdx.x * (blockDim.x / kLanes) + threadIdx.x / kLanes),
        taken_(take_block(update)) {
    load_block();
  }

  // The next batch; one of no occurrences where all are taken. Its gradients are not looked up.
  __device__ Batch next() {
    for (;;) {
      if (!is_counted_) {
        // A chunk may come between two blocks, where no sum of a run has begun.
        while (chunks_ == 0 && next_windows_ < num_windows()) load_windows();
        if (chunks_ != 0) {
          const int first = __ffs(chunks_) - 1;
          const uint32_t window = next_windows_ + (first - kLanes) * num_warps_;
          // As many windows ahead as there are warps, so that no chunk is left for the end.
          const uint32_t reached =
              has_block_ ? __shfl_sync(kAllLanes, start_, 0) / kChunk + num_warps_ : 0xFFFFFFFFu;
          if (window <= reached) return chunk_of(first, window);
        }
        if (!has_block_) return {};
        count_occurrences();
      }
      if (done_ < num_occurrences_) return occurrences_of_block();
      // A block of long runs alone: the chunks that it did not reach may follow.
      load_block();
    }
  }

  // Turns the positions of the batch's occurrences into the rows of their gradients.
  __device__ void look_up_gradients(Batch& batch) const {
    Occurrence& mine = batch.occurrence;
    if (update_.scales != nullptr) mine.scale = update_.scales[mine.gradient_row];
    if (update_.gradient_rows != nullptr) {
      mine.gradient_row =
          index_at(update_.gradient_rows, update_.gradient_rows_are_wide, mine.gradient_row);
    }
  }

 private:
  __device__ uint32_t num_windows() const { return update_.num_chunks; }

  __device__ void load_block() {
    const uint32_t block = __shfl_sync(kAllLanes, taken_, 0);
    const uint32_t first_run =
        block / num_warps_ * (runs_of_block_ * num_warps_) + block % num_warps_;
    has_block_ = first_run < num_runs_;
    is_counted_ = false;
    if (!has_block_) return;
    taken_ = take_block(update_);
    const uint32_t run = first_run + lane_of_warp() * num_warps_;
    has_run_ = lane_of_warp() < runs_of_block_ && run < num_runs_;
    const uint32_t place = has_run_ ? run : first_run;
    row_ = index_at(update_.unique_rows, update_.rows_are_wide, place);
    start_ = update_.starts[place];
    end_ = update_.starts[place + 1];
  }

  __device__ void count_occurrences() {
    int length = has_run_ ? end_ - start_ : 0;
    if (length >= kChunk) length = 0;
    up_to_ = length;
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
      const int other = __shfl_up_sync(kAllLanes, up_to_, step);
      if (lane_of_warp() >= step) up_to_ += other;
    }
    num_occurrences_ = same_on_all_lanes(__shfl_sync(kAllLanes, up_to_, kLanes - 1));
    done_ = 0;
    is_counted_ = true;
  }

  __device__ Batch occurrences_of_block() {
    Batch batch;
    const int lane = lane_of_warp();
    // Lanes past the end look up the last occurrence again, so that no lane reads out of bounds.
    const int occurrence = min(done_ + lane, num_occurrences_ - 1);
    // As in update_short_runs, the first run that ends after the occurrence.
    int run = 0;
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
      if (__shfl_sync(kAllLanes, up_to_, run + step - 1) <= occurrence) run += step;
    }
    const int left = __shfl_sync(kAllLanes, up_to_, run) - occurrence;
    const int end = __shfl_sync(kAllLanes, end_, run);
    batch.row = __shfl_sync(kAllLanes, row_, run);
    batch.occurrence.gradient_row = update_.order[end - left];
    if constexpr (kRule == Rule::kRowwiseAdagrad) batch.row_state = update_.state0[batch.row];
    const bool is_last = left == 1 && done_ + lane < num_occurrences_;
    batch.ends_run = same_on_all_lanes(__ballot_sync(kAllLanes, is_last));
    batch.count = min(kLanes, num_occurrences_ - done_);
    done_ += kLanes;
    if (done_ >= num_occurrences_) load_block();
    return batch;
  }

  __device__ void load_windows() {
    const uint32_t window = next_windows_ + lane_of_warp() * num_warps_;
    run_of_window_ = window < num_windows() ? update_.chunk_runs[window] : -1;
    start_of_run_ = run_of_window_ < 0 ? 0 : update_.starts[run_of_window_];
    chunks_ = __ballot_sync(kAllLanes, run_of_window_ >= 0);
    next_windows_ += kLanes * num_warps_;
  }

  // The chunk that starts in `window`, which is that of lane `first`.
  __device__ Batch chunk_of(int first, uint32_t window) {
    Batch batch;
    batch.count = kChunk;
    batch.window = window;
    batch.row = __shfl_sync(kAllLanes, run_of_window_, first);
    // It starts as far into its window as its run into the run's first window.
    const int start = __shfl_sync(kAllLanes, start_of_run_, first);
    const int position = start % kChunk + window * kChunk + lane_of_warp();
    batch.occurrence.gradient_row = update_.order[position];
    chunks_ &= chunks_ - 1;
    return batch;
  }

  const RowUpdate& update_;
  const uint32_t num_runs_, num_warps_, runs_of_block_;
  uint32_t next_windows_;  // the first of the next kLanes windows of this warp
  uint32_t taken_;         // the block after the current one, on the first lane
  // The current block; is_counted_ once its occurrences are.
  bool has_block_ = false, is_counted_ = false, has_run_ = false;
  int row_ = 0, start_ = 0, end_ = 0;
  int up_to_ = 0;  // occurrences of the lane's run and of those before
  int num_occurrences_ = 0, done_ = 0;
  // The lanes whose windows have chunks that are not summed yet.
  unsigned chunks_ = 0;
  int run_of_window_ = -1, start_of_run_ = 0;
};

}  // namespace
}  // namespace torchembed
