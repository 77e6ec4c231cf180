// Inserts keys into hash tables, and evicts others where their buckets are full.

#include <array>
#include <atomic>
#include <span>
#include <tuple>
#include <vector>

#include "hash_tables.h"
#include "threads.h"

namespace torchembed {
namespace {

constexpr int64_t kGrainKeys = 256;

// A position of the batch whose key is to be inserted.
struct NewPosition {
  uint64_t hash;
  int32_t table;
  uint32_t position;

  bool is_same_key(const NewPosition& other) const {
    return table == other.table && hash == other.hash;
  }
  // Positions of a key need no order, but the sort is then the same whatever sorts.
  bool operator<(const NewPosition& other) const {
    return std::tie(table, hash, position) < std::tie(other.table, other.hash, other.position);
  }
};

// What became of a distinct key.
struct Insertion {
  int64_t slot = -1;  // -1: refused
  bool is_evicted = false;
  int64_t evicted_key = 0;
  int64_t evicted_score = 0;
  int64_t evicted_touched = 0;
};

// The arrays that insertions change.
struct Slots {
  uint8_t* digests;
  int64_t* keys;
  int64_t* touched;
  int64_t* scores;  // touched, under LRU

  // The first free slot of the bucket that has more of them; -1 where none is free.
  int64_t free_slot(const KeyPlace& place) const {
    const auto num_free = [&](int64_t first) {
      return std::count(digests + first, digests + first + place.num_slots, (uint8_t)0);
    };
    const auto of_first = num_free(place.first[0]), of_second = num_free(place.first[1]);
    if (of_first == 0 && of_second == 0) return -1;
    const uint8_t* const bucket = digests + place.first[of_second > of_first];
    return (const uint8_t*)std::memchr(bucket, 0, place.num_slots) - digests;
  }

  // The slot of the least score, of the longest unused among equal ones; -1 where all rows are in
  // use, or have scores above `score`.
  int64_t victim(const KeyPlace& place, int64_t score, int64_t released) const {
    int64_t found = -1;
    for (int bucket = 0; bucket < place.num_buckets(); ++bucket) {
      const int64_t first = place.first[bucket];
      for (int64_t slot = first; slot < first + place.num_slots; ++slot) {
        if (touched[slot] > released || scores[slot] > score) continue;
        const bool is_less = found < 0 || scores[slot] < scores[found] ||
                             (scores[slot] == scores[found] && touched[slot] < touched[found]);
        if (is_less) found = slot;
      }
    }
    return found;
  }
};

// One batch's insertions into the tables of a group.
class Inserter {
 public:
  Inserter(const Geometry& geometry, const Scoring& scoring, Slots slots, int64_t released,
           const int64_t* keys, int64_t* counters)
      : geometry_(geometry),
        scoring_(scoring),
        slots_(slots),
        released_(released),
        keys_(keys),
        counters_(counters) {}

  // Inserts the distinct key whose positions are given, and counts.
  Insertion insert(std::span<const NewPosition> positions) const {
    Insertion done;
    const NewPosition& first = positions.front();
    const int64_t key = keys_[first.position];
    if (!geometry_.holds(first.table)) {
      count(first.table, kRefused, 1);
      return done;
    }
    const KeyPlace place = geometry_.locate(key, first.table);
    const int64_t score = first_score(positions);
    done.slot = slots_.free_slot(place);
    if (done.slot >= 0) {
      count(first.table, kSize, 1);
    } else {
      done.slot = slots_.victim(place, score, released_);
      if (done.slot < 0) {
        count(first.table, kRefused, 1);
        return done;
      }
      done.is_evicted = true;
      done.evicted_key = slots_.keys[done.slot];
      done.evicted_score = slots_.scores[done.slot];
      done.evicted_touched = slots_.touched[done.slot];
      count(first.table, kEvictedFull, 1);
      count(first.table, kEvictedAge, (uint64_t)scoring_.epoch - (uint64_t)done.evicted_touched);
    }
    count(first.table, kInserted, 1);
    slots_.digests[done.slot] = place.digest;
    slots_.keys[done.slot] = key;
    slots_.scores[done.slot] = score;
    slots_.touched[done.slot] = scoring_.epoch;
    return done;
  }

  // True where two keys lie in one block, so that the order of their insertions matters.
  bool share_block(const NewPosition& one, const NewPosition& other) const {
    if (one.table != other.table || !geometry_.holds(one.table)) return false;
    return block(one) == block(other);
  }

 private:
  int64_t block(const NewPosition& one) const {
    return geometry_.locate(keys_[one.position], one.table).block;
  }

  int64_t first_score(std::span<const NewPosition> positions) const {
    const int64_t occurrences = (int64_t)positions.size();
    switch (scoring_.policy) {
      case Policy::kLru:
        return scoring_.epoch;
      case Policy::kLfu:
        return occurrences;
      case Policy::kEpochLfu:
        return scoring_.of_epoch(occurrences);
      case Policy::kCaller:
        break;
    }
    int64_t greatest = scoring_.given[positions.front().position];
    for (const NewPosition& one : positions) {
      greatest = std::max(greatest, scoring_.given[one.position]);
    }
    return greatest;
  }

  // Threads have different blocks, but may have one table.
  void count(int64_t table, Counter counter, uint64_t by) const {
    std::atomic_ref<int64_t>(counters_[table * kNumCounters + counter])
        .fetch_add((int64_t)by, std::memory_order_relaxed);
  }

  const Geometry& geometry_;
  const Scoring& scoring_;
  Slots slots_;
  int64_t released_;
  const int64_t* keys_;
  int64_t* counters_;
};

// Inserts the distinct keys, key u at positions [starts[u], starts[u + 1]): those of one block one
// after the other, blocks in threads.
std::vector<Insertion> insert_all(const Inserter& inserter,
                                  const std::vector<NewPosition>& positions,
                                  const std::vector<int64_t>& starts) {
  const int64_t num_keys = (int64_t)starts.size() - 1;
  std::vector<Insertion> done(num_keys);
  // Moves a part's boundary to where the next block begins.
  const auto next_block = [&](int64_t key) {
    while (key > 0 && key < num_keys &&
           inserter.share_block(positions[starts[key - 1]], positions[starts[key]])) {
      ++key;
    }
    return key;
  };
  const auto cost_before = [](int64_t key) { return key; };
  for_equal_costs(num_keys, kGrainKeys, cost_before, [&](int64_t begin, int64_t end) {
    const int64_t last = next_block(end);
    for (int64_t key = next_block(begin); key < last; ++key) {
      done[key] = inserter.insert(
          {positions.data() + starts[key], (size_t)(starts[key + 1] - starts[key])});
    }
  });
  return done;
}

using Results = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Results insert_keys(const Tensor& keys, const Tensor& tables, const Tensor& slots,
                    std::optional<Tensor> wanted, int64_t policy, const Tensor& epoch,
                    std::optional<Tensor> epoch_number, const Tensor& released,
                    std::optional<Tensor> scores_in, std::optional<Tensor> is_trained,
                    const Tensor& digests, const Tensor& slot_keys, const Tensor& touched,
                    std::optional<Tensor> scores, const Tensor& geometry, const Tensor& counters) {
  const int64_t num_ids = keys.numel(), num_slots = digests.numel();
  const int64_t* const key_of = const_data<int64_t>("keys", keys, num_ids);
  const int32_t* const table_of = const_data<int32_t>("tables", tables, num_ids);
  const int64_t* const slot_of = const_data<int64_t>("slots", slots, num_ids);
  const bool* const is_wanted = wanted ? const_data<bool>("wanted", *wanted, num_ids) : nullptr;
  const Scoring scoring(policy, epoch, epoch_number, scores_in, num_ids);
  const Geometry shapes(geometry, num_slots);
  int64_t* const last_use = mutable_data<int64_t>("touched", touched, num_slots);
  const Slots state{mutable_data<uint8_t>("digests", digests, num_slots),
                    mutable_data<int64_t>("slot_keys", slot_keys, num_slots), last_use,
                    score_data(scoring, scores, last_use, num_slots)};
  const Inserter inserter(
      shapes, scoring, state, scalar("released", released, 0), key_of,
      mutable_data<int64_t>("counters", counters, shapes.num_tables() * kNumCounters));

  std::vector<NewPosition> positions;
  if (is_true("is_trained", is_trained)) {
    for (int64_t position = 0; position < num_ids; ++position) {
      const int64_t table = table_of[position];
      if (table < 0 || table >= shapes.num_tables() || slot_of[position] >= 0) continue;
      if (is_wanted && !is_wanted[position]) continue;
      const uint64_t hash = random_bits(0, (uint64_t)key_of[position]);
      positions.push_back({hash, (int32_t)table, (uint32_t)position});
    }
    std::sort(positions.begin(), positions.end());
  }
  std::vector<int64_t> starts;
  for (size_t index = 0; index < positions.size(); ++index) {
    if (index == 0 || !positions[index].is_same_key(positions[index - 1])) {
      starts.push_back((int64_t)index);
    }
  }
  starts.push_back((int64_t)positions.size());
  const std::vector<Insertion> done = insert_all(inserter, positions, starts);

  const auto made = [&](ScalarType type) {
    return torch::stable::new_empty(keys, {num_ids}, type);
  };
  const auto filled = [&](const Tensor& tensor, int64_t value) {
    int64_t* const data = tensor.mutable_data_ptr<int64_t>();
    std::fill_n(data, num_ids, value);
    return data;
  };
  const Tensor result = made(ScalarType::Long), new_keys = made(ScalarType::Long),
               new_tables = made(ScalarType::Int), new_slots = made(ScalarType::Long),
               num_new = torch::stable::new_empty(keys, {1}, ScalarType::Long),
               is_evicted = made(ScalarType::Bool), evicted_keys = made(ScalarType::Long),
               evicted_scores = made(ScalarType::Long), evicted_touched = made(ScalarType::Long);
  int64_t* const result_of = result.mutable_data_ptr<int64_t>();
  std::copy_n(slot_of, num_ids, result_of);
  int64_t* const new_key = filled(new_keys, 0);
  int32_t* const new_table = new_tables.mutable_data_ptr<int32_t>();
  std::fill_n(new_table, num_ids, -1);
  int64_t* const new_slot = filled(new_slots, -1);
  bool* const evicts = is_evicted.mutable_data_ptr<bool>();
  std::fill_n(evicts, num_ids, false);
  int64_t* const evicted_key = filled(evicted_keys, 0);
  int64_t* const evicted_score = filled(evicted_scores, 0);
  int64_t* const evicted_use = filled(evicted_touched, 0);
  int64_t next = 0;
  for (size_t key = 0; key < done.size(); ++key) {
    const Insertion& insertion = done[key];
    if (insertion.slot < 0) continue;
    for (int64_t index = starts[key]; index < starts[key + 1]; ++index) {
      result_of[positions[index].position] = insertion.slot;
    }
    const NewPosition& first = positions[starts[key]];
    new_key[next] = key_of[first.position];
    new_table[next] = first.table;
    new_slot[next] = insertion.slot;
    evicts[next] = insertion.is_evicted;
    evicted_key[next] = insertion.evicted_key;
    evicted_score[next] = insertion.evicted_score;
    evicted_use[next] = insertion.evicted_touched;
    ++next;
  }
  *num_new.mutable_data_ptr<int64_t>() = next;
  return {result,     new_keys,     new_tables,     new_slots,      num_new,
          is_evicted, evicted_keys, evicted_scores, evicted_touched};
}

STABLE_TORCH_LIBRARY_FRAGMENT(torchembed_native, library) {
  library.def(
      "insert_keys(Tensor keys, Tensor tables, Tensor slots, Tensor? wanted, int policy,"
      " Tensor epoch, Tensor? epoch_number, Tensor released, Tensor? scores_in, Tensor? is_trained,"
      " Tensor(a!) digests, Tensor(b!) slot_keys, Tensor(c!) touched, Tensor(d!)? scores,"
      " Tensor geometry, Tensor(e!) counters)"
      " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(torchembed_native, CPU, library) {
  library.impl("insert_keys", TORCH_BOX(&insert_keys));
}

}  // namespace
}  // namespace torchembed
