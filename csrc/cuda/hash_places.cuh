// Places of keys of hash tables: the arithmetic of hash_tables.h, which is for the host alone.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "random_bits.cuh"

namespace torchembed {
namespace {

// The most slots of a bucket.
constexpr int kBucketSlots = 128;

// A row of HashTables.geometry.
struct TableShape {
  int64_t first_slot, num_blocks, num_buckets, num_slots;

  __device__ TableShape(const int64_t* geometry, int64_t table)
      : first_slot(geometry[4 * table]),
        num_blocks(geometry[4 * table + 1]),
        num_buckets(geometry[4 * table + 2]),
        num_slots(geometry[4 * table + 3]) {}
};

__device__ uint64_t hash_of_key(int64_t key) { return random_bits_of(0, key); }

// 1 to 255.
__device__ uint32_t digest_of_hash(uint64_t hash) { return 1 + (((hash >> 24 & 0xFF) * 255) >> 8); }

__device__ int64_t block_of_hash(uint64_t hash, int64_t num_blocks) {
  return static_cast<int64_t>(__umul64hi(hash, num_blocks));
}

// Both buckets of a hash, by their numbers in its block; equal where the block has one.
struct BucketNumbers {
  int64_t first, second;

  __device__ BucketNumbers(uint64_t hash, int64_t num_buckets) {
    const int64_t low = static_cast<int64_t>(hash & 0xFFFFFFFF);
    first = ((low & 0xFFFF) * num_buckets) >> 16;
    second = first + 1 + ((((low >> 16) & 0xFF) * (num_buckets - 1)) >> 8);
    if (second >= num_buckets) second -= num_buckets;
    if (num_buckets <= 1) second = first;
  }
};

// Their first slots.
struct BucketPair {
  int64_t first, second;

  __device__ BucketPair(uint64_t hash, const TableShape& shape) {
    const BucketNumbers numbers(hash, shape.num_buckets);
    const int64_t before = block_of_hash(hash, shape.num_blocks) * shape.num_buckets;
    first = shape.first_slot + (before + numbers.first) * shape.num_slots;
    second = shape.first_slot + (before + numbers.second) * shape.num_slots;
  }
};

}  // namespace
}  // namespace torchembed
