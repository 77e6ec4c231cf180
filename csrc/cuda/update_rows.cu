// Sums the gradients of each run and updates its row by Adagrad, for each element or for the row;
// rows are float32.
//
// What it must move is a run's row and state, scattered over the memory and read and written, so it
// is a matter of having enough of them on the way, near to each other: a warp takes a block of
// short runs, finds where their gradients lie by a lane for each occurrence, and has kUnroll
// gradients, rows and states on their way at once. Neighbours are other warps' runs, since the rows
// of a small table all have many occurrences. Long runs are cut into chunks, and each warp sums
// some among its short runs, since these wait for the memory and chunks for the cache. Who adds a
// group's last chunk sums the group, and who adds a run's last sum updates its row: nothing waits
// for another warp, and the order of every sum is that of run_sums.py.
//
// Byte floor, for L occurrences of U rows: position and gradient row index of each occurrence, the
// gradient rows that the batch has (each read once, as far as the cache reaches), and
// 2 * U * (D + state) * 4 for rows and their state, read and written.

#include <cuda_runtime.h>

#include "row_step.cuh"
#include "run_sums.cuh"
#include "update_rows.h"

namespace torchembed {
namespace {

// As many as the registers have room for; a block fills a multiprocessor.
constexpr int kWarps = 32;
// Rows, states and gradients that are read together.
constexpr int kUnroll = 2;
// Occurrences that a warp takes at a time, about; and chunks that it sums before.
constexpr uint32_t kOccurrencesOfBlock = 20;
constexpr uint32_t kLeastRuns = 8, kMostRuns = 16;
constexpr int kChunksOfBlock = 4;

// Sums the chunk at `slot`, which is one of `run`, and with it what it completes.
template <class Grad, bool kRowwise>
__device__ void sum_chunk(const RowUpdate& update, const Matrices<Grad>& matrices, float lr,
                          int slot, int run) {
  const int start = same_on_all_lanes(update.starts[run]);
  const int length = same_on_all_lanes(update.starts[run + 1]) - start;
  const int num_chunks = length / kChunk, num_groups = num_chunks / kChunk;
  const int num_left = num_chunks % kChunk;
  const int first_slot = start / kChunk, first_group = first_slot / kChunk;
  const int chunk = slot - first_slot;

  Elements total{};
  add_gradients(total, update, matrices.grad, start + chunk * kChunk, kChunk);
  const LaneOfMatrix<float> chunk_sums(update.chunk_sums), group_sums(update.group_sums);
  store_elements(chunk_sums.at(slot), total);
  const int group = chunk / kChunk;
  if (group < num_groups) {
    if (!is_last_of(update.num_grouped + first_group + group, kChunk)) return;
    total = Elements{};
    add_sums(total, chunk_sums, first_slot + group * kChunk, kChunk);
    store_elements(group_sums.at(first_group + group), total);
  }
  if (!is_last_of(update.num_summed + first_slot, num_groups + num_left)) return;

  const int row = index_at(update.unique_rows, update.rows_are_wide, run);
  Row<kRowwise> old;
  old.load(update, matrices, row);
  total = Elements{};
  add_sums(total, group_sums, first_group, num_groups);
  add_sums(total, chunk_sums, first_slot + num_groups * kChunk, num_left);
  const int rest = length % kChunk;
  add_gradients(total, update, matrices.grad, start + length - rest, rest);
  old.step(update, matrices, lr, row, total);
}

// Updates the row of the lane's run, for each lane that has a short one.
template <class Grad, bool kRowwise>
__device__ void update_short_runs(const RowUpdate& update, const Matrices<Grad>& matrices, float lr,
                                  uint32_t run_of_lane, bool has_run) {
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

  Elements total{};
#pragma unroll 1
  for (int done = 0; done < num_occurrences; done += kLanes) {
    // Lanes past the end take the last occurrence again.
    const int occurrence = min(done + lane, num_occurrences - 1);
    int run = 0;  // the first one that goes beyond the occurrence
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
      if (__shfl_sync(kAllLanes, up_to, run + step - 1) <= occurrence) run += step;
    }
    const int left = __shfl_sync(kAllLanes, up_to, run) - occurrence;
    const int end = __shfl_sync(kAllLanes, start + length, run);
    // Read with each occurrence, and used with the last: to ask whether to read costs more.
    const int row_of_run = __shfl_sync(kAllLanes, row, run);
    Occurrence mine;
    mine.find(update, end - left);
    const bool is_last = left == 1 && done + lane < num_occurrences;
    const unsigned ends_run = same_on_all_lanes(__ballot_sync(kAllLanes, is_last));
    const int here = min(kLanes, num_occurrences - done);

#pragma unroll 1
    for (int first = 0; first < here; first += kUnroll) {
      const unsigned ends_here = ends_run >> first;
      Packed<Grad> found[kUnroll];
      Row<kRowwise> old[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int from = __shfl_sync(kAllLanes, mine.gradient_row, first + i);
        const int to = __shfl_sync(kAllLanes, row_of_run, first + i);
        found[i].load(matrices.grad.at(from));
        old[i].load(update, matrices, to);
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        add_gradient(total, update, found[i], mine, first + i);
        if (ends_here >> i & 1) {
          const int to = __shfl_sync(kAllLanes, row_of_run, first + i);
          old[i].step(update, matrices, lr, to, total);
          total = Elements{};
        }
      }
    }
  }
}

// slot_runs[j]: the run that has a whole chunk at slot j, -1 where none has. Makes what the warps
// of update_kernel count zero.
__global__ void find_chunks_kernel(const RowUpdate update) {
  const int slot = blockIdx.x * blockDim.x + threadIdx.x;
  const int lane = lane_of_warp();
  if (slot == 0) *update.num_taken = 0;
  if (slot - lane >= update.num_chunks) return;
  const int32_t* const starts = update.starts;
  const int last = slot * kChunk + kChunk - 1;  // a chunk of this slot holds it
  // Runs that start up to the last position of the warp's first slot, found by 32 entries at once.
  const int last_of_first = __shfl_sync(kAllLanes, last, 0);
  const int num_runs = *update.num_runs;
  int num_started = 0;
  for (int num_left = num_runs; num_left > 0;) {
    const int apart = (num_left + kLanes - 1) / kLanes, entry = (lane + 1) * apart - 1;
    const bool is_started = entry < num_left && starts[num_started + entry] <= last_of_first;
    const int num_below = __popc(__ballot_sync(kAllLanes, is_started)) * apart;
    num_started += num_below;
    num_left = min(apart - 1, num_left - num_below);
  }
  // Every position starts one more at most.
  for (int num_left = min(lane * kChunk, num_runs - num_started); num_left > 0;) {
    const int half = (num_left + 1) / 2;
    if (starts[num_started + half - 1] <= last) num_started += half;
    num_left -= half;
  }
  if (slot >= update.num_chunks) return;
  int run = num_started - 1;
  if (run >= 0) {
    const int first = last - (last - starts[run]) % kChunk;
    if (starts[run + 1] - first < kChunk) run = -1;
  }
  update.slot_runs[slot] = run;
  update.num_summed[slot] = 0;
  if (slot % kChunk == kChunk - 1) update.num_grouped[slot / kChunk] = 0;
}

// Fewer where runs are long, so that no block takes long; and about the same for every warp.
__device__ uint32_t count_runs_of_block(const RowUpdate& update, uint32_t num_runs,
                                        uint32_t num_warps) {
  uint32_t most = kMostRuns;
  if (num_runs > kMostRuns * num_warps) {
    const uint64_t occurrences = uint64_t{kOccurrencesOfBlock} * num_runs;
    most = min(max(static_cast<uint32_t>(occurrences / update.num_ids), kLeastRuns), kMostRuns);
  }
  const uint32_t num_rounds = max((num_runs + most * num_warps - 1) / (most * num_warps), 1u);
  return (num_runs + num_rounds * num_warps - 1) / (num_rounds * num_warps);
}

// The next one of the blocks of runs that no warp has taken, on the first lane.
__device__ uint32_t take_block(const RowUpdate& update) {
  return lane_of_warp() == 0 ? atomicAdd(update.num_taken, 1) : 0;
}

template <class Grad, bool kRowwise>
__global__ void __launch_bounds__(kWarps* kLanes, 1) update_kernel(const RowUpdate update) {
  if (update.skip != nullptr && *update.skip != 0.0f) return;
  const uint32_t num_runs = *update.num_runs, num_slots = update.num_chunks;
  const Matrices<Grad> matrices(update);
  const float lr = *update.lr;
  const uint32_t num_warps = gridDim.x * kWarps;
  const uint32_t warp = blockIdx.x * kWarps + threadIdx.x / kLanes;
  const uint32_t lane = lane_of_warp();
  const uint32_t runs_of_block = count_runs_of_block(update, num_runs, num_warps);
  const uint32_t runs_of_round = runs_of_block * num_warps;

  uint32_t slot = 0, next_slots = warp;
  int run_of_slot = -1;
  unsigned chunks = 0;
  uint32_t taken = take_block(update);
  for (bool has_runs = true; has_runs || chunks != 0 || next_slots < num_slots;) {
    if (chunks == 0 && next_slots < num_slots) {
      slot = next_slots + lane * num_warps;
      run_of_slot = slot < num_slots ? update.slot_runs[slot] : -1;
      chunks = __ballot_sync(kAllLanes, run_of_slot >= 0);
      next_slots += kLanes * num_warps;
    }
    for (int few = 0; few < kChunksOfBlock && chunks != 0; ++few) {
      const int next = __ffs(chunks) - 1;
      sum_chunk<Grad, kRowwise>(update, matrices, lr, __shfl_sync(kAllLanes, slot, next),
                                __shfl_sync(kAllLanes, run_of_slot, next));
      chunks &= chunks - 1;
    }
    if (!has_runs) continue;
    const uint32_t block = __shfl_sync(kAllLanes, taken, 0);
    const uint32_t first_run = block / num_warps * runs_of_round + block % num_warps;
    has_runs = first_run < num_runs;
    if (has_runs) {
      taken = take_block(update);
      const uint32_t run = first_run + lane * num_warps;
      update_short_runs<Grad, kRowwise>(update, matrices, lr, run,
                                        lane < runs_of_block && run < num_runs);
    }
  }
}

template <class Grad>
cudaError_t launch(const RowUpdate& update, cudaStream_t stream) {
  constexpr int kThreads = 128;
  find_chunks_kernel<<<update.num_chunks / kThreads + 1, kThreads, 0, stream>>>(update);
  const auto kernel = update.is_rowwise ? update_kernel<Grad, true> : update_kernel<Grad, false>;
  kernel<<<update.num_blocks, kWarps * kLanes, 0, stream>>>(update);
  return cudaGetLastError();
}

}  // namespace

const char* update_rows(const RowUpdate& update, GradType grad_type, int device, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  // The caller has made the device torch's current one. The library has a CUDA runtime of its own.
  int current = device;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess && current != device) error = cudaSetDevice(device);
  if (error == cudaSuccess) {
    switch (grad_type) {
      case GradType::kFloat32:
        error = launch<float>(update, queue);
        break;
      case GradType::kFloat16:
        error = launch<__half>(update, queue);
        break;
      case GradType::kBFloat16:
        error = launch<__nv_bfloat16>(update, queue);
        break;
    }
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace torchembed
