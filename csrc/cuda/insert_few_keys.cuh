// Inserts few keys into a block of few buckets: one key on each lane, and one bucket.
//
// Of keys that share a bucket the one of the lesser hash comes first; all others are inserted at
// once. So a warp needs as many rounds as the longest chain of keys that wait for each other.

#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

#include "insertion_block.cuh"
#include "lane_buckets.cuh"
#include "warp_reductions.cuh"

namespace torchembed {
namespace {

// What a lane knows of its key and of those of the other lanes.
struct KeyOfLane {
  int64_t key = 0;
  bool is_of_block = false;
  unsigned digest = 0;
  unsigned first = 0, second = 0;  // its buckets
  int rank = 0;                    // entries of lesser hashes
  unsigned equals = 0;             // lanes of the same key
  unsigned before = 0;             // lanes of lesser hashes that share a bucket

  // `count` entries of bins from `entry` on; blocks before and behind may have some of them.
  __device__ KeyOfLane(const InsertionBlock& block, int entry, int count) {
    const int lane = lane_of_warp();
    uint64_t hash = 0;
    if (lane < count) {
      key = block.insertion.bin_keys[entry + lane];
      hash = hash_of_key(key);
      digest = digest_of_hash(hash);
      is_of_block = block.has(hash);
    }
    if (is_of_block && block.num_slots > 0) {
      const BucketNumbers numbers(hash, block.num_buckets);
      first = static_cast<unsigned>(numbers.first);
      second = static_cast<unsigned>(numbers.second);
    }
    const unsigned own = buckets();
    for (int from = 0; from < count; ++from) {
      const uint64_t other = __shfl_sync(kAllLanes, hash, from);
      const unsigned others = __shfl_sync(kAllLanes, own, from);
      const bool is_less = other < hash;
      rank += is_less;
      equals |= unsigned{other == hash} << from;
      before |= unsigned{is_less && (others & own) != 0} << from;
    }
  }

  // As a set; of none for keys of other blocks.
  __device__ unsigned buckets() const { return is_of_block ? 1u << first | 1u << second : 0; }

  __device__ int first_equal() const { return __ffs(static_cast<int>(equals)) - 1; }
};

// Inserts the keys of `count` entries of bins from `entry` on, at most kLanes, all of them equal
// or of lesser hashes than entries behind them. Rows of this batch must be in use.
template <int kPolicy>
__device__ void insert_few_keys(const InsertionBlock& block, LaneBuckets<kPolicy != kLru>& buckets,
                                int entry, int count, InsertionCounts& counts) {
  const KeyOfLane own(block, entry, count);
  const BinnedInsertion& insertion = block.insertion;
  bool waits = own.is_of_block && own.first_equal() == lane_of_warp();
  if (block.num_slots == 0) {
    counts.add(false, waits, false, 0);
    return;
  }
  int64_t of_caller = LLONG_MIN;
  if constexpr (kPolicy == kCaller) {
    const int64_t given = own.is_of_block
                              ? insertion.scores_in[insertion.bin_positions[entry + lane_of_warp()]]
                              : LLONG_MIN;
    for (int from = 0; from < count; ++from) {
      const int64_t other = __shfl_sync(kAllLanes, given, from);
      if ((own.equals >> from & 1) != 0) of_caller = max(of_caller, other);
    }
  }
  const int64_t score = block.new_score<kPolicy>(__popc(own.equals), of_caller);
  buckets.read_free(bits_of_lanes(own.buckets()));
  TakenSlot taken{-1, false, 0, 0};
  for (unsigned waiting; (waiting = __ballot_sync(kAllLanes, waits)) != 0;) {
    const bool is_next = waits && (own.before & waiting) == 0;
    const unsigned free = buckets.free();
    const unsigned of_first = __shfl_sync(kAllLanes, free, own.first);
    const unsigned of_second = __shfl_sync(kAllLanes, free, own.second);
    bool from_second = of_second >> 8 > of_first >> 8;
    unsigned place = (from_second ? of_second : of_first) & 0xFF;
    const bool evicts = waits && (of_first | of_second) >> 8 == 0;
    if (__any_sync(kAllLanes, evicts)) {
      // Those of keys that come later, too: their slots stay as full as they are.
      buckets.find_victims(bits_of_lanes(evicts ? own.buckets() : 0));
      const Victim victim = buckets.victim(own.first), other = buckets.victim(own.second);
      if (evicts) {
        from_second = own.first != own.second && other.goes_before(victim);
        taken.score = from_second ? other.score : victim.score;
        taken.last_use = from_second ? other.last_use : victim.last_use;
        place = taken.score > score ? kNoPlace : from_second ? other.place : victim.place;
      }
    }
    const unsigned bucket = from_second ? own.second : own.first;
    if (is_next) {
      waits = false;
      if (place != kNoPlace) {
        taken.slot = block.first_slot + bucket * block.num_slots + place;
        taken.evicts = evicts;
      }
    }
    buckets.take(bucket, is_next ? place : kNoPlace);
  }
  const bool is_first = own.is_of_block && own.first_equal() == lane_of_warp();
  const bool is_taken = is_first && taken.slot >= 0;
  counts.add(is_taken, is_first && !is_taken, is_taken && taken.evicts,
             block.epoch() - taken.last_use);
  const int64_t slot = __shfl_sync(kAllLanes, taken.slot, own.first_equal() & (kLanes - 1));
  if (own.is_of_block && slot >= 0) {
    insertion.slots[insertion.bin_positions[entry + lane_of_warp()]] = slot;
  }
  if (is_taken) block.write(own.key, own.digest, taken, score, entry + own.rank);
}

}  // namespace
}  // namespace torchembed
