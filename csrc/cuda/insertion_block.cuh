// A block of a hash table, into which a warp inserts keys, and what is written for each of them.

#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

#include "hash_counters.h"
#include "hash_kernels.h"
#include "hash_places.cuh"
#include "warp_reductions.cuh"

namespace torchembed {
namespace {

// No place: greater than any.
constexpr unsigned kNoPlace = UINT_MAX;
constexpr uint64_t kGreatest = ~uint64_t{0};

// An unsigned number that has the order of `value`.
__device__ uint64_t ordered(int64_t value) {
  return static_cast<uint64_t>(value) ^ (uint64_t{1} << 63);
}

// The number that was ordered.
__device__ int64_t number_of(uint64_t ordered) {
  return static_cast<int64_t>(ordered ^ (uint64_t{1} << 63));
}

// What a warp has counted of one table since it was last written to its counters; in shared memory.
struct InsertionCounts {
  int inserted, refused, evicted;
  int64_t age;

  // Adds one key of each lane that inserts, and of each that is refused one; `age` is that of the
  // key that it evicts.
  __device__ void add(bool is_inserted, bool is_refused, bool evicts, int64_t age_of_lane) {
    const unsigned all_inserted = __ballot_sync(kAllLanes, is_inserted);
    const unsigned all_refused = __ballot_sync(kAllLanes, is_refused);
    const unsigned all_evicted = __ballot_sync(kAllLanes, evicts);
    const int64_t sum = all_evicted == 0 ? 0 : sum_of_lanes(evicts ? age_of_lane : 0);
    if (lane_of_warp() != 0) return;
    inserted += __popc(all_inserted);
    refused += __popc(all_refused);
    evicted += __popc(all_evicted);
    age += sum;
  }

  // Writes and forgets all, by one lane.
  __device__ void write(int64_t* counters) {
    if (lane_of_warp() != 0) return;
    if ((inserted | refused) != 0) {
      const auto add_to = [&](Counter counter, int64_t value) {
        atomicAdd(reinterpret_cast<unsigned long long*>(counters + counter),
                  static_cast<unsigned long long>(value));
      };
      add_to(kSize, inserted - evicted);
      add_to(kInserted, inserted);
      add_to(kRefused, refused);
      add_to(kEvictedFull, evicted);
      add_to(kEvictedAge, age);
    }
    *this = InsertionCounts{};
  }
};

// The slot that a key takes, and what another key that is evicted for it had.
struct TakenSlot {
  int64_t slot;
  bool evicts;
  int64_t score, last_use;
};

struct InsertionBlock {
  const BinnedInsertion& insertion;
  const int table;
  const int num_slots, num_buckets;  // slots of a bucket
  const int64_t block, num_blocks, first_slot;

  __device__ InsertionBlock(const BinnedInsertion& binned, int of_table, int64_t number,
                            const TableShape& shape)
      : insertion(binned),
        table(of_table),
        num_slots(static_cast<int>(shape.num_slots)),
        num_buckets(static_cast<int>(shape.num_buckets)),
        block(number),
        num_blocks(shape.num_blocks),
        first_slot(shape.first_slot + block * shape.num_buckets * shape.num_slots) {}

  __device__ int64_t epoch() const { return *insertion.epoch; }
  __device__ int64_t released() const { return *insertion.released; }

  __device__ bool has(uint64_t hash) const { return block_of_hash(hash, num_blocks) == block; }

  // The score of a new key that stands `num_equal` times in the batch.
  template <int kPolicy>
  __device__ int64_t new_score(int num_equal, int64_t of_caller) const {
    if constexpr (kPolicy == kLru) return epoch();
    if constexpr (kPolicy == kLfu) return num_equal;
    if constexpr (kPolicy == kEpochLfu) return num_equal + (*insertion.epoch_number << 32);
    return of_caller;
  }

  // Gives `taken` to a key, by one lane. `place` is its entry of the results.
  __device__ void write(int64_t key, unsigned digest, const TakenSlot& taken, int64_t score,
                        int place) const {
    const HashMemory& held = insertion.held;
    const int64_t slot = taken.slot;
    if (taken.evicts) {
      insertion.evicted_keys[place] = held.keys[slot];
      insertion.evicted_scores[place] = taken.score;
      insertion.evicted_touched[place] = taken.last_use;
    }
    held.digests[slot] = static_cast<uint8_t>(digest);
    held.keys[slot] = key;
    held.touched[slot] = epoch();
    if (held.scores != nullptr) held.scores[slot] = score;
    insertion.is_inserted[place] = 1;
    insertion.new_keys[place] = key;
    insertion.new_tables[place] = table;
    insertion.new_slots[place] = slot;
    insertion.is_evicted[place] = taken.evicts;
  }
};

}  // namespace
}  // namespace torchembed
