// The numbers of Policy and Counter in torchembed/core/hash_tables.py that kernels use.

#pragma once

namespace torchembed {
namespace {

enum Policy : int { kLru, kLfu, kEpochLfu, kCaller };
enum Counter {
  kSize = 0,
  kHits = 1,
  kMisses = 2,
  kInserted = 3,
  kRefused = 4,
  kEvictedFull = 5,
  kEvictedAge = 10,
  kNumCounters = 11
};

}  // namespace
}  // namespace torchembed
