// Inserts any number of keys into any block: one after the other, each by the whole warp.

#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

#include "insertion_block.cuh"
#include "warp_reductions.cuh"

namespace torchembed {
namespace {

constexpr int kPlacesOfLane = kBucketSlots / kLanes;

// The slot to evict among those of buckets that a warp has looked at, one after the other.
class VictimSearch {
 public:
  // Looks at a bucket, whose places in all buckets are from `begin` on.
  __device__ void look_at(const HashMemory& held, int64_t first_slot, int num_slots, int begin,
                          int64_t released) {
    const int lane = lane_of_warp();
    int64_t touched[kPlacesOfLane], scores[kPlacesOfLane];
    // All loads come before the first of their uses.
#pragma unroll
    for (int i = 0; i < kPlacesOfLane; ++i) {
      const int place = i * kLanes + lane;
      const bool is_slot = place < num_slots;
      touched[i] = is_slot ? held.touched[first_slot + place] : LLONG_MAX;
      scores[i] = is_slot && held.scores != nullptr ? held.scores[first_slot + place] : touched[i];
    }
#pragma unroll
    for (int i = 0; i < kPlacesOfLane; ++i) {
      const int place = i * kLanes + lane;
      if (place >= num_slots || touched[i] > released) continue;
      // Places come upwards, so that the first of equals stays.
      const bool is_less = found_.slot < 0 || scores[i] < found_.score ||
                           (scores[i] == found_.score && touched[i] < found_.last_use);
      if (is_less)
        found_ = {first_slot + place, true, scores[i], touched[i]}, place_ = begin + place;
    }
  }

  // Of the slots of all lanes the least score, of these the longest unused one, of these the first;
  // the slot is -1 where there is none, or its score exceeds `score`. The same on all lanes.
  __device__ TakenSlot found(int64_t score) const {
    bool is_left = found_.slot >= 0;
    const uint64_t least = least_of_lanes(is_left ? ordered(found_.score) : kGreatest);
    is_left = is_left && ordered(found_.score) == least && found_.score <= score;
    const uint64_t longest = least_of_lanes(is_left ? ordered(found_.last_use) : kGreatest);
    is_left = is_left && ordered(found_.last_use) == longest;
    const unsigned place = least_of_lanes(is_left ? place_ : kNoPlace);
    const unsigned from = __ballot_sync(kAllLanes, is_left && place_ == place);
    const int lane = __ffs(static_cast<int>(from)) - 1;
    if (lane < 0) return {-1, true, 0, 0};
    return {__shfl_sync(kAllLanes, found_.slot, lane), true,
            __shfl_sync(kAllLanes, found_.score, lane),
            __shfl_sync(kAllLanes, found_.last_use, lane)};
  }

 private:
  TakenSlot found_{-1, true, 0, 0};
  unsigned place_ = kNoPlace;
};

// The slot of a new key: the first free one of the emptier bucket, of the first bucket where they
// are equally full; else the one that is evicted, -1 for none.
__device__ TakenSlot take_slot(const InsertionBlock& block, uint64_t hash, int64_t score) {
  const int lane = lane_of_warp(), num_slots = block.num_slots;
  const HashMemory& held = block.insertion.held;
  const BucketNumbers numbers(hash, block.num_buckets);
  const bool has_two = numbers.first != numbers.second;
  const int64_t first = block.first_slot + numbers.first * num_slots;
  const int64_t second = block.first_slot + numbers.second * num_slots;
  // By bit i of a lane, place i * kLanes + lane.
  unsigned free_first = 0, free_second = 0;
#pragma unroll
  for (int i = 0; i < kPlacesOfLane; ++i) {
    const int place = i * kLanes + lane;
    if (place >= num_slots) continue;
    free_first |= unsigned{held.digests[first + place] == 0} << i;
    if (has_two) free_second |= unsigned{held.digests[second + place] == 0} << i;
  }
  const int num_free = sum_of_lanes(__popc(free_first) << 16 | __popc(free_second));
  if (num_free != 0) {
    const bool from_second = (num_free & 0xFFFF) > num_free >> 16;
    const unsigned found = from_second ? free_second : free_first;
    const unsigned place =
        least_of_lanes(found == 0 ? kNoPlace : (__ffs(found) - 1) * kLanes + lane);
    return {(from_second ? second : first) + place, false, 0, 0};
  }
  if (num_slots == 0) return {-1, true, 0, 0};
  VictimSearch search;
  search.look_at(held, first, num_slots, 0, block.released());
  if (has_two) search.look_at(held, second, num_slots, kBucketSlots, block.released());
  return search.found(score);
}

// Inserts the keys of the block among the binned entries from `entry` to `end`. In each pass over
// the entries the warp finds the key that comes next.
template <int kPolicy>
__device__ void insert_many_keys(const InsertionBlock& block, int entry, int end,
                                 InsertionCounts& counts) {
  const BinnedInsertion& insertion = block.insertion;
  const int lane = lane_of_warp();
  uint64_t last = 0;
  for (bool is_first_key = true;; is_first_key = false) {
    // The least hash above the last one, and entries of lesser hashes.
    uint64_t own = kGreatest;
    int64_t score = LLONG_MIN;
    int num_equal = 0, num_before = 0;
    for (int at = entry + lane; at < end; at += kLanes) {
      const uint64_t hash = hash_of_key(insertion.bin_keys[at]);
      if (!(is_first_key || hash > last) || !block.has(hash) || hash > own) continue;
      num_equal = hash < own ? 1 : num_equal + 1;
      own = hash;
    }
    const uint64_t least = least_of_lanes(num_equal > 0 ? own : kGreatest);
    num_equal = sum_of_lanes(own == least ? num_equal : 0);
    if (num_equal == 0) break;
    int64_t key = 0;
    bool has_key = false;
    for (int at = entry + lane; at < end; at += kLanes) {
      const int64_t found = insertion.bin_keys[at];
      const uint64_t hash = hash_of_key(found);
      num_before += hash < least;
      if (hash != least) continue;
      key = found;
      has_key = true;
      if constexpr (kPolicy == kCaller) {
        score = max(score, insertion.scores_in[insertion.bin_positions[at]]);
      }
    }
    num_before = sum_of_lanes(num_before);
    if constexpr (kPolicy == kCaller) score = greatest_of_lanes(score);
    key = __shfl_sync(kAllLanes, key, __ffs(__ballot_sync(kAllLanes, has_key)) - 1);
    score = block.new_score<kPolicy>(num_equal, score);
    const TakenSlot taken = take_slot(block, least, score);
    const bool is_taken = taken.slot >= 0;
    counts.add(lane == 0 && is_taken, lane == 0 && !is_taken, lane == 0 && is_taken && taken.evicts,
               block.epoch() - taken.last_use);
    if (is_taken) {
      for (int at = entry + lane; at < end; at += kLanes) {
        if (insertion.bin_keys[at] != key) continue;
        insertion.slots[insertion.bin_positions[at]] = taken.slot;
      }
      if (lane == 0) block.write(key, digest_of_hash(least), taken, score, entry + num_before);
      // The next key sees what this lane wrote.
      __syncwarp();
    }
    last = least;
  }
}

}  // namespace
}  // namespace torchembed
