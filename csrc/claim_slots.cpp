// The operations that give rows slots of a cache, and find those that they have.

#include <algorithm>
#include <atomic>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "tensors.h"
#include "threads.h"

namespace torchembed {
namespace {

// The values of CacheCounter in torchembed/core/row_caches.py.
enum Counter : int64_t {
  kUniqueRows,
  kUniqueMisses,
  kWrittenRows,
  kReadRows,
  kRefusedBatches,
  kNumCounters,
};

constexpr int64_t kGrainRows = 4096;

// The arrays of a RowCache. Numbers in them that lie outside are passed over.
struct Cache {
  int32_t* slot_of_row;
  int64_t num_rows;
  int64_t* row_of_slot;
  int64_t* last_use;
  bool* is_recent;
  bool* is_dirty;
  int64_t num_slots;

  // -1 for a row that is not cached.
  int64_t slot_of(int64_t row) const {
    if ((uint64_t)row >= (uint64_t)num_rows) return -1;
    const int64_t slot = slot_of_row[row];
    return (uint64_t)slot < (uint64_t)num_slots ? slot : -1;
  }
  void use(int64_t slot, int64_t epoch) const {
    last_use[slot] = epoch;
    is_recent[slot] = is_dirty[slot] = true;
  }

  bool is_evictable(int64_t slot, int64_t released) const {
    return row_of_slot[slot] < 0 || last_use[slot] <= released;
  }
};

// Where the hand goes to find slots.
struct Walk {
  std::vector<int32_t> taken;  // fewer than wanted where no more are evictable
  int64_t num_passed;
};

Walk walk_from(int64_t hand, int64_t num_wanted, int64_t released, const Cache& cache) {
  std::vector<int32_t> taken, recent;  // of the first and of the second round
  taken.reserve(std::min(num_wanted, cache.num_slots));
  int64_t num_passed = 0;
  for (; num_passed < cache.num_slots && (int64_t)taken.size() < num_wanted; ++num_passed) {
    int64_t slot = hand + num_passed;
    if (slot >= cache.num_slots) slot -= cache.num_slots;
    if (!cache.is_evictable(slot, released)) continue;
    if (!cache.is_recent[slot]) {
      taken.push_back((int32_t)slot);
    } else if ((int64_t)recent.size() < num_wanted) {
      recent.push_back((int32_t)slot);
    }
  }
  const auto num_recent = std::min<int64_t>(num_wanted - taken.size(), recent.size());
  taken.insert(taken.end(), recent.begin(), recent.begin() + num_recent);
  return {std::move(taken), num_passed};
}

// The moves of a claim; entries from `count` on are -1.
struct Moves {
  int32_t* slots;
  int64_t* written_rows;
  int64_t* read_rows;
};

// One batch's rows, which increase, in parts for threads.
class Batch {
 public:
  // Finds the rows' slots.
  Batch(const IdArray& rows, int64_t num_rows, const Cache& cache)
      : rows_(rows),
        cache_(cache),
        parts_{num_rows, num_threads_for(num_rows, kGrainRows)},
        slots_(num_rows),
        first_missing_(parts_.num_parts + 1) {
    std::atomic<int64_t> wrong{-1};
    parts_.for_each([&](int64_t part, int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) {
        const int64_t row = rows_[index], before = index == 0 ? -1 : rows_[index - 1];
        if (row <= before || row >= cache_.num_rows) wrong = index;
        slots_[index] = (int32_t)cache_.slot_of(row);
        first_missing_[part + 1] += slots_[index] < 0;
      }
    });
    const int64_t found = wrong;
    STD_TORCH_CHECK(found < 0, "unique_rows must increase within [0, ", cache_.num_rows, "), got ",
                    rows_[found], " at position ", found, "; take them from find_runs");
    std::partial_sum(first_missing_.begin(), first_missing_.end(), first_missing_.begin());
  }

  int64_t num_missing() const { return first_missing_.back(); }

  // Notes that the slots of rows that are cached are used, so that none of them is evictable.
  void use_held(int64_t epoch) const {
    for_each([&](int64_t index, int64_t) {
      if (slots_[index] >= 0) cache_.use(slots_[index], epoch);
    });
  }

  // Gives the rows that are missing the slots `taken`, and notes the moves. Returns the number of
  // rows to write back.
  int64_t take(const std::vector<int32_t>& taken, int64_t epoch, Moves moves) const {
    std::atomic<int64_t> num_written{0};
    for_each([&](int64_t index, int64_t missing) {
      if (slots_[index] >= 0) return;
      const int64_t slot = taken[missing], old_row = cache_.row_of_slot[slot];
      const bool is_held = (uint64_t)old_row < (uint64_t)cache_.num_rows;
      if (is_held) cache_.slot_of_row[old_row] = -1;
      const bool is_written = is_held && cache_.is_dirty[slot];
      if (is_written) num_written.fetch_add(1, std::memory_order_relaxed);
      moves.slots[missing] = (int32_t)slot;
      moves.written_rows[missing] = is_written ? old_row : -1;
      moves.read_rows[missing] = rows_[index];
      cache_.slot_of_row[rows_[index]] = (int32_t)slot;
      cache_.row_of_slot[slot] = rows_[index];
      cache_.use(slot, epoch);
    });
    return num_written;
  }

 private:
  // Calls body(index, missing) for each row in threads, with the number of missing rows before it.
  template <class Body>
  void for_each(const Body& body) const {
    parts_.for_each([&](int64_t part, int64_t begin, int64_t end) {
      int64_t missing = first_missing_[part];
      for (int64_t index = begin; index < end; ++index) {
        const bool is_missing = slots_[index] < 0;
        body(index, missing);
        missing += is_missing;
      }
    });
  }

  const IdArray& rows_;
  const Cache& cache_;
  Parts parts_;
  std::vector<int32_t> slots_;          // -1 for rows that are missing
  std::vector<int64_t> first_missing_;  // the number of missing rows before each part
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> claim_slots(
    const Tensor& unique_rows, const Tensor& num_unique, const Tensor& epoch,
    const Tensor& released, std::optional<Tensor> is_trained, const Tensor& slot_of_row,
    const Tensor& row_of_slot, const Tensor& last_use, const Tensor& is_recent,
    const Tensor& is_dirty, const Tensor& hand, const Tensor& counters) {
  const int64_t num_ids = unique_rows.numel(), num_slots = row_of_slot.numel();
  const IdArray rows = id_array("unique_rows", unique_rows, num_ids);
  const int64_t num_wanted = *const_data<int32_t>("num_unique", num_unique, 1);
  STD_TORCH_CHECK(num_wanted >= 0 && num_wanted <= num_ids, "num_unique must lie in [0, ",
                  num_ids + 1, "), got ", num_wanted, "; take it from find_runs");
  STD_TORCH_CHECK(num_slots > 0 && num_slots <= INT32_MAX,
                  "row_of_slot must hold at least one slot and fewer than 2**31, got ", num_slots);
  const Cache cache{mutable_data<int32_t>("slot_of_row", slot_of_row, slot_of_row.numel()),
                    slot_of_row.numel(),
                    mutable_data<int64_t>("row_of_slot", row_of_slot, num_slots),
                    mutable_data<int64_t>("last_use", last_use, num_slots),
                    mutable_data<bool>("is_recent", is_recent, num_slots),
                    mutable_data<bool>("is_dirty", is_dirty, num_slots),
                    num_slots};
  int64_t& start = *mutable_data<int64_t>("hand", hand, 1);
  STD_TORCH_CHECK(start >= 0 && start < num_slots, "hand must lie in [0, ", num_slots, "), got ",
                  start, "; make the cache by empty_row_cache");
  int64_t* const counts = mutable_data<int64_t>("counters", counters, kNumCounters);
  const int64_t now = *const_data<int64_t>("epoch", epoch, 1),
                last_released = *const_data<int64_t>("released", released, 1);
  const bool trains = !is_trained || *const_data<bool>("is_trained", *is_trained, 1);

  const int64_t num_moves = std::min(num_ids, num_slots);
  const auto made = [&](int64_t size, ScalarType type) {
    return torch::stable::new_empty(unique_rows, {size}, type);
  };
  const Tensor slots = made(num_moves, ScalarType::Int),
               written = made(num_moves, ScalarType::Long),
               read = made(num_moves, ScalarType::Long), count = made(1, ScalarType::Long),
               num_refused = made(1, ScalarType::Long);
  const Moves moves{slots.mutable_data_ptr<int32_t>(), written.mutable_data_ptr<int64_t>(),
                    read.mutable_data_ptr<int64_t>()};
  const auto end_moves = [&](int64_t num_done, int64_t too_few) {
    std::fill(moves.slots + num_done, moves.slots + num_moves, -1);
    std::fill(moves.written_rows + num_done, moves.written_rows + num_moves, -1);
    std::fill(moves.read_rows + num_done, moves.read_rows + num_moves, -1);
    *count.mutable_data_ptr<int64_t>() = num_done;
    *num_refused.mutable_data_ptr<int64_t>() = too_few;
    return std::make_tuple(slots, written, read, count, num_refused);
  };
  if (!trains) return end_moves(0, 0);

  const Batch batch(rows, num_wanted, cache);
  const int64_t num_missing = batch.num_missing();
  counts[kUniqueRows] += num_wanted;
  counts[kUniqueMisses] += num_missing;
  batch.use_held(now);
  const Walk walk = walk_from(start, num_missing, last_released, cache);
  const int64_t too_few = num_missing - (int64_t)walk.taken.size();
  if (too_few > 0) {
    ++counts[kRefusedBatches];
    return end_moves(0, too_few);
  }
  for (int64_t step = 0; step < walk.num_passed; ++step) {
    const int64_t slot = (start + step) % num_slots;
    cache.is_recent[slot] = cache.is_recent[slot] && cache.last_use[slot] == now;
  }
  if (num_missing > 0) start = (walk.taken.back() + 1) % num_slots;
  counts[kWrittenRows] += batch.take(walk.taken, now, moves);
  counts[kReadRows] += num_missing;
  return end_moves(num_missing, 0);
}

Tensor find_cached(const Tensor& slot_of_row, const Tensor& rows, std::optional<Tensor> num_rows,
                   int64_t no_slot) {
  const int64_t num_ids = rows.numel(), limit = slot_of_row.numel();
  const int32_t* const slot_of = const_data<int32_t>("slot_of_row", slot_of_row, limit);
  const int64_t num_looked_at = num_rows ? *const_data<int32_t>("num_rows", *num_rows, 1) : num_ids;
  const IdArray ids = id_array("rows", rows, num_ids);
  const Tensor slots = torch::stable::new_empty(rows, {num_ids});
  const auto find = [&](const auto* id, auto* out) {
    const auto cost_before = [](int64_t position) { return position; };
    for_equal_costs(num_ids, kGrainRows, cost_before, [&](int64_t begin, int64_t end) {
      for (int64_t position = begin; position < end; ++position) {
        const bool is_row = position < num_looked_at && (uint64_t)id[position] < (uint64_t)limit;
        const int64_t slot = is_row ? slot_of[id[position]] : -1;
        out[position] = slot >= 0 ? slot : no_slot;
      }
    });
  };
  if (ids.is_wide()) {
    find(ids.wide(), slots.mutable_data_ptr<int64_t>());
  } else {
    find(ids.narrow(), slots.mutable_data_ptr<int32_t>());
  }
  return slots;
}

STABLE_TORCH_LIBRARY_FRAGMENT(torchembed_native, library) {
  library.def(
      "claim_slots(Tensor unique_rows, Tensor num_unique, Tensor epoch, Tensor released,"
      " Tensor? is_trained, Tensor(a!) slot_of_row, Tensor(b!) row_of_slot, Tensor(c!) last_use,"
      " Tensor(d!) is_recent, Tensor(e!) is_dirty, Tensor(f!) hand, Tensor(g!) counters)"
      " -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "find_cached(Tensor slot_of_row, Tensor rows, Tensor? num_rows, int no_slot) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(torchembed_native, CPU, library) {
  library.impl("claim_slots", TORCH_BOX(&claim_slots));
  library.impl("find_cached", TORCH_BOX(&find_cached));
}

}  // namespace
}  // namespace torchembed
