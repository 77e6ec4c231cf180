// Converts the ids of each feature to rows of a table group's flat weight.

#include <algorithm>
#include <atomic>
#include <optional>
#include <tuple>
#include <vector>

#include "bags.h"
#include "tensors.h"
#include "threads.h"

namespace torchembed {
namespace {

// The values of OnBadId in torchembed/core/types.py.
constexpr int64_t kClamp = 1;
constexpr int64_t kZero = 2;

constexpr int64_t kGrainIds = 16384;

struct Table {
  int64_t first_row;
  int64_t num_rows;

  // Unsigned, since signed overflow would be undefined, and first_row comes unchecked from the
  // caller. Lookups skip rows outside their matrix.
  int64_t row(int64_t id) const { return (int64_t)((uint64_t)first_row + (uint64_t)id); }
};

// Writes the rows of the ids at [begin, end), all of one feature. Returns the first bad position,
// or end.
template <class Id, class Row>
int64_t linearize_feature(const Id* ids, Row* rows, int64_t begin, int64_t end, Table table,
                          bool clamp) {
  // Bad ids are rare: the first pass only finds out if there is one, without a branch for each id,
  // so that the compiler can vectorize it. One unsigned comparison covers negative ids as well.
  bool any_bad = false;
  for (int64_t position = begin; position < end; ++position) {
    const int64_t id = ids[position];
    const bool bad = (uint64_t)id >= (uint64_t)table.num_rows;
    any_bad |= bad;
    rows[position] = (Row)(bad ? -1 : table.row(id));
  }
  if (!any_bad) return end;
  // Backwards, so that the first bad position is the last one written.
  int64_t first_bad = end;
  for (int64_t position = end - 1; position >= begin; --position) {
    const int64_t id = ids[position];
    if ((uint64_t)id < (uint64_t)table.num_rows) continue;
    first_bad = position;
    if (clamp && table.num_rows > 0) {
      rows[position] = (Row)table.row(id < 0 ? 0 : table.num_rows - 1);
    }
  }
  return first_bad;
}

template <class Id, class Row>
int64_t linearize(const Id* ids, Row* rows, int64_t num_ids,
                  const std::vector<int64_t>& feature_begins, const int64_t* first_rows,
                  const int64_t* num_rows, bool clamp) {
  const int64_t num_bag_ids = feature_begins.back();
  std::fill(rows + num_bag_ids, rows + num_ids, (Row)-1);
  std::atomic<int64_t> first_bad{num_ids};
  const auto cost_before = [](int64_t position) { return position; };
  for_equal_costs(num_bag_ids, kGrainIds, cost_before, [&](int64_t begin, int64_t end) {
    int64_t part_first_bad = num_ids;
    // The last feature that begins at `begin` or before it is the one that holds it.
    const auto after = std::upper_bound(feature_begins.begin(), feature_begins.end(), begin);
    int64_t feature = after - feature_begins.begin() - 1;
    for (int64_t position = begin; position < end; ++feature) {
      const int64_t feature_end = std::min(end, feature_begins[feature + 1]);
      const int64_t bad = linearize_feature(ids, rows, position, feature_end,
                                            Table{first_rows[feature], num_rows[feature]}, clamp);
      if (bad < feature_end) part_first_bad = std::min(part_first_bad, bad);
      position = feature_end;
    }
    // The minimum over threads, whatever their order; `seen` is reloaded where another thread was
    // faster.
    int64_t seen = first_bad.load();
    while (part_first_bad < seen && !first_bad.compare_exchange_weak(seen, part_first_bad)) {
    }
  });
  return first_bad;
}

std::tuple<Tensor, Tensor> linearize_ids(const Tensor& values, std::optional<Tensor> offsets,
                                         std::vector<int64_t> hotness, const Tensor& first_rows,
                                         const Tensor& num_rows, int64_t batch_size,
                                         int64_t on_bad_id, ScalarType rows_dtype) {
  const int64_t num_ids = values.numel(), num_features = first_rows.numel();
  STD_TORCH_CHECK(on_bad_id >= 0 && on_bad_id <= kZero, "on_bad_id must be 0, ", kClamp, " or ",
                  kZero, ", got ", on_bad_id);
  STD_TORCH_CHECK(rows_dtype == ScalarType::Int || rows_dtype == ScalarType::Long,
                  "rows_dtype must be int32 or int64, got ",
                  torch::headeronly::toString(rows_dtype));
  const IdArray ids = id_array("values", values, num_ids);
  const BagLayout layout(offsets, hotness, num_features, batch_size, num_ids);
  const int64_t* const firsts = const_data<int64_t>("first_rows", first_rows, num_features);
  const int64_t* const limits = const_data<int64_t>("num_rows", num_rows, num_features);
  const Tensor rows = torch::stable::new_empty(values, {num_ids}, rows_dtype);
  const Tensor first_bad = torch::stable::new_empty(values, {1}, ScalarType::Long);

  const auto run = [&](const auto* typed_ids, auto* typed_rows) {
    return linearize(typed_ids, typed_rows, num_ids, layout.feature_begins(), firsts, limits,
                     on_bad_id == kClamp);
  };
  const auto run_into = [&](auto* typed_rows) {
    return ids.is_wide() ? run(ids.wide(), typed_rows) : run(ids.narrow(), typed_rows);
  };
  *first_bad.mutable_data_ptr<int64_t>() = rows_dtype == ScalarType::Int
                                               ? run_into(rows.mutable_data_ptr<int32_t>())
                                               : run_into(rows.mutable_data_ptr<int64_t>());
  return {rows, first_bad};
}

STABLE_TORCH_LIBRARY_FRAGMENT(torchembed_native, library) {
  library.def(
      "linearize_ids(Tensor values, Tensor? offsets, int[] hotness, Tensor first_rows,"
      " Tensor num_rows, SymInt batch_size, int on_bad_id, ScalarType rows_dtype)"
      " -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(torchembed_native, CPU, library) {
  library.impl("linearize_ids", TORCH_BOX(&linearize_ids));
}

}  // namespace
}  // namespace torchembed
