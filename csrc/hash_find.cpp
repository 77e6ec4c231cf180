// Finds keys in hash tables, notes which slots a batch uses, and erases keys.

#include <atomic>
#include <limits>
#include <unordered_set>
#include <vector>

#include "hash_tables.h"
#include "threads.h"

namespace torchembed {
namespace {

constexpr int64_t kGrainKeys = 1024;
// Keys whose places are computed before the first of them is looked up, so that the loads of their
// digests overlap.
constexpr int64_t kKeysAhead = 16;

// The slots of keys, in slot_of; -1 where a table does not hold one.
void find_all(const int64_t* key_of, const int32_t* table_of, int64_t num_keys,
              const Geometry& geometry, const uint8_t* digests, const int64_t* held,
              int64_t* slot_of) {
  const auto cost_before = [](int64_t position) { return position; };
  for_equal_costs(num_keys, kGrainKeys, cost_before, [&](int64_t begin, int64_t end) {
    KeyPlace places[kKeysAhead];
    for (; begin < end; begin += kKeysAhead) {
      const int64_t count = std::min(kKeysAhead, end - begin);
      for (int64_t ahead = 0; ahead < count; ++ahead) {
        const int64_t position = begin + ahead;
        if (!geometry.holds(table_of[position])) continue;
        places[ahead] = geometry.locate(key_of[position], table_of[position]);
        for (const int64_t first : places[ahead].first) __builtin_prefetch(digests + first);
      }
      for (int64_t ahead = 0; ahead < count; ++ahead) {
        const int64_t position = begin + ahead;
        slot_of[position] = geometry.holds(table_of[position])
                                ? find_slot(places[ahead], key_of[position], digests, held)
                                : -1;
      }
    }
  });
}

Tensor find_slots(const Tensor& keys, const Tensor& tables, const Tensor& digests,
                  const Tensor& slot_keys, const Tensor& geometry) {
  const int64_t num_keys = keys.numel(), num_slots = digests.numel();
  const Geometry shapes(geometry, num_slots);
  const Tensor slots = torch::stable::new_empty(keys, {num_keys}, ScalarType::Long);
  find_all(
      const_data<int64_t>("keys", keys, num_keys), const_data<int32_t>("tables", tables, num_keys),
      num_keys, shapes, const_data<uint8_t>("digests", digests, num_slots),
      const_data<int64_t>("slot_keys", slot_keys, num_slots), slots.mutable_data_ptr<int64_t>());
  return slots;
}

Tensor erase_keys(const Tensor& keys, const Tensor& tables, const Tensor& released,
                  const Tensor& digests, const Tensor& slot_keys, const Tensor& touched,
                  std::optional<Tensor> scores, const Tensor& geometry, const Tensor& counters) {
  const int64_t num_keys = keys.numel(), num_slots = digests.numel();
  const Geometry shapes(geometry, num_slots);
  const int32_t* const table_of = const_data<int32_t>("tables", tables, num_keys);
  uint8_t* const digest_of = mutable_data<uint8_t>("digests", digests, num_slots);
  int64_t* const held = mutable_data<int64_t>("slot_keys", slot_keys, num_slots);
  int64_t* const last_use = mutable_data<int64_t>("touched", touched, num_slots);
  int64_t* const score_of = scores ? mutable_data<int64_t>("scores", *scores, num_slots) : last_use;
  int64_t* const counts =
      mutable_data<int64_t>("counters", counters, shapes.num_tables() * kNumCounters);
  const int64_t last_released = scalar("released", released, 0);
  const Tensor slots = torch::stable::new_empty(keys, {num_keys}, ScalarType::Long);
  int64_t* const slot_of = slots.mutable_data_ptr<int64_t>();
  find_all(const_data<int64_t>("keys", keys, num_keys), table_of, num_keys, shapes, digest_of, held,
           slot_of);
  std::unordered_set<int64_t> in_use;
  for (int64_t position = 0; position < num_keys; ++position) {
    const int64_t slot = slot_of[position];
    // A slot whose key stood before in the batch is free by now.
    if (slot < 0 || digest_of[slot] == 0) continue;
    int64_t* const count = counts + table_of[position] * kNumCounters;
    if (last_use[slot] > last_released) {
      slot_of[position] = -1;
      count[kInUse] += in_use.insert(slot).second;
      continue;
    }
    ++count[kErased];
    --count[kSize];
    digest_of[slot] = 0;
    held[slot] = last_use[slot] = score_of[slot] = 0;
  }
  return slots;
}

// `change` of the number at `place`, by one thread at a time.
template <class Change>
void update_atomically(int64_t* place, const Change& change) {
  std::atomic_ref<int64_t> number(*place);
  int64_t seen = number.load(std::memory_order_relaxed);
  while (!number.compare_exchange_weak(seen, change(seen), std::memory_order_relaxed)) {
  }
}

void raise_to(int64_t* place, int64_t least) {
  std::atomic_ref<int64_t> number(*place);
  int64_t seen = number.load(std::memory_order_relaxed);
  while (seen < least && !number.compare_exchange_weak(seen, least, std::memory_order_relaxed)) {
  }
}

void touch_slots(const Tensor& slots, const Tensor& tables, int64_t policy, const Tensor& epoch,
                 std::optional<Tensor> epoch_number, std::optional<Tensor> scores_in,
                 std::optional<Tensor> is_trained, const Tensor& touched,
                 std::optional<Tensor> scores, const Tensor& counters) {
  const int64_t num_ids = slots.numel(), num_slots = touched.numel();
  const int64_t* const slot_of = const_data<int64_t>("slots", slots, num_ids);
  const int32_t* const table_of = const_data<int32_t>("tables", tables, num_ids);
  const Scoring scoring(policy, epoch, epoch_number, scores_in, num_ids);
  int64_t* const last_use = mutable_data<int64_t>("touched", touched, num_slots);
  int64_t* const score_of = score_data(scoring, scores, last_use, num_slots);
  const int64_t num_tables = counters.numel() / kNumCounters;
  int64_t* const counts = mutable_data<int64_t>("counters", counters, num_tables * kNumCounters);
  if (!is_true("is_trained", is_trained)) return;

  const auto for_positions = [&](const auto& body) {
    const auto cost_before = [](int64_t position) { return position; };
    for_equal_costs(num_ids, kGrainKeys, cost_before, body);
  };
  const auto is_hit = [&](int64_t position) {
    return table_of[position] >= 0 && slot_of[position] >= 0 && slot_of[position] < num_slots;
  };
  if (scoring.policy == Policy::kCaller) {
    // Old scores go before the greatest of the new ones is found.
    for_positions([&](int64_t begin, int64_t end) {
      for (int64_t position = begin; position < end; ++position) {
        if (!is_hit(position)) continue;
        std::atomic_ref<int64_t>(score_of[slot_of[position]])
            .store(std::numeric_limits<int64_t>::min(), std::memory_order_relaxed);
      }
    });
  }
  for_positions([&](int64_t begin, int64_t end) {
    std::vector<int64_t> hits(num_tables), misses(num_tables);
    for (int64_t position = begin; position < end; ++position) {
      const int64_t table = table_of[position];
      if (table < 0 || table >= num_tables) continue;
      if (!is_hit(position)) {
        ++misses[table];
        continue;
      }
      ++hits[table];
      const int64_t slot = slot_of[position];
      raise_to(last_use + slot, scoring.epoch);
      switch (scoring.policy) {
        case Policy::kLru:
          break;
        case Policy::kLfu:
          std::atomic_ref<int64_t>(score_of[slot]).fetch_add(1, std::memory_order_relaxed);
          break;
        case Policy::kEpochLfu:
          update_atomically(score_of + slot, [&](int64_t score) {
            return scoring.of_epoch((score & kMaxCount) + 1);
          });
          break;
        case Policy::kCaller:
          raise_to(score_of + slot, scoring.given[position]);
          break;
      }
    }
    for (int64_t table = 0; table < num_tables; ++table) {
      int64_t* const count = counts + table * kNumCounters;
      std::atomic_ref<int64_t>(count[kHits]).fetch_add(hits[table], std::memory_order_relaxed);
      std::atomic_ref<int64_t>(count[kMisses]).fetch_add(misses[table], std::memory_order_relaxed);
    }
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(torchembed_native, library) {
  library.def(
      "find_slots(Tensor keys, Tensor tables, Tensor digests, Tensor slot_keys, Tensor geometry)"
      " -> Tensor");
  library.def(
      "erase_keys(Tensor keys, Tensor tables, Tensor released, Tensor(a!) digests,"
      " Tensor(b!) slot_keys, Tensor(c!) touched, Tensor(d!)? scores, Tensor geometry,"
      " Tensor(e!) counters) -> Tensor");
  library.def(
      "touch_slots(Tensor slots, Tensor tables, int policy, Tensor epoch, Tensor? epoch_number,"
      " Tensor? scores_in, Tensor? is_trained, Tensor(a!) touched, Tensor(b!)? scores,"
      " Tensor(c!) counters) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(torchembed_native, CPU, library) {
  library.impl("find_slots", TORCH_BOX(&find_slots));
  library.impl("erase_keys", TORCH_BOX(&erase_keys));
  library.impl("touch_slots", TORCH_BOX(&touch_slots));
}

}  // namespace
}  // namespace torchembed
