// Inserts binned keys into hash tables, as insert_keys.py does.
//
// A warp takes a block of a table at a time, and of its keys those of as many whole bins as its
// lanes can hold (insert_few_keys.cuh). Where a bin has more of them, or a block more buckets than
// lanes, the warp inserts one key after the other (insert_many_keys.cuh).
//
// Byte floor: that of insert_keys.py. Of each bucket the digests are read once for the keys that a
// warp holds, and epochs and scores once, and once more for each key of them that evicts another.

#include <cuda_runtime.h>

#include <algorithm>

#include "hash_kernels.h"
#include "insert_few_keys.cuh"
#include "insert_many_keys.cuh"
#include "insertion_block.cuh"
#include "lane_buckets.cuh"
#include "table_blocks.cuh"

namespace torchembed {
namespace {

// As few that the compiler keeps all of a warp's state in registers: more are slower.
constexpr int kWarps = 4;
constexpr int kBlocksOfMultiprocessor = 5;

// Shared memory of a warp.
struct WarpMemory {
  BucketMemory buckets;
  InsertionCounts counts;
  double reciprocal;  // of the blocks of the table
};

// Inserts the block's keys in `num_bins` bins, whose entries begin at `entry`, and end at `ends`.
// `is_held`: whether the lanes can hold its buckets, and rows of this batch are in use.
template <int kPolicy>
__device__ void insert_bins(const InsertionBlock& block, WarpMemory& memory, const int32_t* ends,
                            int num_bins, int entry, bool is_held) {
  LaneBuckets<kPolicy != kLru> buckets(block, memory.buckets);
  for (int bin = 0; bin < num_bins;) {
    const int own_bin = bin + lane_of_warp();
    const int own_end = ends[min(own_bin, num_bins - 1)];
    const bool fits = is_held && own_bin < num_bins && own_end - entry <= kLanes;
    const int num_fitting = __popc(__ballot_sync(kAllLanes, fits));
    const int end = __shfl_sync(kAllLanes, own_end, max(num_fitting - 1, 0));
    // Keys of a bin come before those of the next one, also by their hashes.
    if (end > entry && num_fitting > 0) {
      insert_few_keys<kPolicy>(block, buckets, entry, end - entry, memory.counts);
    } else if (end > entry) {
      insert_many_keys<kPolicy>(block, entry, end, memory.counts);
      buckets.forget();
    }
    bin += max(num_fitting, 1);
    entry = end;
  }
}

// number / divisor, which is less than 2**31. Its estimate is off by one at most.
__device__ int quotient(int64_t number, int64_t divisor, double reciprocal) {
  const auto estimate = static_cast<int>(static_cast<double>(number) * reciprocal);
  const int64_t rest = number - estimate * divisor;
  return estimate + (rest >= divisor) - (rest < 0);
}

template <int kPolicy>
__global__ void __launch_bounds__(kWarps* kLanes, kBlocksOfMultiprocessor)
    insert_kernel(const __grid_constant__ BinnedInsertion insertion) {
  __shared__ WarpMemory memory_of_warps[kWarps];
  WarpMemory& memory = memory_of_warps[threadIdx.x / kLanes];
  if (lane_of_warp() == 0) memory.counts = InsertionCounts{};
  const bool is_in_use = *insertion.released < *insertion.epoch;
  const int64_t num_warps = int64_t{gridDim.x} * kWarps;
  TableBlocks blocks(insertion.held);
  int table = -1;
  for (int64_t number = int64_t{blockIdx.x} * kWarps + threadIdx.x / kLanes; blocks.find(number);
       number += num_warps) {
    const TableShape shape(insertion.held.geometry, blocks.table);
    const int64_t divisor = max(shape.num_blocks, int64_t{1});
    if (blocks.table != table) {
      if (table >= 0) memory.counts.write(insertion.held.counters + int64_t{table} * kNumCounters);
      table = blocks.table;
      __syncwarp();
      memory.reciprocal = 1.0 / static_cast<double>(divisor);
      __syncwarp();
    }
    // The bins with hashes from block / num_blocks on, to those before the next block's.
    const int64_t begin = blocks.block << insertion.bins_log2;
    const int64_t last = begin + (int64_t{1} << insertion.bins_log2) - 1;
    const int first_bin = quotient(begin, divisor, memory.reciprocal);
    const int num_bins = quotient(last, divisor, memory.reciprocal) - first_bin + 1;
    const int32_t* const ends =
        insertion.bin_ends + (int64_t{table} << insertion.bins_log2) + first_bin;
    const int entry = ends == insertion.bin_ends ? 0 : ends[-1], end = ends[num_bins - 1];
    if (entry == end) continue;
    const InsertionBlock block(insertion, table, blocks.block, shape);
    const bool is_held = is_in_use && block.num_buckets <= kLanes;
    insert_bins<kPolicy>(block, memory, ends, num_bins, entry, is_held);
  }
  if (table >= 0) memory.counts.write(insertion.held.counters + int64_t{table} * kNumCounters);
}

using Kernel = void (*)(BinnedInsertion);

Kernel kernel_of(int policy) {
  constexpr Kernel kKernels[] = {insert_kernel<kLru>, insert_kernel<kLfu>, insert_kernel<kEpochLfu>,
                                 insert_kernel<kCaller>};
  return kKernels[policy];
}

}  // namespace

const char* insert_binned_keys(const BinnedInsertion& insertion, int64_t num_blocks, int device,
                               void* stream) {
  // As in update_rows.cu: the library's runtime has a current device of its own.
  int current = device;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess && current != device) error = cudaSetDevice(device);
  int num_multiprocessors = 0;
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    const int64_t most = int64_t{num_multiprocessors} * kBlocksOfMultiprocessor;
    const int64_t wanted = std::max((num_blocks + kWarps - 1) / kWarps, int64_t{1});
    kernel_of(insertion.policy)<<<static_cast<unsigned>(std::min(wanted, most)), kWarps * kLanes, 0,
                                  static_cast<cudaStream_t>(stream)>>>(insertion);
    error = cudaGetLastError();
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace torchembed
