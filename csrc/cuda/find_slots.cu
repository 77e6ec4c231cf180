// Finds keys in hash tables.
//
// A warp takes 32 keys, one on each lane. Eight lanes read the digests of a bucket, 16 each, so
// that the buckets of all keys are under way at once; then each lane reads the keys of its own
// candidates, of which there are few.
//
// Byte floor: that of find_slots.py.

#include <cuda_runtime.h>

#include "bucket_places.cuh"
#include "hash_kernels.h"
#include "hash_places.cuh"
#include "warp_reductions.cuh"

namespace torchembed {
namespace {

constexpr int kWarps = 4;

// The place of `places` whose key is `key`; -1 for none.
__device__ int place_of_key(Places places, const int64_t* bucket_keys, int64_t key) {
  while (!places.is_empty()) {
    const int place = places.first();
    places.remove_first();
    // Two at a time, since digests of others are equal often enough.
    const int next = places.first();
    const int64_t found = __ldg(bucket_keys + place);
    const int64_t other = next < 0 ? 0 : __ldg(bucket_keys + next);
    if (found == key) return place;
    if (next < 0) break;
    if (other == key) return next;
    places.remove_first();
  }
  return -1;
}

__global__ void __launch_bounds__(kWarps* kLanes)
    find_kernel(const HashMemory held, const int64_t* keys, const int32_t* tables, int64_t num_ids,
                int64_t* slots) {
  __shared__ SearchMemory memory[kWarps];
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
    const Places places = places_of_digest(memory[threadIdx.x / kLanes], held.digests, bucket,
                                           num_slots, digest, is_wanted);
    const int place = place_of_key(places, held.keys + bucket, key);
    if (place >= 0) slot = bucket + place;
    is_wanted = is_wanted && slot < 0 && bucket != second;
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
