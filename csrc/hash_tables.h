// Hash tables over plain arrays, as torchembed/ops/hash_table/ lays them out.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

#include "random_bits.h"
#include "tensors.h"

namespace torchembed {

// The values of Policy and Counter in torchembed/ops/hash_table/layout.py.
enum class Policy : int64_t { kLru, kLfu, kEpochLfu, kCaller };
enum Counter : int64_t {
  kSize,
  kHits,
  kMisses,
  kInserted,
  kRefused,
  kEvictedFull,
  kEvictedExpired,
  kEvictedTarget,
  kErased,
  kInUse,
  kEvictedAge,
  kNumCounters,
};

constexpr int64_t kBucketSlots = 128;
constexpr int64_t kMaxCount = (int64_t{1} << 32) - 1;

// The high 64 bits of a product.
inline uint64_t multiply_high(uint64_t value, uint64_t by) {
  const uint64_t low = (value & 0xFFFFFFFF) * by;
  return ((value >> 32) * by + (low >> 32)) >> 32;  // by < 2**32, so that nothing overflows
}

// Where a key may lie. first[0] == first[1] where blocks have one bucket.
struct KeyPlace {
  uint64_t hash;
  int64_t block;
  int64_t first[2];
  int64_t num_slots;
  uint8_t digest;

  int num_buckets() const { return first[0] == first[1] ? 1 : 2; }
};

// Rows of HashTables.geometry, checked to lie in [0, num_slots) of the group.
class Geometry {
 public:
  Geometry(const Tensor& geometry, int64_t num_slots) {
    check_layout("geometry", geometry);
    STD_TORCH_CHECK(geometry.dim() == 2 && geometry.size(1) == 4, "geometry must have 4 columns");
    num_tables_ = geometry.size(0);
    tables_ = geometry.const_data_ptr<int64_t>();
    for (int64_t table = 0; table < num_tables_; ++table) {
      const int64_t* const row = tables_ + 4 * table;
      // Each factor fits the rest of the slots, so that no product overflows.
      bool fits = row[0] >= 0 && row[0] <= num_slots && row[3] <= kBucketSlots;
      int64_t rest = fits ? num_slots - row[0] : 0;
      for (int column = 1; column < 4; ++column) {
        fits = fits && row[column] >= 0 && row[column] < (int64_t{1} << 32);
        if (fits && row[column] > 0) rest /= row[column];
      }
      const bool is_empty = row[1] == 0 || row[2] == 0 || row[3] == 0;
      STD_TORCH_CHECK(fits && (is_empty || rest > 0), "table ", table, " must lie in the group's ",
                      num_slots, " slots, got geometry ", row[0], ", ", row[1], ", ", row[2], ", ",
                      row[3], "; make it by geometry_of");
    }
  }

  int64_t num_tables() const { return num_tables_; }

  // True for a table of the group that has slots.
  bool holds(int64_t table) const {
    if (table < 0 || table >= num_tables_) return false;
    const int64_t* const row = tables_ + 4 * table;
    return row[1] > 0 && row[2] > 0 && row[3] > 0;
  }

  // The place of a key in a table that has slots.
  KeyPlace locate(int64_t key, int64_t table) const {
    const int64_t* const row = tables_ + 4 * table;
    const uint64_t num_buckets = (uint64_t)row[2];
    const uint64_t hash = random_bits(0, (uint64_t)key), low = hash & 0xFFFFFFFF;
    const uint64_t block = multiply_high(hash, (uint64_t)row[1]);
    const uint64_t bucket = ((low & 0xFFFF) * num_buckets) >> 16;
    uint64_t second = bucket;
    if (num_buckets > 1) {
      second += 1 + ((((low >> 16) & 0xFF) * (num_buckets - 1)) >> 8);
      if (second >= num_buckets) second -= num_buckets;
    }
    const auto first_of = [&](uint64_t number) {
      return row[0] + (int64_t)(block * num_buckets + number) * row[3];
    };
    return {hash,
            (int64_t)block,
            {first_of(bucket), first_of(second)},
            row[3],
            (uint8_t)(1 + (((low >> 24) * 255) >> 8))};
  }

 private:
  const int64_t* tables_;
  int64_t num_tables_;
};

// The slot that holds a key; -1 where none does.
inline int64_t find_slot(const KeyPlace& place, int64_t key, const uint8_t* digests,
                         const int64_t* slot_keys) {
  for (int bucket = 0; bucket < place.num_buckets(); ++bucket) {
    const uint8_t* next = digests + place.first[bucket];
    const uint8_t* const end = next + place.num_slots;
    while ((next = (const uint8_t*)std::memchr(next, place.digest, end - next)) != nullptr) {
      const int64_t slot = next - digests;
      if (slot_keys[slot] == key) return slot;
      if (++next == end) break;
    }
  }
  return -1;
}

// The one element of a tensor; `otherwise` where there is no tensor.
inline int64_t scalar(const char* name, const std::optional<Tensor>& tensor, int64_t otherwise) {
  return tensor ? *const_data<int64_t>(name, *tensor, 1) : otherwise;
}

inline bool is_true(const char* name, const std::optional<Tensor>& tensor) {
  return !tensor || *const_data<bool>(name, *tensor, 1);
}

// How a batch changes scores, and the scores that keys start with.
struct Scoring {
  Policy policy;
  int64_t epoch;
  int64_t epoch_number;
  const int64_t* given;  // one for each id, under kCaller alone

  Scoring(int64_t policy_value, const Tensor& epoch_tensor,
          const std::optional<Tensor>& epoch_number_tensor, const std::optional<Tensor>& scores_in,
          int64_t num_ids) {
    STD_TORCH_CHECK(policy_value >= 0 && policy_value <= (int64_t)Policy::kCaller,
                    "policy must be in [0, 4), got ", policy_value);
    policy = (Policy)policy_value;
    STD_TORCH_CHECK(scores_in.has_value() == (policy == Policy::kCaller),
                    "scores_in must be given where the caller scores, and nowhere else");
    epoch = scalar("epoch", epoch_tensor, 0);
    epoch_number = scalar("epoch_number", epoch_number_tensor, 0);
    given = scores_in ? const_data<int64_t>("scores_in", *scores_in, num_ids) : nullptr;
  }

  int64_t of_epoch(int64_t count) const {
    return (int64_t)((uint64_t)epoch_number << 32) | std::min(count, kMaxCount);
  }
};

// The scores of all slots; under LRU these are the epochs of the last uses.
inline int64_t* score_data(const Scoring& scoring, const std::optional<Tensor>& scores,
                           int64_t* touched, int64_t num_slots) {
  STD_TORCH_CHECK(scores.has_value() == (scoring.policy != Policy::kLru),
                  "scores must be given but under LRU");
  return scores ? mutable_data<int64_t>("scores", *scores, num_slots) : touched;
}

}  // namespace torchembed
