// Inserts binned keys into hash tables, as insert_keys.py does.
//
// A warp takes a block of a table at a time. Its digests are copied into shared memory once, and
// its keys, one or two on each lane, are put in the order of their hashes by counting lesser ones.
// So what one key after the other waits for is shared memory, and few instructions; where its
// buckets are full, it is memory for the epochs and scores of their slots. The keys' slots are
// written for all of them together, at last: what they have taken is noted in shared memory until
// then.
//
// Byte floor: that of insert_keys.py, with all digests of each block that keys are inserted into.

#include <cuda_runtime.h>

#include <algorithm>
#include <climits>

#include "hash_kernels.h"
#include "hash_places.cuh"

namespace torchembed {
namespace {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr int kLanes = 32;
constexpr int kWarps = 8;
constexpr int kBlocksOfMultiprocessor = 3;
// Buckets of a block that is copied into shared memory; larger ones are not.
constexpr int kNotedBuckets = 32;
// Keys of a block that the lanes hold; of more none are held.
constexpr int kKeysOfLane = 2;
constexpr int kPlacesOfLane = kBucketSlots / kLanes;
constexpr unsigned kNoKey = UINT_MAX;
constexpr uint64_t kGreatest = ~uint64_t{0};

// The values of Policy and Counter in torchembed/core/hash_tables.py.
enum Policy : int { kLru, kLfu, kEpochLfu, kCaller };
enum Counter { kSize = 0, kInserted = 3, kRefused = 4, kEvictedFull = 5, kEvictedAge = 10 };
constexpr int kNumCounters = 11;

template <class Value, class Function>
__device__ Value reduced(Value value, const Function& function) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    value = function(value, __shfl_xor_sync(kAllLanes, value, step));
  }
  return value;
}

__device__ int64_t sum_of_lanes(int64_t value) {
  return reduced(value, [](int64_t a, int64_t b) { return a + b; });
}

__device__ int sum_of_lanes(int value) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  return __reduce_add_sync(kAllLanes, value);
#else
  return reduced(value, [](int a, int b) { return a + b; });
#endif
}

__device__ unsigned least_of_lanes(unsigned value) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  return __reduce_min_sync(kAllLanes, value);
#else
  return reduced(value, [](unsigned a, unsigned b) { return min(a, b); });
#endif
}

__device__ uint64_t least_of_lanes(uint64_t value) {
  const auto high = static_cast<unsigned>(value >> 32), low = static_cast<unsigned>(value);
  const unsigned least_high = least_of_lanes(high);
  const unsigned least_low = least_of_lanes(high == least_high ? low : UINT_MAX);
  return static_cast<uint64_t>(least_high) << 32 | least_low;
}

__device__ int64_t greatest_of_lanes(int64_t value) {
  return reduced(value, [](int64_t a, int64_t b) { return max(a, b); });
}

// An unsigned number that has the order of `value`.
__device__ uint64_t ordered(int64_t value) {
  return static_cast<uint64_t>(value) ^ (uint64_t{1} << 63);
}

// What a warp notes of the block that it inserts into; places of a bucket follow those of the one
// before by kBucketSlots, however many slots it has.
struct Notes {
  // Those of places that are no slots are not 0.
  alignas(16) uint8_t digests[kNotedBuckets * kBucketSlots];
  // Bits of places that the block's keys took.
  unsigned taken[kNotedBuckets * kBucketSlots / 32];
};

// What one table has counted since it was last written to its counters; a share on each lane.
struct Counts {
  int inserted = 0, refused = 0, evicted = 0;
  int64_t age = 0;

  __device__ void write(int64_t* counters) {
    inserted = sum_of_lanes(inserted);
    refused = sum_of_lanes(refused);
    evicted = sum_of_lanes(evicted);
    age = sum_of_lanes(age);
    if (threadIdx.x % kLanes == 0 && (inserted | refused) != 0) {
      const auto add = [&](Counter counter, int64_t value) {
        atomicAdd(reinterpret_cast<unsigned long long*>(counters + counter),
                  static_cast<unsigned long long>(value));
      };
      add(kSize, inserted - evicted);
      add(kInserted, inserted);
      add(kRefused, refused);
      add(kEvictedFull, evicted);
      add(kEvictedAge, age);
    }
    *this = Counts();
  }
};

// The slot that a key takes, -1 for none; whether another key is evicted for it.
struct Taken {
  int64_t slot;
  bool evicts;
};

// The slot to evict among those that a warp has looked at, by its place in both buckets.
class Victim {
 public:
  // Looks at kPlacesOfLane slots of one bucket, whose first place is `begin`.
  __device__ void look_at(const HashMemory& held, int64_t first_slot, int num_slots, int begin,
                          int64_t released, const unsigned* taken) {
    const int lane = threadIdx.x % kLanes;
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
      if (taken != nullptr && (taken[i] >> lane & 1) != 0) continue;
      // Places come upwards, so that the first of equals stays.
      const bool is_less =
          place_ == kNoKey || scores[i] < score_ || (scores[i] == score_ && touched[i] < last_use_);
      if (!is_less) continue;
      score_ = scores[i];
      last_use_ = touched[i];
      place_ = begin + place;
    }
  }

  // Of the slots of all lanes the least score, of these the longest unused one, of these the first;
  // kNoKey where there is none, or its score exceeds `score`. The same on all lanes.
  __device__ unsigned place(int64_t score, bool has_scores) const {
    bool is_left = place_ != kNoKey;
    if (__ballot_sync(kAllLanes, is_left) == 0) return kNoKey;
    const uint64_t least = least_of_lanes(is_left ? ordered(score_) : kGreatest);
    if (least > ordered(score)) return kNoKey;
    is_left = is_left && ordered(score_) == least;
    if (has_scores) {
      const uint64_t longest = least_of_lanes(is_left ? ordered(last_use_) : kGreatest);
      is_left = is_left && ordered(last_use_) == longest;
    }
    return least_of_lanes(is_left ? place_ : kNoKey);
  }

 private:
  int64_t score_ = 0, last_use_ = 0;
  unsigned place_ = kNoKey;
};

// A block of a table, into which a warp inserts keys.
template <int kPolicy>
class Block {
 public:
  __device__ Block(const BinnedInsertion& insertion, const TableShape& shape, int table,
                   int64_t block, int64_t epoch, int64_t released)
      : insertion_(insertion),
        shape_(shape),
        table_(table),
        block_(block),
        epoch_(epoch),
        released_(released),
        first_slot_(shape.first_slot + block * shape.num_buckets * shape.num_slots),
        num_slots_(static_cast<int>(shape.num_slots)) {}

  // Inserts its keys among the binned ones from `entry` to `end`, of which the lanes hold all, by
  // notes, so that the block must fit into these, and rows of this batch must be in use.
  __device__ void insert_held(int entry, int end, Notes& notes, Counts& counts) {
    const int count = end - entry, lane = threadIdx.x % kLanes;
    uint64_t hashes[kKeysOfLane];
    // How many keys are less than this one, -1 where there is none; and how many are equal.
    int ranks[kKeysOfLane]{}, equals[kKeysOfLane]{};
    bool is_first[kKeysOfLane], evicts[kKeysOfLane];
    // Its place in the notes, -1 for none.
    int places[kKeysOfLane];
    [[maybe_unused]] int64_t scores[kKeysOfLane]{};
#pragma unroll
    for (int i = 0; i < kKeysOfLane; ++i) {
      const int number = i * kLanes + lane;
      hashes[i] = hash_of_key(number < count ? insertion_.bin_keys[entry + number] : 0);
      is_first[i] = number < count && block_of_hash(hashes[i], shape_.num_blocks) == block_;
      places[i] = -1;
      evicts[i] = false;
    }
    copy_digests(notes);
#pragma unroll
    for (int i = 0; i < kKeysOfLane; ++i) {
#pragma unroll 1
      for (int from = 0; from < kLanes && i * kLanes + from < count; ++from) {
        const uint64_t hash = __shfl_sync(kAllLanes, hashes[i], from);
#pragma unroll
        for (int j = 0; j < kKeysOfLane; ++j) {
          ranks[j] += hash < hashes[j];
          const bool is_equal = hash == hashes[j];
          equals[j] += is_equal;
          if (is_equal && i * kLanes + from < j * kLanes + lane) is_first[j] = false;
        }
      }
    }
    // What the next key is found by: its rank and both its buckets, of 5 bits each.
    unsigned waiting[kKeysOfLane];
#pragma unroll
    for (int i = 0; i < kKeysOfLane; ++i) {
      if (i * kLanes + lane >= count) ranks[i] = -1;
      waiting[i] = kNoKey;
      if (!is_first[i] || num_slots_ == 0) continue;
      const BucketPair buckets(hashes[i], shape_);
      const auto first = static_cast<unsigned>(buckets.first - first_slot_) / num_slots_;
      const auto second = static_cast<unsigned>(buckets.second - first_slot_) / num_slots_;
      waiting[i] = static_cast<unsigned>(ranks[i]) << 10 | first << 5 | second;
    }
    if (num_slots_ == 0) {
#pragma unroll
      for (int i = 0; i < kKeysOfLane; ++i) counts.refused += is_first[i];
    }
    for (;;) {
      unsigned next = waiting[0];
#pragma unroll
      for (int i = 1; i < kKeysOfLane; ++i) next = min(next, waiting[i]);
      next = least_of_lanes(next);
      if (next == kNoKey) break;
      const int rank = static_cast<int>(next >> 10);
      const unsigned first = next >> 5 & 31, second = next & 31;
      const auto* const words = reinterpret_cast<const unsigned*>(notes.digests);
      const unsigned free_first = __vcmpeq4(words[first * kLanes + lane], 0);
      const unsigned free_second =
          first == second ? 0 : __vcmpeq4(words[second * kLanes + lane], 0);
      const int num_free = sum_of_lanes(__popc(free_first) << 16 | __popc(free_second));
      int place = -1;
      [[maybe_unused]] int64_t score = epoch_;
      if (num_free != 0) {
        const bool from_second = (num_free & 0xFFFF) > num_free >> 16;
        const unsigned found = from_second ? free_second : free_first;
        const int from = __ffs(__ballot_sync(kAllLanes, found != 0)) - 1;
        const int byte = __shfl_sync(kAllLanes, (__ffs(found) - 1) / 8, from);
        place = (from_second ? second : first) * kBucketSlots + from * 4 + byte;
      }
      if constexpr (kPolicy == kCaller) {
        score = LLONG_MIN;
#pragma unroll
        for (int i = 0; i < kKeysOfLane; ++i) {
          if (ranks[i] != rank) continue;
          const int position = insertion_.bin_positions[entry + i * kLanes + lane];
          score = max(score, insertion_.scores_in[position]);
        }
        score = greatest_of_lanes(score);
      }
      if (num_free == 0) {
        if constexpr (kPolicy == kLfu || kPolicy == kEpochLfu) {
          int num_equal = 0;
#pragma unroll
          for (int i = 0; i < kKeysOfLane; ++i) {
            if (ranks[i] == rank) num_equal = equals[i];
          }
          score = score_of(static_cast<int>(greatest_of_lanes(int64_t{num_equal})), 0);
        }
        Victim victim;
        look_for(victim, first, 0, &notes);
        if (first != second) look_for(victim, second, kBucketSlots, &notes);
        const unsigned found = victim.place(score, kPolicy != kLru);
        if (found != kNoKey) {
          place = (found < kBucketSlots ? first : second) * kBucketSlots + found % kBucketSlots;
        } else {
          counts.refused += lane == 0;
        }
      }
#pragma unroll
      for (int i = 0; i < kKeysOfLane; ++i) {
        if (ranks[i] != rank) continue;
        places[i] = place;
        evicts[i] = num_free == 0;
        if constexpr (kPolicy == kCaller) scores[i] = score;
        if (waiting[i] != next) continue;
        waiting[i] = kNoKey;
        if (place < 0) continue;
        notes.digests[place] = static_cast<uint8_t>(digest_of_hash(hashes[i]));
        notes.taken[place / 32] |= 1u << (place % 32);
      }
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < kKeysOfLane; ++i) {
      if (places[i] < 0) continue;
      const int at = entry + i * kLanes + lane;
      const int64_t slot =
          first_slot_ + places[i] / kBucketSlots * num_slots_ + places[i] % kBucketSlots;
      insertion_.slots[insertion_.bin_positions[at]] = slot;
      if (!is_first[i]) continue;
      const int64_t score = score_of(equals[i], scores[i]);
      write(insertion_.bin_keys[at], hashes[i], {slot, evicts[i]}, score, entry + ranks[i], counts);
    }
  }

  // The same of any number of keys and any block, and without notes. In each pass over the keys the
  // warp finds the one that comes next.
  __device__ void insert_all(int entry, int end, Counts& counts) {
    const int lane = threadIdx.x % kLanes;
    uint64_t last = 0;
    for (bool is_first_key = true;; is_first_key = false) {
      // The least hash above the last one, and entries of lesser hashes.
      uint64_t own = kGreatest;
      int64_t score = LLONG_MIN;
      int num_equal = 0, num_before = 0;
      for (int at = entry + lane; at < end; at += kLanes) {
        const uint64_t hash = hash_of_key(insertion_.bin_keys[at]);
        if (!is_left(hash, last, is_first_key) || hash > own) continue;
        num_equal = hash < own ? 1 : num_equal + 1;
        own = hash;
      }
      const uint64_t least = least_of_lanes(num_equal > 0 ? own : kGreatest);
      num_equal = sum_of_lanes(own == least ? num_equal : 0);
      if (num_equal == 0) break;
      int64_t key = 0;
      bool has_key = false;
      for (int at = entry + lane; at < end; at += kLanes) {
        const int64_t found = insertion_.bin_keys[at];
        const uint64_t hash = hash_of_key(found);
        num_before += hash < least;
        if (hash != least) continue;
        key = found;
        has_key = true;
        if constexpr (kPolicy == kCaller) {
          score = max(score, insertion_.scores_in[insertion_.bin_positions[at]]);
        }
      }
      num_before = sum_of_lanes(num_before);
      if constexpr (kPolicy == kCaller) score = greatest_of_lanes(score);
      key = __shfl_sync(kAllLanes, key, __ffs(__ballot_sync(kAllLanes, has_key)) - 1);
      score = score_of(num_equal, score);
      const Taken taken = take(least, score);
      if (taken.slot < 0) {
        counts.refused += lane == 0;
      } else {
        for (int at = entry + lane; at < end; at += kLanes) {
          if (insertion_.bin_keys[at] != key) continue;
          insertion_.slots[insertion_.bin_positions[at]] = taken.slot;
        }
        if (lane == 0) write(key, least, taken, score, entry + num_before, counts);
        // The next key sees what this lane wrote.
        __syncwarp();
      }
      last = least;
    }
  }

 private:
  __device__ bool is_left(uint64_t hash, uint64_t last, bool is_first_key) const {
    return (is_first_key || hash > last) && block_of_hash(hash, shape_.num_blocks) == block_;
  }

  __device__ void copy_digests(Notes& notes) const {
    const int lane = threadIdx.x % kLanes;
    const int num_places = static_cast<int>(shape_.num_buckets) * kBucketSlots;
    const uint8_t* const digests = insertion_.held.digests + first_slot_;
    if (num_slots_ == kBucketSlots && first_slot_ % 16 == 0) {
      const auto* const source = reinterpret_cast<const uint4*>(digests);
      auto* const target = reinterpret_cast<uint4*>(notes.digests);
#pragma unroll 4
      for (int i = lane; 16 * i < num_places; i += kLanes) target[i] = source[i];
    } else {
#pragma unroll 4
      for (int i = lane; i < num_places; i += kLanes) {
        const int bucket = i / kBucketSlots, place = i % kBucketSlots;
        notes.digests[i] = place < num_slots_ ? digests[bucket * num_slots_ + place] : 0xFF;
      }
    }
    for (int i = lane; 32 * i < num_places; i += kLanes) notes.taken[i] = 0;
    __syncwarp();
  }

  __device__ int64_t score_of(int num_equal, int64_t of_caller) const {
    if constexpr (kPolicy == kLru) return epoch_;
    if constexpr (kPolicy == kLfu) return num_equal;
    if constexpr (kPolicy == kEpochLfu) return num_equal + (*insertion_.epoch_number << 32);
    return of_caller;
  }

  // Looks at the slots of a bucket of the block, whose places in both buckets are from `begin` on.
  __device__ void look_for(Victim& victim, int bucket, int begin, const Notes* notes) const {
    const unsigned* const taken =
        notes == nullptr ? nullptr : notes->taken + bucket * kBucketSlots / 32;
    victim.look_at(insertion_.held, first_slot_ + int64_t{bucket} * num_slots_, num_slots_, begin,
                   released_, taken);
  }

  // The slot of a new key: the first free one of the emptier bucket, of the first bucket where they
  // are equally full; else the one that is evicted.
  __device__ Taken take(uint64_t hash, int64_t score) const {
    const int lane = threadIdx.x % kLanes;
    const BucketPair buckets(hash, shape_);
    const bool has_two = buckets.first != buckets.second;
    // By bit i of a lane, place i * kLanes + lane.
    unsigned free_first = 0, free_second = 0;
#pragma unroll
    for (int i = 0; i < kPlacesOfLane; ++i) {
      const int place = i * kLanes + lane;
      if (place >= num_slots_) continue;
      const uint8_t* const digests = insertion_.held.digests + place;
      free_first |= unsigned{digests[buckets.first] == 0} << i;
      if (has_two) free_second |= unsigned{digests[buckets.second] == 0} << i;
    }
    const int num_free = sum_of_lanes(__popc(free_first) << 16 | __popc(free_second));
    if (num_free != 0) {
      const bool from_second = (num_free & 0xFFFF) > num_free >> 16;
      const unsigned found = from_second ? free_second : free_first;
      const unsigned place =
          least_of_lanes(found == 0 ? kNoKey : (__ffs(found) - 1) * kLanes + lane);
      return {(from_second ? buckets.second : buckets.first) + place, false};
    }
    if (num_slots_ == 0) return {-1, true};
    Victim victim;
    const auto first = static_cast<int>((buckets.first - first_slot_) / num_slots_);
    const auto second = static_cast<int>((buckets.second - first_slot_) / num_slots_);
    look_for(victim, first, 0, nullptr);
    if (has_two) look_for(victim, second, kBucketSlots, nullptr);
    const unsigned found = victim.place(score, kPolicy != kLru);
    if (found == kNoKey) return {-1, true};
    return {(found < kBucketSlots ? buckets.first : buckets.second) + found % kBucketSlots, true};
  }

  // Gives `taken` to a key, by one lane. `place` is its entry of the results.
  __device__ void write(int64_t key, uint64_t hash, const Taken& taken, int64_t score, int place,
                        Counts& counts) {
    const HashMemory& held = insertion_.held;
    const int64_t slot = taken.slot;
    if (taken.evicts) {
      const int64_t last_use = held.touched[slot];
      insertion_.evicted_keys[place] = held.keys[slot];
      insertion_.evicted_scores[place] = held.scores == nullptr ? last_use : held.scores[slot];
      insertion_.evicted_touched[place] = last_use;
      counts.evicted += 1;
      counts.age += epoch_ - last_use;
    }
    held.digests[slot] = static_cast<uint8_t>(digest_of_hash(hash));
    held.keys[slot] = key;
    held.touched[slot] = epoch_;
    if (held.scores != nullptr) held.scores[slot] = score;
    insertion_.is_inserted[place] = 1;
    insertion_.new_keys[place] = key;
    insertion_.new_tables[place] = table_;
    insertion_.new_slots[place] = slot;
    insertion_.is_evicted[place] = taken.evicts;
    counts.inserted += 1;
  }

  const BinnedInsertion& insertion_;
  const TableShape shape_;
  const int table_;
  const int64_t block_, epoch_, released_, first_slot_;
  const int num_slots_;
};

// The blocks of all tables one after the other; a warp goes through them upwards.
class Blocks {
 public:
  __device__ explicit Blocks(const HashMemory& held) : held_(held) { load(0); }

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
    const int lane = threadIdx.x % kLanes, own = first_table + lane;
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

template <int kPolicy>
__global__ void __launch_bounds__(kWarps* kLanes, kBlocksOfMultiprocessor)
    insert_kernel(const __grid_constant__ BinnedInsertion insertion) {
  __shared__ Notes notes[kWarps];
  const int64_t epoch = *insertion.epoch, released = *insertion.released;
  const int64_t num_warps = int64_t{gridDim.x} * kWarps;
  Blocks blocks(insertion.held);
  Counts counts;
  int counted_table = 0;
  for (int64_t number = int64_t{blockIdx.x} * kWarps + threadIdx.x / kLanes; blocks.find(number);
       number += num_warps) {
    const TableShape shape(insertion.held.geometry, blocks.table);
    // The bins with hashes from block / num_blocks on, to those before the next block's.
    const int64_t divisor = max(shape.num_blocks, int64_t{1});
    const int64_t before = int64_t{blocks.table} << insertion.bins_log2;
    const int64_t first_bin = before + (blocks.block << insertion.bins_log2) / divisor;
    const int64_t last_bin = before + (((blocks.block + 1) << insertion.bins_log2) - 1) / divisor;
    const int entry = first_bin > 0 ? insertion.bin_ends[first_bin - 1] : 0;
    const int end = insertion.bin_ends[last_bin];
    if (entry == end) continue;
    if (blocks.table != counted_table) {
      counts.write(insertion.held.counters + int64_t{counted_table} * kNumCounters);
      counted_table = blocks.table;
    }
    Block<kPolicy> block(insertion, shape, blocks.table, blocks.block, epoch, released);
    if (end - entry <= kKeysOfLane * kLanes && shape.num_buckets <= kNotedBuckets &&
        released < epoch) {
      block.insert_held(entry, end, notes[threadIdx.x / kLanes], counts);
    } else {
      block.insert_all(entry, end, counts);
    }
    // All lanes are done with the notes before those of the next block.
    __syncwarp();
  }
  counts.write(insertion.held.counters + int64_t{counted_table} * kNumCounters);
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
