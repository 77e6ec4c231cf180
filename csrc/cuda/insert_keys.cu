// Inserts binned keys into hash tables, as insert_keys.py does.
//
// A warp takes a block of a table at a time. Its digests are copied into shared memory once, and
// its keys, one or two on each lane, are put in the order of their hashes by counting lesser ones.
// So what one key after the other waits for is shared memory; where its buckets are full, it is
// memory for the epochs and scores of their slots. The keys' slots are written for all of them
// together, at last: what the block has taken is noted in shared memory until then.
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
// Slots of a block that are noted in shared memory; of larger ones none are.
constexpr int kNotedSlots = 4096;
// Keys of a block that the lanes hold; of more none are held.
constexpr int kKeysOfLane = 2;
constexpr int kPlacesOfLane = kBucketSlots / kLanes;
constexpr int kNone = INT_MAX;

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

__device__ int least_of_lanes(int value) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  return __reduce_min_sync(kAllLanes, value);
#else
  return reduced(value, [](int a, int b) { return min(a, b); });
#endif
}

// What a warp notes of the block that it inserts into.
struct Notes {
  // Digests of the block and of up to 15 slots before it, so that they are copied 16 at a time.
  alignas(16) uint8_t digests[kNotedSlots + 16];
  // Bits of slots that the block's keys took.
  unsigned taken[kNotedSlots / 32];
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

// A block of a table, into which a warp inserts keys.
template <int kPolicy>
class Block {
 public:
  // Where `is_noted`, `notes` hold its digests and what keys have taken; else memory is changed for
  // each key at once.
  __device__ Block(const BinnedInsertion& insertion, const TableShape& shape, int table,
                   int64_t block, int64_t epoch, int64_t released, bool is_noted, Notes* notes)
      : insertion_(insertion),
        shape_(shape),
        table_(table),
        block_(block),
        epoch_(epoch),
        released_(released),
        first_slot_(shape.first_slot + block * shape.num_buckets * shape.num_slots),
        num_slots_(static_cast<int>(shape.num_slots)),
        is_noted_(is_noted),
        notes_(notes) {
    if (is_noted_) copy_digests();
  }

  // Inserts its keys among the binned ones from `entry` to `end`, of which the lanes hold all.
  __device__ void insert_held(int entry, int end, Counts& counts) {
    const int count = end - entry, lane = threadIdx.x % kLanes;
    uint64_t hashes[kKeysOfLane];
    // The slot that a key takes, from the block's first on; -1 for none.
    int places[kKeysOfLane];
    [[maybe_unused]] int64_t scores[kKeysOfLane]{};
    // The keys less than this one, and its equals; whether it is the first of these and waits.
    int ranks[kKeysOfLane]{}, equals[kKeysOfLane]{};
    bool waits[kKeysOfLane], is_first[kKeysOfLane], evicts[kKeysOfLane];
#pragma unroll
    for (int i = 0; i < kKeysOfLane; ++i) {
      const int number = i * kLanes + lane;
      hashes[i] = hash_of_key(number < count ? insertion_.bin_keys[entry + number] : 0);
      is_first[i] = number < count && block_of_hash(hashes[i], shape_.num_blocks) == block_;
      places[i] = -1;
      evicts[i] = false;
    }
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
#pragma unroll
    for (int i = 0; i < kKeysOfLane; ++i) waits[i] = is_first[i];
    for (;;) {
      int next = kNone;
#pragma unroll
      for (int i = 0; i < kKeysOfLane; ++i) next = min(next, waits[i] ? ranks[i] : kNone);
      next = least_of_lanes(next);
      if (next == kNone) break;
      uint64_t hash = 0;
      int num_equal = 0;
      bool is_mine = false;
#pragma unroll
      for (int i = 0; i < kKeysOfLane; ++i) {
        if (!waits[i] || ranks[i] != next) continue;
        hash = hashes[i];
        num_equal = equals[i];
        is_mine = true;
        waits[i] = false;
      }
      const int owner = __ffs(__ballot_sync(kAllLanes, is_mine)) - 1;
      hash = __shfl_sync(kAllLanes, hash, owner);
      num_equal = __shfl_sync(kAllLanes, num_equal, owner);
      int64_t score = LLONG_MIN;
      if constexpr (kPolicy == kCaller) {
#pragma unroll
        for (int i = 0; i < kKeysOfLane; ++i) {
          const int number = i * kLanes + lane;
          if (number < count && hashes[i] == hash) {
            score = max(score, insertion_.scores_in[insertion_.bin_positions[entry + number]]);
          }
        }
        score = reduced(score, [](int64_t a, int64_t b) { return max(a, b); });
      }
      score = score_of(num_equal, score);
      const Taken taken = take(hash, score);
      if (taken.slot < 0) counts.refused += lane == 0;
#pragma unroll
      for (int i = 0; i < kKeysOfLane; ++i) {
        if (i * kLanes + lane < count && hashes[i] == hash) {
          places[i] = taken.slot < 0 ? -1 : static_cast<int>(taken.slot - first_slot_);
          evicts[i] = taken.evicts;
          if constexpr (kPolicy == kCaller) scores[i] = score;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kKeysOfLane; ++i) {
      if (places[i] < 0) continue;
      const int at = entry + i * kLanes + lane;
      const Taken taken{first_slot_ + places[i], evicts[i]};
      insertion_.slots[insertion_.bin_positions[at]] = taken.slot;
      if (!is_first[i]) continue;
      const int64_t score = score_of(equals[i], scores[i]);
      write(insertion_.bin_keys[at], hashes[i], taken, score, entry + ranks[i], counts);
    }
  }

  // The same of any number of keys. In each pass over them the warp finds the one that comes next.
  __device__ void insert_all(int entry, int end, Counts& counts) {
    const int lane = threadIdx.x % kLanes;
    uint64_t last = 0;
    for (bool is_first_key = true;; is_first_key = false) {
      // The least hash above the last one, and entries of lesser hashes.
      uint64_t least = ULLONG_MAX;
      int64_t score = LLONG_MIN;
      int num_equal = 0, num_before = 0;
      for (int at = entry + lane; at < end; at += kLanes) {
        const uint64_t hash = hash_of_key(insertion_.bin_keys[at]);
        if (!is_left(hash, last, is_first_key) || hash > least) continue;
        num_equal = hash < least ? 1 : num_equal + 1;
        least = hash;
      }
      const uint64_t own = least;
      const bool is_found = num_equal > 0;
      least =
          reduced(is_found ? least : ULLONG_MAX, [](uint64_t a, uint64_t b) { return min(a, b); });
      num_equal = sum_of_lanes(is_found && own == least ? num_equal : 0);
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
      score = reduced(score, [](int64_t a, int64_t b) { return max(a, b); });
      key = __shfl_sync(kAllLanes, key, __ffs(__ballot_sync(kAllLanes, has_key)) - 1);
      score = score_of(num_equal, score);
      const Taken taken = take(least, score);
      if (taken.slot < 0) counts.refused += lane == 0;
      if (taken.slot >= 0) {
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

  __device__ void copy_digests() {
    const int lane = threadIdx.x % kLanes;
    const int num_slots = static_cast<int>(shape_.num_buckets) * num_slots_;
    const auto* const source =
        reinterpret_cast<const uint4*>(insertion_.held.digests + (first_slot_ & ~15));
    auto* const target = reinterpret_cast<uint4*>(notes_->digests);
    const int num_bytes = num_slots == 0 ? 0 : static_cast<int>(first_slot_ % 16) + num_slots;
    for (int i = lane; 16 * i < num_bytes; i += kLanes) target[i] = source[i];
    for (int i = lane; 32 * i < num_slots; i += kLanes) notes_->taken[i] = 0;
    __syncwarp();
  }

  __device__ int64_t score_of(int num_equal, int64_t of_caller) const {
    if constexpr (kPolicy == kLru) return epoch_;
    if constexpr (kPolicy == kLfu) return num_equal;
    if constexpr (kPolicy == kEpochLfu) return num_equal + (*insertion_.epoch_number << 32);
    return of_caller;
  }

  __device__ bool is_free(int64_t slot) const {
    return is_noted_ ? notes_->digests[first_slot_ % 16 + (slot - first_slot_)] == 0
                     : insertion_.held.digests[slot] == 0;
  }

  __device__ bool is_taken(int64_t slot) const {
    if (!is_noted_) return false;
    const auto number = static_cast<unsigned>(slot - first_slot_);
    return notes_->taken[number / 32] >> (number % 32) & 1;
  }

  // The slot of a new key: the first free one of the emptier bucket, of the first bucket where they
  // are equally full; else the one that is evicted.
  __device__ Taken take(uint64_t hash, int64_t score) {
    const int lane = threadIdx.x % kLanes;
    const BucketPair buckets(hash, shape_);
    const bool has_two = buckets.first != buckets.second;
    unsigned free[2]{};
#pragma unroll
    for (int i = 0; i < kPlacesOfLane; ++i) {
      const int place = lane * kPlacesOfLane + i;
      if (place >= num_slots_) continue;
      free[0] |= unsigned{is_free(buckets.first + place)} << i;
      if (has_two) free[1] |= unsigned{is_free(buckets.second + place)} << i;
    }
    const int num_free = sum_of_lanes(__popc(free[0]) << 16 | __popc(free[1]));
    Taken taken{-1, num_free == 0};
    if (taken.evicts) {
      taken.slot = evicted_slot(buckets, has_two, score);
    } else {
      const bool from_second = (num_free & 0xFFFF) > num_free >> 16;
      const unsigned found = free[from_second];
      const int place =
          least_of_lanes(found == 0 ? kNone : lane * kPlacesOfLane + __ffs(found) - 1);
      taken.slot = (from_second ? buckets.second : buckets.first) + place;
    }
    if (is_noted_ && taken.slot >= 0) {
      if (lane == 0) {
        const auto number = static_cast<unsigned>(taken.slot - first_slot_);
        notes_->digests[first_slot_ % 16 + number] = digest_of_hash(hash);
        notes_->taken[number / 32] |= 1u << (number % 32);
      }
      __syncwarp();
    }
    return taken;
  }

  // Of the slots of two full buckets that no batch under way uses, that of the least score, the
  // longest unused of these, and the first of these; -1 where its score exceeds `score`.
  __device__ int64_t evicted_slot(const BucketPair& buckets, bool has_two, int64_t score) const {
    const HashMemory& held = insertion_.held;
    const int lane = threadIdx.x % kLanes;
    int64_t least = LLONG_MAX, longest = LLONG_MAX;
    int chosen = kNone;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 1 && !has_two) break;
      const int64_t first = half == 0 ? buckets.first : buckets.second;
      int64_t touched[kPlacesOfLane], scores[kPlacesOfLane];
      // All loads come before the first of their uses.
#pragma unroll
      for (int i = 0; i < kPlacesOfLane; ++i) {
        const int place = lane * kPlacesOfLane + i;
        const bool is_inside = place < num_slots_;
        touched[i] = is_inside ? held.touched[first + place] : LLONG_MAX;
        scores[i] = is_inside && held.scores != nullptr ? held.scores[first + place] : touched[i];
      }
#pragma unroll
      for (int i = 0; i < kPlacesOfLane; ++i) {
        const int place = lane * kPlacesOfLane + i;
        if (place >= num_slots_ || touched[i] > released_ || is_taken(first + place)) continue;
        const bool is_less =
            scores[i] < least || (scores[i] == least && (touched[i] < longest || chosen == kNone));
        if (!is_less) continue;
        least = scores[i];
        longest = touched[i];
        chosen = half * kBucketSlots + place;
      }
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
      const int64_t other_least = __shfl_xor_sync(kAllLanes, least, step);
      const int64_t other_longest = __shfl_xor_sync(kAllLanes, longest, step);
      const int other = __shfl_xor_sync(kAllLanes, chosen, step);
      const bool is_less =
          other != kNone &&
          (chosen == kNone || other_least < least ||
           (other_least == least &&
            (other_longest < longest || (other_longest == longest && other < chosen))));
      if (!is_less) continue;
      least = other_least;
      longest = other_longest;
      chosen = other;
    }
    if (chosen == kNone || least > score) return -1;
    return (chosen >= kBucketSlots ? buckets.second : buckets.first) + chosen % kBucketSlots;
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
  const bool is_noted_;
  Notes* const notes_;
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
    // Rows of this batch are in use where epochs are counted as usual; nothing is noted elsewhere.
    const bool is_noted = shape.num_buckets * shape.num_slots <= kNotedSlots && released < epoch;
    Block<kPolicy> block(insertion, shape, blocks.table, blocks.block, epoch, released, is_noted,
                         &notes[threadIdx.x / kLanes]);
    if (is_noted && end - entry <= kKeysOfLane * kLanes) {
      block.insert_held(entry, end, counts);
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
