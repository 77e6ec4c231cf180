// Sums whole chunks of runs, and whole groups of chunks; run_sums.py says what they are.
//
// A block takes the chunks that start in kChunk * kChunk sorted positions, that is kChunk slots of
// chunks and one of groups. Byte floor: the gradient row index of each occurrence in a chunk and
// its gradient row, as far as the cache reaches; the sums written once.

#include <cuda_runtime.h>

#include "row_elements.cuh"
#include "update_rows.h"

namespace torchembed {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
// Rows on their way together.
template <class Value>
constexpr int kUnroll = sizeof(Value) == 4 ? 8 : 16;
constexpr int kTile = kChunk * kChunk;
static_assert(kChunk == 32, "a lane has one occurrence of a chunk");

// How many of the `size` increasing `values` are at most `limit`. All threads of a block call it.
__device__ uint32_t count_up_to(const int32_t* values, uint32_t size, int64_t limit) {
  uint32_t count = 0;
  while (size > 0) {
    const uint32_t step = (size + kThreads - 1) / kThreads, probe = (threadIdx.x + 1) * step - 1;
    const bool below = probe < size && values[count + probe] <= limit;
    const uint32_t passed = __syncthreads_count(below) * step;
    count += passed;
    size = min(step - 1, size - passed);
  }
  return count;
}

// The sum of kChunk rows, in the lane's four columns; each lane knows one of the rows.
template <class Value>
__device__ float4 sum_rows(const Value* rows, int row, float scale, bool has_scales, int dim) {
  const int column = threadIdx.x % 32 * 4;
  float total[4] = {};
#pragma unroll 1
  for (int first = 0; first < kChunk; first += kUnroll<Value>) {
    Four<Value> found[kUnroll<Value>];
#pragma unroll
    for (int i = 0; i < kUnroll<Value>; ++i) {
      const int64_t from = __shfl_sync(kAllLanes, row, first + i);
      if (column < dim) {
        found[i] = *reinterpret_cast<const Four<Value>*>(rows + from * dim + column);
      }
    }
#pragma unroll
    for (int i = 0; i < kUnroll<Value>; ++i) {
      const float factor = __shfl_sync(kAllLanes, scale, first + i);
      float gradient[4];
      unpack(gradient, found[i], static_cast<const Value*>(nullptr));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (has_scales) gradient[j] *= factor;
        total[j] += gradient[j];
      }
    }
  }
  return make_float4(total[0], total[1], total[2], total[3]);
}

__device__ void store_row(float* rows, int64_t row, int dim, float4 four) {
  const int column = threadIdx.x % 32 * 4;
  if (column < dim) *reinterpret_cast<float4*>(rows + row * dim + column) = four;
}

template <class Grad>
__global__ void __launch_bounds__(kThreads) sum_chunks_kernel(const RowUpdate update) {
  __shared__ int chunk_starts[kChunk];  // -1 where none starts in the slot
  __shared__ int group_start;
  __shared__ int rows[kChunk][32];
  __shared__ float scales[kChunk][32];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int64_t first = int64_t{blockIdx.x} * kTile;
  const bool has_scales = update.scales != nullptr;
  if (warp == 0) {
    chunk_starts[lane] = -1;
    if (lane == 0) group_start = -1;
  }
  // The first run that has a part in the tile; it may have started before.
  const uint32_t num_runs = *update.num_runs;
  const uint32_t num_before = count_up_to(update.starts, num_runs, first);
  const uint32_t first_run = num_before > 0 ? num_before - 1 : 0;
  __syncthreads();

  constexpr int kRounds = kTile / kThreads + 1;
  int starts[kRounds] = {}, ends[kRounds] = {};
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const uint32_t run = first_run + i * kThreads + thread;
    if (run < num_runs) starts[i] = update.starts[run], ends[i] = update.starts[run + 1];
  }
  bool found = false;
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int64_t start = starts[i], end = ends[i];
    if (start >= first + kTile || end - start < kChunk) continue;
    int64_t chunk = start >= first ? start : start + (first - start + kChunk - 1) / kChunk * kChunk;
    for (; chunk < first + kTile && chunk + kChunk <= end; chunk += kChunk) {
      chunk_starts[(chunk - first) / kChunk] = static_cast<int>(chunk);
      found = true;
    }
    const int64_t slot = first / kChunk, run_slot = start / kChunk;
    const int64_t run_slot_end = run_slot + (end - start) / kChunk;
    const int64_t group =
        run_slot >= slot ? run_slot : run_slot + (slot - run_slot + kChunk - 1) / kChunk * kChunk;
    if (group < slot + kChunk && group + kChunk <= run_slot_end) {
      group_start = static_cast<int>(group);
    }
  }
  found = __syncthreads_or(found);
  if (thread == 0 && blockIdx.x < update.num_ids / kTile) {
    update.group_starts[blockIdx.x] = group_start;
  }
  if (!found) return;

  // What each lane needs to know of the warp's chunks, before any is summed.
  for (int slot = warp; slot < kChunk; slot += kWarps) {
    if (chunk_starts[slot] >= 0) rows[slot][lane] = update.order[chunk_starts[slot] + lane];
  }
  for (int slot = warp; slot < kChunk; slot += kWarps) {
    if (chunk_starts[slot] < 0) continue;
    const int position = rows[slot][lane];
    scales[slot][lane] = has_scales ? update.scales[position] : 1.0f;
    if (update.gradient_rows != nullptr) {
      rows[slot][lane] = index_at(update.gradient_rows, update.gradient_rows_are_wide, position);
    }
  }
  for (int slot = warp; slot < kChunk; slot += kWarps) {
    if (chunk_starts[slot] < 0) continue;
    const float4 sum = sum_rows(static_cast<const Grad*>(update.grad), rows[slot][lane],
                                scales[slot][lane], has_scales, update.dim);
    store_row(update.chunk_sums, first / kChunk + slot, update.dim, sum);
  }
}

__global__ void sum_groups_kernel(const RowUpdate update, int num_groups) {
  const int slot = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (slot >= num_groups || update.group_starts[slot] < 0) return;
  const int row = update.group_starts[slot] + threadIdx.x % 32;
  store_row(update.group_sums, slot, update.dim,
            sum_rows(update.chunk_sums, row, 1.0f, false, update.dim));
}

}  // namespace

void launch_sum_chunks(const RowUpdate& update, GradType grad_type, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  const int num_tiles = static_cast<int>((update.num_ids / kChunk + kChunk - 1) / kChunk);
  if (num_tiles == 0) return;
  switch (grad_type) {
    case GradType::kFloat32:
      sum_chunks_kernel<float><<<num_tiles, kThreads, 0, queue>>>(update);
      break;
    case GradType::kFloat16:
      sum_chunks_kernel<__half><<<num_tiles, kThreads, 0, queue>>>(update);
      break;
    case GradType::kBFloat16:
      sum_chunks_kernel<__nv_bfloat16><<<num_tiles, kThreads, 0, queue>>>(update);
      break;
  }
  const int num_groups = static_cast<int>(update.num_ids / kTile);
  constexpr int kGroupsOfBlock = 4;
  if (num_groups > 0) {
    sum_groups_kernel<<<(num_groups + kGroupsOfBlock - 1) / kGroupsOfBlock, kGroupsOfBlock * 32, 0,
                        queue>>>(update, num_groups);
  }
}

}  // namespace torchembed
