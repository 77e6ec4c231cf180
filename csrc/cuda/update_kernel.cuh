// Sums the gradients of each run and updates its row, which has all lanes of a warp.
//
// The kernel is bound by memory: each run's row and state are read from and written to scattered
// addresses, so enough of these accesses must be in flight. A warp takes a block of short runs,
// finds the gradients of 32 occurrences at a time, one on each lane, and keeps the copies of
// kStages gradients, rows and states in flight. Neighbouring runs go to different warps, since the
// rows of a small table are neighbours and all have many occurrences. Long runs are divided into
// chunks, and each warp sums some of them between its short runs, since short runs wait for memory
// and chunks for the cache. The warp that adds a group's last chunk sums the group, and the warp
// that adds a run's last sum updates its row. So no warp waits for another one, and the order of
// every sum is that of run_sums.py, whichever warp comes last.
//
// Byte floor, for L occurrences of U rows: position and gradient row index of each occurrence, the
// gradient rows that the batch has (each read once, as far as the cache reaches), and
// 2 * U * (D * bytes of an element + states * 4) for rows and their state, read and written.

#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "arrivals.cuh"
#include "row_step.cuh"
#include "run_sums.cuh"
#include "update_rows.h"

namespace torchembed {
namespace {

// The most warps that the registers of a multiprocessor allow; one block fills a multiprocessor.
constexpr int kMostWarps = 32;
// Whether a row is read with each occurrence and used with the last one of its run: short runs have
// few, and for a narrow row a branch costs more than the reads.
template <int kDim>
constexpr bool kReadsRowsAlways = kDim <= 128;
// Pipeline stages of a warp: occurrences whose row, state and gradient are in shared memory or
// being copied there.
constexpr int kStages = 4;
// Shared memory of a block, of the GPU that has the most: with more warps than fit there, registers
// would be kept free for nobody.
constexpr int kMostSharedBytes = 227 * 1024;
template <class Value, class Grad, int kDim, Rule kRule>
constexpr int kBytesOfWarp = kStages * Arrivals<Value, Grad, kDim, kRule>::kStageBytes;
template <class Value, class Grad, int kDim, Rule kRule>
constexpr int kMostWarpsOf =
    std::min(kMostWarps, kMostSharedBytes / kBytesOfWarp<Value, Grad, kDim, kRule>);
// Blocks of a cluster, which the GPU places on neighbouring multiprocessors. The kernel needs no
// cluster itself. But matrix products that run concurrently do, and would have to wait for whole
// free neighbourhoods if blocks of this kernel were scattered over all of them.
constexpr int kBlocksOfCluster = 8;
// The approximate number of occurrences that a warp takes at a time, the bounds of the number of
// their runs, and the chunks that it sums in between; for each of the rows that it has at a time.
constexpr uint32_t kOccurrencesOfBlock = 20;
constexpr uint32_t kLeastRuns = 8, kMostRuns = 16;
constexpr int kChunksOfBlock = 4;

// Sums the chunk of `run` that starts in `window`, then its group and its run where it completes
// them. Chunk k of a run is stored at entry window(start) + k: at most one whole chunk starts in a
// window, so no other run's chunk has that entry, and nothing needs to be allocated. Where
// kIsSummed the warp has stored the chunk's sum already.
template <bool kIsSummed, class Value, class Grad, int kDim, Rule kRule>
__device__ void sum_chunk(const RowUpdate& update, const Matrices<Value, Grad, kDim>& matrices,
                          float lr, int window, int run) {
  const int start = same_on_all_lanes(update.starts[run]);
  const int length = same_on_all_lanes(update.starts[run + 1]) - start;
  const int num_chunks = length / kChunk, num_groups = num_chunks / kChunk;
  const int num_left = num_chunks % kChunk;
  const int first_window = start / kChunk, first_group = first_window / kChunk;
  const int chunk = window - first_window;

  Elements<kDim> total{};
  if constexpr (!kIsSummed) {
    add_gradients(total, update, matrices.grad, start + chunk * kChunk, kChunk);
  }
  const LaneOfMatrix<float, kDim> chunk_sums(update.chunk_sums), group_sums(update.group_sums);
  if constexpr (!kIsSummed) store_elements(chunk_sums.at(window), total);
  const int group = chunk / kChunk;
  if (group < num_groups) {
    if (!is_last_of(update.num_grouped + first_group + group, kChunk)) return;
    total = Elements<kDim>{};
    add_sums(total, chunk_sums, first_window + group * kChunk, kChunk);
    store_elements(group_sums.at(first_group + group), total);
  }
  if (!is_last_of(update.num_summed + first_window, num_groups + num_left)) return;

  const int row = index_at(update.unique_rows, update.rows_are_wide, run);
  Row<Value, kDim, kRule> old;
  old.load(update, matrices, row);
  RowRounding<Value> rounding;
  rounding.find(update, row);
  total = Elements<kDim>{};
  add_sums(total, group_sums, first_group, num_groups);
  add_sums(total, chunk_sums, first_window + num_groups * kChunk, num_left);
  const int rest = length % kChunk;
  add_gradients(total, update, matrices.grad, start + length - rest, rest);
  old.step(update, matrices, lr, row, total, rounding);
}

// Updates the rows of short runs, one run on each lane that has one. The warp goes through their
// occurrences one after another, all lanes on one row.
template <class Value, class Grad, int kDim, Rule kRule>
__device__ void update_short_runs(const RowUpdate& update,
                                  const Matrices<Value, Grad, kDim>& matrices, float lr,
                                  const Arrivals<Value, Grad, kDim, kRule>& arrivals,
                                  uint32_t run_of_lane, bool has_run) {
  const int lane = lane_of_warp();
  int row = 0, start = 0, length = 0;
  if (has_run) {
    row = index_at(update.unique_rows, update.rows_are_wide, run_of_lane);
    start = update.starts[run_of_lane];
    length = update.starts[run_of_lane + 1] - start;
    if (length >= kChunk) length = 0;
  }
  // Of lanes without a run as well, since all lanes ask how rows are rounded.
  RowRounding<Value> rounding;
  rounding.find(update, row);
  int up_to = length;  // occurrences of this run and of those before
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, up_to, step);
    if (lane >= step) up_to += other;
  }
  const int num_occurrences = same_on_all_lanes(__shfl_sync(kAllLanes, up_to, kLanes - 1));

  Elements<kDim> total{};
#pragma unroll 1
  for (int done = 0; done < num_occurrences; done += kLanes) {
    // Lanes past the end look up the last occurrence again, so that no lane reads out of bounds.
    const int occurrence = min(done + lane, num_occurrences - 1);
    // A binary search over the lanes for the first run that ends after the occurrence; shuffles
    // need all lanes, so each takes the same number of steps.
    int run = 0;
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
      if (__shfl_sync(kAllLanes, up_to, run + step - 1) <= occurrence) run += step;
    }
    const int left = __shfl_sync(kAllLanes, up_to, run) - occurrence;
    const int end = __shfl_sync(kAllLanes, start + length, run);
    const int row_of_run = __shfl_sync(kAllLanes, row, run);
    Occurrence mine;
    mine.find(update, end - left);
    float row_state = 0.0f;
    if constexpr (kRule == Rule::kRowwiseAdagrad) row_state = update.state0[row_of_run];
    const bool is_last = left == 1 && done + lane < num_occurrences;
    const unsigned ends_run = same_on_all_lanes(__ballot_sync(kAllLanes, is_last));
    const int here = min(kLanes, num_occurrences - done);

    const auto fetch = [&](int number, int stage) {
      if (number < here) {
        const int from = __shfl_sync(kAllLanes, mine.gradient_row, number);
        if (kReadsRowsAlways<kDim> || (ends_run >> number & 1)) {
          const int to = __shfl_sync(kAllLanes, row_of_run, number);
          arrivals.fetch_row(stage, matrices, to);
        }
        arrivals.fetch_gradient(stage, matrices, from);
      }
      // Committed also where nothing was fetched, so that wait_for_fetches<kStages - 1> always
      // means that the oldest stage has arrived.
      commit_fetches();
    };
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) fetch(i, i);
#pragma unroll 1
    for (int first = 0; first < here; first += kStages) {
#pragma unroll
      for (int i = 0; i < kStages; ++i) {
        const int number = first + i;
        if (number >= here) break;
        fetch(number + kStages - 1, (i + kStages - 1) % kStages);
        wait_for_fetches<kStages - 1>();
        add_gradient(total, update, arrivals.gradient(i), mine, number);
        if (ends_run >> number & 1) {
          Row<Value, kDim, kRule> old;
          old.weight = arrivals.weight(i);
          if constexpr (kRule == Rule::kRowwiseAdagrad) {
            old.state0 = __shfl_sync(kAllLanes, row_state, number);
          }
          if constexpr (has_row_state<kRule>) old.state0 = arrivals.state0(i);
          if constexpr (kRule == Rule::kAdam) old.state1 = arrivals.state1(i);
          const int to = __shfl_sync(kAllLanes, row_of_run, number);
          RowRounding<Value> of_row;
          if constexpr (!std::is_same_v<Value, float>) {
            of_row = rounding.of_lane(__shfl_sync(kAllLanes, run, number));
          }
          old.step(update, matrices, lr, to, total, of_row);
          total = Elements<kDim>{};
        }
      }
    }
    // Only empty groups are left. The next round must count its groups from none.
    wait_for_fetches<0>();
  }
}

// The number of runs that a warp takes at a time: fewer where runs are long, so that the last
// blocks end at about the same time, and such that the rounds of all warps come out even. The
// product is of 64 bits, since 20 occurrences times 2**31 runs overflow 32. A warp that has kRows
// rows at a time takes as many times more runs, but no more than lanes.
template <int kRows = 1>
__device__ uint32_t count_runs_of_block(const RowUpdate& update, uint32_t num_runs,
                                        uint32_t num_warps) {
  constexpr uint32_t kLeast = kLeastRuns * kRows;
  constexpr uint32_t kMost = kMostRuns * kRows < kLanes ? kMostRuns * kRows : kLanes;
  static_assert(kLeast <= kMost);
  uint32_t most = kMost;
  if (num_runs > kMost * num_warps) {
    const uint64_t occurrences = uint64_t{kOccurrencesOfBlock * kRows} * num_runs;
    most = min(max(static_cast<uint32_t>(occurrences / update.num_ids), kLeast), kMost);
  }
  const uint32_t num_rounds = max((num_runs + most * num_warps - 1) / (most * num_warps), 1u);
  return (num_runs + num_rounds * num_warps - 1) / (num_rounds * num_warps);
}

// Takes the next block of runs that no warp has taken; the result is valid on the first lane.
// Blocks are taken dynamically, since runs differ in length and warps in the chunks that they sum.
__device__ uint32_t take_block(const RowUpdate& update) {
  return lane_of_warp() == 0 ? atomicAdd(update.num_taken, 1) : 0;
}

template <class Value, class Grad, int kDim, Rule kRule>
__global__ void __launch_bounds__(kMostWarpsOf<Value, Grad, kDim, kRule>* kLanes, 1)
    update_kernel(const RowUpdate update) {
  extern __shared__ char shared[];
  const Arrivals<Value, Grad, kDim, kRule> arrivals(shared, threadIdx.x / kLanes * kStages);
  // The whole grid reads the same flag, so either all rows are updated or none.
  if (update.skip != nullptr && *update.skip != 0.0f) return;
  const uint32_t num_runs = *update.num_runs, num_windows = update.num_chunks;
  const Matrices<Value, Grad, kDim> matrices(update);
  const float lr = *update.lr;
  const uint32_t num_warps = gridDim.x * (blockDim.x / kLanes);
  const uint32_t warp = blockIdx.x * (blockDim.x / kLanes) + threadIdx.x / kLanes;
  const uint32_t lane = lane_of_warp();
  const uint32_t runs_of_block = count_runs_of_block(update, num_runs, num_warps);
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
      const int next = __ffs(chunks) - 1;
      sum_chunk<false, Value, Grad, kDim, kRule>(update, matrices, lr,
                                                 __shfl_sync(kAllLanes, window, next),
                                                 __shfl_sync(kAllLanes, run_of_window, next));
      chunks &= chunks - 1;
    }
    if (!has_runs) continue;
    const uint32_t block = __shfl_sync(kAllLanes, taken, 0);
    const uint32_t first_run = block / num_warps * runs_of_round + block % num_warps;
    has_runs = first_run < num_runs;
    if (has_runs) {
      // The next block is taken before this one is worked on, which hides the latency of the
      // atomic.
      taken = take_block(update);
      const uint32_t run = first_run + lane * num_warps;
      update_short_runs<Value, Grad, kDim, kRule>(update, matrices, lr, arrivals, run,
                                                  lane < runs_of_block && run < num_runs);
    }
  }
}

// Launches about as many blocks as asked for, in whole clusters, of as many warps as fit into the
// shared memory of a multiprocessor.
inline cudaError_t launch_in_clusters(void (*kernel)(RowUpdate), int bytes_of_warp, int most_warps,
                                      const RowUpdate& update, int device, cudaStream_t stream) {
  int num_bytes = 0, generation = 0;
  cudaError_t error =
      cudaDeviceGetAttribute(&num_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&generation, cudaDevAttrComputeCapabilityMajor, device);
  }
  const int num_warps = std::min(most_warps, num_bytes / bytes_of_warp);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 num_warps * bytes_of_warp);
  }
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = kBlocksOfCluster;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = std::max(update.num_blocks / kBlocksOfCluster, 1) * kBlocksOfCluster;
  config.blockDim = num_warps * kLanes;
  config.dynamicSmemBytes = num_warps * bytes_of_warp;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  int num_clusters = 0;
  if (generation < 9 ||
      cudaOccupancyMaxActiveClusters(&num_clusters, kernel, &config) != cudaSuccess) {
    // Clears the error of the query, which would otherwise be reported of the launch.
    cudaGetLastError();
  }
  // Clusters are a preference: without them the kernel runs as well alone.
  if (num_clusters == 0) config.numAttrs = 0;
  return cudaLaunchKernelEx(&config, kernel, update);
}

template <class Value, class Grad, int kDim, Rule kRule>
cudaError_t launch_update(const RowUpdate& update, int device, cudaStream_t stream) {
  return launch_in_clusters(update_kernel<Value, Grad, kDim, kRule>,
                            kBytesOfWarp<Value, Grad, kDim, kRule>,
                            kMostWarpsOf<Value, Grad, kDim, kRule>, update, device, stream);
}

}  // namespace
}  // namespace torchembed
