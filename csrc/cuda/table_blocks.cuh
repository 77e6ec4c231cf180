// The blocks of all hash tables of a group, one after the other.

#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

#include "hash_kernels.h"
#include "hash_places.cuh"
#include "warp_reductions.cuh"

namespace torchembed {
namespace {

// A block; a warp goes through them upwards.
class TableBlocks {
 public:
  __device__ explicit TableBlocks(const HashMemory& held) : held_(held) { load(0); }

  // Goes to block `number` of all, from one before it; false where there is none.
  __device__ bool find(int64_t number) {
    for (;;) {
      const unsigned behind = __ballot_sync(kAllLanes, ends_ <= number);
      const int skipped = __popc(behind);
      if (skipped < kLanes) {
        const int64_t before = __shfl_sync(kAllLanes, ends_, max(skipped - 1, 0));
        table = first_table_ + skipped;
        block = number - (skipped == 0 ? begin_ : before);
        return table < held_.num_tables;
      }
      if (first_table_ + kLanes >= held_.num_tables) return false;
      begin_ = __shfl_sync(kAllLanes, ends_, kLanes - 1);
      load(first_table_ + kLanes);
    }
  }

  int table = 0;
  int64_t block = 0;

 private:
  __device__ void load(int first_table) {
    first_table_ = first_table;
    const int lane = lane_of_warp(), own = first_table + lane;
    // A table without rows refuses keys in one block.
    ends_ =
        own < held_.num_tables ? max(TableShape(held_.geometry, own).num_blocks, int64_t{1}) : 0;
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
      const int64_t other = __shfl_up_sync(kAllLanes, ends_, step);
      if (lane >= step) ends_ += other;
    }
    ends_ += begin_;
    if (own >= held_.num_tables) ends_ = LLONG_MAX;
  }

  const HashMemory& held_;
  int first_table_ = 0;
  int64_t begin_ = 0;  // blocks of the tables before
  int64_t ends_ = 0;   // the first block behind the lane's table
};

}  // namespace
}  // namespace torchembed
