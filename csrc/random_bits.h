// Counter-based random bits, bit for bit those of torchembed/core/random_bits.py: rows must not
// depend on the kernel that updated them. Unsigned arithmetic wraps around as intended.

#pragma once

#include <cstdint>

namespace torchembed {

inline uint64_t mix64(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;

// 64 random bits for a pair of key and counter.
inline uint64_t random_bits(uint64_t key, uint64_t counter) {
  return mix64(key + (counter + 1) * kGolden);
}

// A key such that random_bits(shifted_key(key, shift), c) == random_bits(key, c + shift). A shard
// of columns so draws the bits of the whole table's columns.
inline uint64_t shifted_key(uint64_t key, uint64_t shift) { return key + shift * kGolden; }

}  // namespace torchembed
