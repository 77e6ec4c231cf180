// Notes that a batch uses slots of hash tables, as the first kernel of touch_slots.py does.
//
// Byte floor: that of touch_slots.py.

#include <cuda_runtime.h>

#include "hash_counters.h"
#include "hash_kernels.h"
#include "warp_reductions.cuh"

namespace torchembed {
namespace {

constexpr int kThreads = 256;
constexpr int kIdsOfThread = 8;
constexpr int kIdsOfBlock = kThreads * kIdsOfThread;

__device__ void add(int64_t* counter, int number) {
  if (number == 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(counter),
            static_cast<unsigned long long>(number));
}

// Counts hits and misses of a warp's ids, table by table.
__device__ void count_by_table(int table, bool is_hit, int64_t* counters) {
  bool is_left = table >= 0;
  for (unsigned left; (left = __ballot_sync(kAllLanes, is_left)) != 0;) {
    const int first = __ffs(static_cast<int>(left)) - 1;
    const int current = __shfl_sync(kAllLanes, table, first);
    const bool is_counted = is_left && table == current;
    const int num_hits = __popc(__ballot_sync(kAllLanes, is_counted && is_hit));
    const int num_misses = __popc(__ballot_sync(kAllLanes, is_counted && !is_hit));
    if (lane_of_warp() == first) {
      int64_t* const of_table = counters + int64_t{current} * kNumCounters;
      add(of_table + kHits, num_hits);
      add(of_table + kMisses, num_misses);
    }
    is_left = is_left && !is_counted;
  }
}

template <bool kCountsUse>
__global__ void __launch_bounds__(kThreads) touch_kernel(const SlotUse use) {
  if (use.is_trained != nullptr && !*use.is_trained) return;
  const int64_t begin = int64_t{blockIdx.x} * kIdsOfBlock;
  const int64_t epoch = *use.epoch;
  int tables[kIdsOfThread];
  int64_t slots[kIdsOfThread];
  // All loads come before the first of their uses.
#pragma unroll
  for (int i = 0; i < kIdsOfThread; ++i) {
    const int64_t position = begin + i * kThreads + threadIdx.x;
    const bool is_inside = position < use.num_ids;
    tables[i] = is_inside ? use.tables[position] : -1;
    slots[i] = is_inside ? use.slots[position] : -1;
  }
  // Ids come by feature, so that most blocks have those of one table.
  const int first_table = begin < use.num_ids ? use.tables[begin] : -1;
  bool is_one_table = first_table >= 0;
  int num_hits = 0, num_ids = 0;
#pragma unroll
  for (int i = 0; i < kIdsOfThread; ++i) {
    is_one_table = is_one_table && (tables[i] == first_table || tables[i] < 0);
    num_ids += tables[i] >= 0;
    num_hits += tables[i] >= 0 && slots[i] >= 0;
  }
  if (__syncthreads_and(is_one_table)) {
    __shared__ int sums[2];
    if (threadIdx.x < 2) sums[threadIdx.x] = 0;
    __syncthreads();
    num_hits = sum_of_lanes(num_hits);
    num_ids = sum_of_lanes(num_ids);
    if (lane_of_warp() == 0) {
      atomicAdd(sums, num_hits);
      atomicAdd(sums + 1, num_ids - num_hits);
    }
    __syncthreads();
    if (threadIdx.x < 2) {
      const int counter = threadIdx.x == 0 ? kHits : kMisses;
      add(use.counters + int64_t{first_table} * kNumCounters + counter, sums[threadIdx.x]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kIdsOfThread; ++i) {
      count_by_table(tables[i], slots[i] >= 0, use.counters);
    }
  }
  // One id after the other, so that most positions of a frequent slot see that another one was
  // faster: past the first-level cache, which does not see what other multiprocessors wrote. All
  // positions of a slot write one number, whichever of them comes first.
#pragma unroll
  for (int i = 0; i < kIdsOfThread; ++i) {
    if (tables[i] >= 0 && slots[i] >= 0) {
      if (__ldcg(use.touched + slots[i]) < epoch) use.touched[slots[i]] = epoch;
      if constexpr (kCountsUse) {
        atomicAdd(reinterpret_cast<unsigned long long*>(use.scores + slots[i]), 1ull);
      }
    }
    __syncwarp();
  }
}

}  // namespace

const char* touch_slots(const SlotUse& use, int device, void* stream) {
  // As in update_rows.cu: the library's runtime has a current device of its own.
  int current = device;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess && current != device) error = cudaSetDevice(device);
  if (error == cudaSuccess) {
    const auto num_blocks = static_cast<unsigned>((use.num_ids + kIdsOfBlock - 1) / kIdsOfBlock);
    const auto kernel = use.scores == nullptr ? touch_kernel<false> : touch_kernel<true>;
    kernel<<<num_blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(use);
    error = cudaGetLastError();
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace torchembed
