// Updates of rows as update_kernel.cuh, with the same sums, for wide rows of 16 bits, and for some
// of float32.
//
// A warp's copies never run out: short runs and chunks of long ones go through one pipeline, which
// looks ahead into the next batch. That takes registers, so that there are fewer warps, each with
// more stages. Rows, which nobody else reads, leave the cache first and so make room for gradients.
//
// The byte floor is that of update_kernel.cuh.

#pragma once

#include <cuda_runtime.h>

#include "arrivals.cuh"
#include "row_step.cuh"
#include "run_stream.cuh"
#include "update_kernel.cuh"
#include "update_rows.h"

namespace torchembed {
namespace {

// A function that is not inlined, so that its registers are needed by no warp meanwhile: few
// batches are chunks.
template <class Value, class Grad, int kDim, Rule kRule>
__device__ __noinline__ void complete_chunk(const RowUpdate& update, int window, int run) {
  const Matrices<Value, Grad, kDim> matrices(update);
  sum_chunk<true, Value, Grad, kDim, kRule>(update, matrices, *update.lr, window, run);
}

template <class Value, class Grad, int kDim, Rule kRule, int kNumStages, int kNumWarps>
__global__ void __launch_bounds__(kNumWarps* kLanes, 1)
    stream_kernel(const __grid_constant__ RowUpdate update) {
  constexpr unsigned kRing = kNumStages;
  extern __shared__ char shared[];
  const Arrivals<Value, Grad, kDim, kRule> arrivals(shared, threadIdx.x / kLanes * kNumStages);
  // The whole grid reads the same flag, so either all rows are updated or none.
  if (update.skip != nullptr && *update.skip != 0.0f) return;
  const Matrices<Value, Grad, kDim> matrices(update);
  const float lr = *update.lr;
  const uint64_t policy = policy_of_cold_bytes();

  RunStream<kRule> stream(update);
  Batch now = stream.next();
  stream.look_up_gradients(now);
  Batch following = stream.next();
  int fetched = 0;     // occurrences, from the first of `now` on, across both batches
  unsigned stage = 0;  // of the first of `now`
  const auto fetch = [&]() {
    const int to_stage = (stage + unsigned(fetched)) % kRing;
    const bool is_now = fetched < now.count;
    const int number = is_now ? fetched : fetched - now.count;
    const int from = __shfl_sync(
        kAllLanes, is_now ? now.occurrence.gradient_row : following.occurrence.gradient_row,
        number);
    if ((is_now ? now.ends_run : following.ends_run) >> number & 1) {
      const int to = __shfl_sync(kAllLanes, is_now ? now.row : following.row, number);
      arrivals.fetch_cold_row(to_stage, matrices, to, policy);
    }
    arrivals.fetch_gradient(to_stage, matrices, from);
    commit_fetches();
    ++fetched;
  };

  Elements<kDim> total{};
  while (now.count != 0) {
    RowRounding<Value> rounding;
    if (now.window < 0) rounding.find(update, now.row);
    // Late enough for the positions of the following batch to have arrived, and soon enough for its
    // gradient rows to arrive before fetches reach them.
    const int look_up_at = max(now.count - 2 * (kNumStages - 1), 0);
#pragma unroll 1
    for (int number = 0; number < now.count; ++number) {
      if (number == look_up_at) stream.look_up_gradients(following);
#pragma unroll 1
      while (fetched < number + kNumStages && fetched < now.count + following.count) fetch();
      // An occurrence is a group of copies. Where batches are short, fewer groups than stages are
      // under way, and all are waited for.
      if (fetched == number + kNumStages) {
        wait_for_fetches<kNumStages - 1>();
      } else {
        wait_for_fetches<0>();
      }
      const int from_stage = (stage + unsigned(number)) % kRing;
      add_gradient(total, update, arrivals.gradient(from_stage), now.occurrence, number);
      if (now.ends_run >> number & 1) {
        Row<Value, kDim, kRule> old;
        old.weight = arrivals.weight(from_stage);
        if constexpr (kRule == Rule::kRowwiseAdagrad) {
          old.state0 = __shfl_sync(kAllLanes, now.row_state, number);
        }
        if constexpr (has_row_state<kRule>) old.state0 = arrivals.state0(from_stage);
        if constexpr (kRule == Rule::kAdam) old.state1 = arrivals.state1(from_stage);
        const int to = __shfl_sync(kAllLanes, now.row, number);
        old.template step<true>(update, matrices, lr, to, total, rounding.of_lane(number));
        total = Elements<kDim>{};
      }
    }
    if (now.window >= 0) {
      const LaneOfMatrix<float, kDim> chunk_sums(update.chunk_sums);
      store_elements(chunk_sums.at(now.window), total);
      complete_chunk<Value, Grad, kDim, kRule>(update, now.window, now.row);
      total = Elements<kDim>{};
    }
    stage = (stage + unsigned(now.count)) % kRing;
    fetched -= now.count;
    now = following;
    following = stream.next();
  }
}

// Launches `update.num_blocks` blocks of kNumWarps warps, one of which fills a multiprocessor.
template <class Value, class Grad, int kDim, Rule kRule, int kNumStages, int kNumWarps>
cudaError_t launch_stream(const RowUpdate& update, cudaStream_t stream) {
  constexpr int kBytes = kNumWarps * kNumStages * Arrivals<Value, Grad, kDim, kRule>::kStageBytes;
  static_assert(kBytes <= kMostSharedBytes);
  const auto kernel = stream_kernel<Value, Grad, kDim, kRule, kNumStages, kNumWarps>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<update.num_blocks, kNumWarps * kLanes, kBytes, stream>>>(update);
  return cudaGetLastError();
}

}  // namespace
}  // namespace torchembed
