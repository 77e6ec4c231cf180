// What a warp knows of the buckets of a block that it inserts keys into: bucket i on lane i.

#pragma once

#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "bucket_places.cuh"
#include "insertion_block.cuh"
#include "warp_reductions.cuh"

namespace torchembed {
namespace {

// The slot of a bucket that is evicted first.
struct Victim {
  int64_t score, last_use;
  unsigned place;  // kNoPlace where all rows are in use

  // Whether it goes before `other`, of a bucket that comes before its own.
  __device__ bool goes_before(const Victim& other) const {
    if (place == kNoPlace) return false;
    if (other.place == kNoPlace || score < other.score) return true;
    return score == other.score && last_use < other.last_use;
  }
};

// Shared memory of a warp.
struct BucketMemory {
  SearchMemory search;
  // Bits of the places of each bucket that keys have taken.
  alignas(16) unsigned taken[kLanes][kBucketSlots / 32];
};

// Sets of buckets are the bits of a word. All lanes call each function together.
template <bool kHasScores>
class LaneBuckets {
 public:
  __device__ LaneBuckets(const InsertionBlock& block, BucketMemory& memory)
      : block_(block), memory_(memory) {
    *reinterpret_cast<uint4*>(memory.taken[lane_of_warp()]) = uint4{};
    __syncwarp();
  }

  // Reads the free slots of those of `buckets` where they are not known.
  __device__ void read_free(unsigned buckets) {
    const unsigned wanted = buckets & ~with_free_;
    if (wanted == 0) return;
    const int lane = lane_of_warp();
    const bool is_wanted = (wanted >> lane & 1) != 0;
    const int64_t first = block_.first_slot + lane * block_.num_slots;
    const uint8_t* const digests = block_.insertion.held.digests;
    const Places found =
        places_of_digest(memory_.search, digests, first, block_.num_slots, 0, is_wanted);
    if (is_wanted) free_ = found;
    with_free_ |= wanted;
  }

  // Finds the victims of those of `buckets` where they are not known.
  __device__ void find_victims(unsigned buckets) {
    for (unsigned left = buckets & ~with_victim_; left != 0;) {
      unsigned rest = left;
      fetch_slots(rest);
      __pipeline_commit();
      __pipeline_wait_prior(0);
      // Loops that are not unrolled: what is executed once is fetched for each instruction.
#pragma unroll 1
      for (int i = 0; left != rest; ++i) {
        find_victim(i, __ffs(static_cast<int>(left)) - 1);
        left &= left - 1;
      }
    }
    with_victim_ |= buckets;
  }

  // The number of free slots of the lane's bucket, times 256, and the first one of them.
  __device__ unsigned free() const { return free_.count() << 8 | (free_.first() & 0xFF); }

  // The victim of the bucket that each lane asks for.
  __device__ Victim victim(unsigned bucket) const {
    Victim found;
    found.score = __shfl_sync(kAllLanes, victim_.score, bucket);
    found.last_use = kHasScores ? __shfl_sync(kAllLanes, victim_.last_use, bucket) : found.score;
    found.place = __shfl_sync(kAllLanes, victim_.place, bucket);
    return found;
  }

  // Lanes with a `place` take it in `bucket`, each in another one: the first free place, or the
  // victim where none is free.
  __device__ void take(unsigned bucket, unsigned place) {
    if (place != kNoPlace) memory_.taken[bucket][place / 32] |= 1u << (place % 32);
    const unsigned buckets = bits_of_lanes(place == kNoPlace ? 0 : 1u << bucket);
    with_victim_ &= ~(buckets & __ballot_sync(kAllLanes, free_.is_empty()));
    if ((buckets >> lane_of_warp() & 1) != 0) free_.remove_first();
    __syncwarp();
  }

  // Other code has inserted keys.
  __device__ void forget() {
    __threadfence();
    with_free_ = with_victim_ = 0;
  }

 private:
  static constexpr int kBytesOfSlot = kHasScores ? 16 : 8;
  // Those whose slots are under way at once.
  static constexpr int kBucketsAtOnce =
      static_cast<int>(sizeof(SearchMemory::arrivals)) / (kBucketSlots * kBytesOfSlot);

  __device__ int64_t* touched_here() const {
    return reinterpret_cast<int64_t*>(memory_.search.arrivals) + lane_of_warp();
  }
  __device__ int64_t* scores_here() const {
    return touched_here() + (kHasScores ? kBucketsAtOnce * kBucketSlots : 0);
  }

  // Starts to copy the slots of the first of `buckets`, and takes these out. Each lane copies what
  // it reads itself, so that it waits for its own copies alone.
  __device__ void fetch_slots(unsigned& buckets) const {
    const int lane = lane_of_warp();
    const HashMemory& held = block_.insertion.held;
#pragma unroll 1
    for (int i = 0; i < kBucketsAtOnce && buckets != 0; ++i) {
      const int number = __ffs(static_cast<int>(buckets)) - 1;
      buckets &= buckets - 1;
      const int64_t first = block_.first_slot + number * block_.num_slots + lane;
      int64_t* const touched = touched_here() + i * kBucketSlots;
      int64_t* const scores = scores_here() + i * kBucketSlots;
#pragma unroll
      for (int j = 0; j < kBucketSlots; j += kLanes) {
        if (j + lane >= block_.num_slots) continue;
        __pipeline_memcpy_async(touched + j, held.touched + first + j, 8);
        if constexpr (kHasScores) __pipeline_memcpy_async(scores + j, held.scores + first + j, 8);
      }
    }
  }

  // Finds the victim of bucket `number`, whose slots were the i-th that were copied.
  __device__ void find_victim(int i, int number) {
    const int lane = lane_of_warp();
    const int64_t released = block_.released();
    const int64_t* const touched = touched_here() + i * kBucketSlots;
    const int64_t* const scores = scores_here() + i * kBucketSlots;
    uint64_t score = kGreatest, last_use = kGreatest;
    unsigned place = kNoPlace;
    const uint4 words = *reinterpret_cast<const uint4*>(memory_.taken[number]);
    const unsigned taken[] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int j = 0; j < kBucketSlots / kLanes; ++j) {
      const int at = j * kLanes;
      const bool is_slot = at + lane < block_.num_slots && (taken[j] >> lane & 1) == 0;
      if (!is_slot || touched[at] > released) continue;
      const uint64_t use = ordered(touched[at]), own = ordered(scores[at]);
      // Places come upwards, so that the first of equals stays. Those without a place are greater.
      bool is_less = own < score;
      if constexpr (kHasScores) is_less = is_less || (own == score && use < last_use);
      if (!is_less && place != kNoPlace) continue;
      score = own;
      last_use = use;
      place = at + lane;
    }
    const uint64_t least = least_of_lanes(score);
    bool is_left = place != kNoPlace && score == least;
    uint64_t longest = least;
    if constexpr (kHasScores) {
      longest = least_of_lanes(is_left ? last_use : kGreatest);
      is_left = is_left && last_use == longest;
    }
    const unsigned first = least_of_lanes(is_left ? place : kNoPlace);
    if (lane == number) victim_ = {number_of(least), number_of(longest), first};
  }

  const InsertionBlock& block_;
  BucketMemory& memory_;
  // Buckets whose free slots, and whose victims, are known.
  unsigned with_free_ = 0, with_victim_ = 0;
  Places free_{0, 0};
  Victim victim_{0, 0, kNoPlace};
};

}  // namespace
}  // namespace torchembed
