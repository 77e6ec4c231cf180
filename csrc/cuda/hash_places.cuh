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

// The first slots of both buckets of a hash; equal where a block has one.
struct BucketPair {
  int64_t first, second;

  __device__ BucketPair(uint64_t hash, const TableShape& shape) {
    const int64_t low = static_cast<int64_t>(hash & 0xFFFFFFFF);
    const int64_t bucket = ((low & 0xFFFF) * shape.num_buckets) >> 16;
    int64_t other = bucket + 1 + ((((low >> 16) & 0xFF) * (shape.num_buckets - 1)) >> 8);
    if (other >= shape.num_buckets) other -= shape.num_buckets;
    const int64_t before = block_of_hash(hash, shape.num_blocks) * shape.num_buckets;
    first = shape.first_slot + (before + bucket) * shape.num_slots;
    second = shape.num_buckets > 1 ? shape.first_slot + (before + other) * shape.num_slots : first;
  }
};

}  // namespace
}  // namespace torchembed
