// Places of digests in buckets: a warp looks for one digest in each of 32 buckets at a time.
//
// Eight lanes copy the digests of a bucket to shared memory, 16 each, so that those of all buckets
// are under way at once and take no registers.

#pragma once

#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "hash_places.cuh"
#include "warp_reductions.cuh"

namespace torchembed {
namespace {

constexpr int kPieceBytes = 16;
constexpr int kPieces = kBucketSlots / kPieceBytes;
constexpr int kBucketsOfRound = kLanes / kPieces;

// A bucket in which a lane looks for a digest.
struct alignas(16) BucketSearch {
  int64_t begin;    // where its pieces begin
  int num_bytes;    // from there to its end
  unsigned digest;  // four times
};

// Shared memory of a warp.
struct SearchMemory {
  alignas(16) char arrivals[kLanes * kBucketSlots];
  // One after the other; each gives way to the bits of its pieces.
  BucketSearch searches[kLanes];
};

// The bits of the bytes of `word` that are equal to those of `wanted`, four of them.
__device__ unsigned equal_bytes(unsigned word, unsigned wanted) {
  const unsigned other = word ^ wanted, low = 0x7F7F7F7Fu;
  // The highest bit of each byte that is 0; no carry crosses bytes.
  const unsigned zeros = ~(((other & low) + low) | other | low);
  // Moves bits 7, 15, 23 and 31 to 28 to 31.
  return zeros * 0x00204081u >> 28;
}

// The same of 16 bytes.
__device__ unsigned equal_bytes(const uint4& words, unsigned wanted) {
  return equal_bytes(words.x, wanted) | equal_bytes(words.y, wanted) << 4 |
         equal_bytes(words.z, wanted) << 8 | equal_bytes(words.w, wanted) << 12;
}

// A set of places of a bucket, a bit for each.
struct Places {
  uint64_t low, high;

  __device__ bool is_empty() const { return (low | high) == 0; }
  __device__ int count() const { return __popcll(low) + __popcll(high); }

  // -1 where there is none.
  __device__ int first() const {
    if (low != 0) return __ffsll(static_cast<long long>(low)) - 1;
    return high == 0 ? -1 : 63 + __ffsll(static_cast<long long>(high));
  }

  __device__ void remove_first() {
    if (low != 0) {
      low &= low - 1;
    } else {
      high &= high - 1;
    }
  }
};

__device__ uint64_t lowest_bits(int count) {
  return count >= 64 ? ~uint64_t{0} : count <= 0 ? 0 : (uint64_t{1} << count) - 1;
}

// The places with `digest` in the bucket of each lane that wants it, which has `num_slots` of
// `digests` from slot `first` on; none on other lanes.
__device__ Places places_of_digest(SearchMemory& memory, const uint8_t* digests, int64_t first,
                                   int num_slots, uint32_t digest, bool is_wanted) {
  const int lane = lane_of_warp(), piece = lane % kPieces;
  // Pieces begin at multiples of their size, buckets anywhere, so that they may end in a ninth one.
  const int offset = static_cast<int>(first % kPieceBytes);
  const int64_t begin = first - offset;
  const int num_bytes = offset + num_slots;
  const unsigned wanted = __ballot_sync(kAllLanes, is_wanted);
  const int num_wanted = __popc(wanted), own = __popc(wanted & ((1u << lane) - 1));
  uint4 ninth{};
  if (is_wanted) {
    memory.searches[own] = {begin, num_bytes, digest * 0x01010101u};
    if (num_bytes > kBucketSlots) {
      ninth = *reinterpret_cast<const uint4*>(digests + begin + kBucketSlots);
    }
  }
  __syncwarp();
#pragma unroll 4
  for (int at = lane / kPieces; at < num_wanted; at += kBucketsOfRound) {
    const BucketSearch& search = memory.searches[at];
    if (search.num_bytes <= piece * kPieceBytes) continue;
    __pipeline_memcpy_async(memory.arrivals + at * kBucketSlots + piece * kPieceBytes,
                            digests + search.begin + piece * kPieceBytes, kPieceBytes);
  }
  __pipeline_commit();
  __pipeline_wait_prior(0);
  // What was not copied is anything, as is what lies beside a bucket.
  for (int round = 0; round < num_wanted; round += kBucketsOfRound) {
    const int at = round + lane / kPieces;
    const bool is_search = at < num_wanted;
    unsigned equal = 0;
    if (is_search) {
      const auto* const pieces = reinterpret_cast<const uint4*>(memory.arrivals);
      equal = equal_bytes(pieces[at * kPieces + piece], memory.searches[at].digest);
    }
    __syncwarp();
    auto* const found = reinterpret_cast<uint16_t*>(memory.searches);
    if (is_search) found[at * kPieces + piece] = static_cast<uint16_t>(equal);
  }
  __syncwarp();
  Places places{0, 0};
  if (is_wanted) {
    const uint4 found = reinterpret_cast<const uint4*>(memory.searches)[own];
    places = {found.x | static_cast<uint64_t>(found.y) << 32,
              found.z | static_cast<uint64_t>(found.w) << 32};
    if (offset != 0) {
      const uint64_t last = equal_bytes(ninth, digest * 0x01010101u);
      places.low = places.low >> offset | places.high << (64 - offset);
      places.high = places.high >> offset | last << (64 - offset);
    }
    places.low &= lowest_bits(num_slots);
    places.high &= lowest_bits(num_slots - 64);
  }
  __syncwarp();
  return places;
}

}  // namespace
}  // namespace torchembed
