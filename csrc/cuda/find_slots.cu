// Finds keys in hash tables.
//
// A warp takes 32 keys, one on each lane. Eight lanes read the digests of a bucket, 16 each, so
// that the buckets of all keys are under way at once; then each lane reads the keys of its own
// candidates, of which there are few.
//
// Byte floor: that of find_slots.py.

#include <cuda_runtime.h>

#include "hash_kernels.h"
#include "hash_places.cuh"

namespace torchembed {
namespace {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr int kLanes = 32;
constexpr int kWarps = 8;
constexpr int kDigestsOfLane = 16;
constexpr int kLanesOfKey = kBucketSlots / kDigestsOfLane;
constexpr int kKeysOfRound = kLanes / kLanesOfKey;
constexpr int kRounds = kLanes / kKeysOfRound;

// The bits of the bytes of `word` that are equal to those of `wanted`, four of them.
__device__ unsigned equal_bytes(unsigned word, unsigned wanted) {
  return ((__vcmpeq4(word, wanted) & 0x08040201u) * 0x01010101u) >> 24;
}

// The same of 16 bytes.
__device__ unsigned equal_bytes(const uint4& words, unsigned wanted) {
  return equal_bytes(words.x, wanted) | equal_bytes(words.y, wanted) << 4 |
         equal_bytes(words.z, wanted) << 8 | equal_bytes(words.w, wanted) << 12;
}

// Candidates for the keys of a warp, one on each lane: bit p of `masks[lane]` where place p of the
// bucket from slot `first` on has the key's digest. None for keys that are not wanted.
__device__ void find_candidates(uint16_t (*masks)[kLanesOfKey], const uint8_t* digests,
                                int64_t first, int num_slots, uint32_t digest, bool is_wanted) {
  const int lane = threadIdx.x % kLanes;
  const int begin = lane % kLanesOfKey * kDigestsOfLane;
  const int count = is_wanted ? num_slots : 0;
  uint4 found[kRounds];
  // A bucket that does not begin at a multiple of 16 goes over into 16 bytes more.
  const bool is_shifted = __any_sync(kAllLanes, count > 0 && first % 16 != 0);
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int key = round * kKeysOfRound + lane / kLanesOfKey;
    const int64_t at = __shfl_sync(kAllLanes, first, key) + begin;
    const int left = __shfl_sync(kAllLanes, count, key) - begin;
    found[round] = uint4{};
    // Only 16 bytes with a digest of the bucket among them are read.
    if (left > 0) found[round] = __ldg(reinterpret_cast<const uint4*>(digests + (at & ~15)));
  }
  unsigned equal[kRounds];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int key = round * kKeysOfRound + lane / kLanesOfKey;
    equal[round] = equal_bytes(found[round], __shfl_sync(kAllLanes, digest, key) * 0x01010101u);
  }
  if (is_shifted) {
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int key = round * kKeysOfRound + lane / kLanesOfKey;
      const int64_t at = __shfl_sync(kAllLanes, first, key) + begin;
      const int left = __shfl_sync(kAllLanes, count, key) - begin;
      const uint32_t wanted = __shfl_sync(kAllLanes, digest, key) * 0x01010101u;
      const int offset = at % 16;
      if (offset != 0 && left > 16 - offset) {
        const uint4 next = __ldg(reinterpret_cast<const uint4*>(digests + (at & ~15)) + 1);
        equal[round] |= equal_bytes(next, wanted) << 16;
      }
      equal[round] >>= offset;
    }
  }
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int key = round * kKeysOfRound + lane / kLanesOfKey;
    const int left = __shfl_sync(kAllLanes, count, key) - begin;
    const unsigned inside = left >= kDigestsOfLane ? 0xFFFFu : left > 0 ? (1u << left) - 1 : 0u;
    masks[key][lane % kLanesOfKey] = static_cast<uint16_t>(equal[round] & inside);
  }
  __syncwarp();
}

// The place among the candidates of `mask` whose key is `key`; -1 for none.
__device__ int place_of_key(const uint4& mask, const int64_t* bucket_keys, int64_t key) {
  uint64_t low = mask.x | static_cast<uint64_t>(mask.y) << 32;
  uint64_t high = mask.z | static_cast<uint64_t>(mask.w) << 32;
  while ((low | high) != 0) {
    int place;
    if (low != 0) {
      place = __ffsll(low) - 1;
      low &= low - 1;
    } else {
      place = 64 + __ffsll(high) - 1;
      high &= high - 1;
    }
    if (__ldg(bucket_keys + place) == key) return place;
  }
  return -1;
}

__global__ void __launch_bounds__(kWarps* kLanes)
    find_kernel(const HashMemory held, const int64_t* keys, const int32_t* tables, int64_t num_ids,
                int64_t* slots) {
  __shared__ __align__(16) uint16_t shared[kWarps][kLanes][kLanesOfKey];
  auto* const masks = shared[threadIdx.x / kLanes];
  const int lane = threadIdx.x % kLanes;
  const int64_t position = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  int table = -1;
  int64_t key = 0, first = 0, second = 0;
  int num_slots = 0;
  uint32_t digest = 0;
  if (position < num_ids) table = tables[position];
  if (table >= 0) {
    key = keys[position];
    const TableShape shape(held.geometry, table);
    const uint64_t hash = hash_of_key(key);
    const BucketPair buckets(hash, shape);
    first = buckets.first;
    second = buckets.second;
    num_slots = static_cast<int>(shape.num_slots);
    digest = digest_of_hash(hash);
  }
  int64_t slot = -1;
  bool is_wanted = table >= 0;
  for (int64_t bucket = first;; bucket = second) {
    find_candidates(masks, held.digests, bucket, num_slots, digest, is_wanted);
    const uint4 mask = *reinterpret_cast<const uint4*>(masks[lane]);
    const int place = place_of_key(mask, held.keys + bucket, key);
    if (place >= 0) slot = bucket + place;
    is_wanted = is_wanted && slot < 0 && bucket != second;
    // All lanes have read their masks before some are written again.
    if (!__any_sync(kAllLanes, is_wanted)) break;
  }
  if (position < num_ids) slots[position] = slot;
}

}  // namespace

const char* find_slots(const HashMemory& held, const int64_t* keys, const int32_t* tables,
                       int64_t num_ids, int64_t* slots, int device, void* stream) {
  // As in update_rows.cu: the library's runtime has a current device of its own.
  int current = device;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess && current != device) error = cudaSetDevice(device);
  if (error == cudaSuccess) {
    constexpr int kThreads = kWarps * kLanes;
    const auto num_programs = static_cast<unsigned>((num_ids + kThreads - 1) / kThreads);
    find_kernel<<<num_programs, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        held, keys, tables, num_ids, slots);
    error = cudaGetLastError();
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace torchembed
