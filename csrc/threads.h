// Division of work among threads by its cost.

#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>

namespace torchembed {

// The number of threads for work of this cost, where `grain` is the least cost that repays waking
// one.
inline int64_t num_threads_for(int64_t cost, int64_t grain) {
  const int64_t most = torch::stable::get_num_threads();
  return std::clamp<int64_t>(cost / std::max<int64_t>(grain, 1), 1, most);
}

// The least number of rows of dim floats whose reading and summing repays waking a thread.
inline int64_t grain_rows(int64_t dim) { return 32768 / std::max<int64_t>(dim, 1) + 1; }

// The first of num_items items before which lies at least `wanted` cost; cost_before(i) grows with
// i.
template <class CostBefore>
int64_t first_item_at(int64_t num_items, int64_t wanted, const CostBefore& cost_before) {
  int64_t low = 0, high = num_items;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (cost_before(middle) < wanted) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Calls body(begin, end) over parts of [0, num_items) of about equal cost, in threads. The costs of
// the items before i are cost_before(i).
template <class CostBefore, class Body>
void for_equal_costs(int64_t num_items, int64_t grain, const CostBefore& cost_before,
                     const Body& body) {
  if (num_items == 0) return;
  const int64_t total = cost_before(num_items);
  const int64_t num_parts = num_threads_for(total, grain);
  const auto first_of = [&](int64_t part) {
    if (part == num_parts) return num_items;
    // In floating point, since total * part may overflow. Rounding only shifts a boundary, by the
    // same amount for the part before and the part after it.
    return first_item_at(num_items, (int64_t)((double)total * part / num_parts), cost_before);
  };
  torch::stable::parallel_for(0, num_parts, 1, [&](int64_t first, int64_t last) {
    const int64_t begin = first_of(first), end = first_of(last);
    if (begin < end) body(begin, end);
  });
}

// [0, num_items) in num_parts equal parts, for several passes over the same parts, where what one
// pass counts says where the next one writes.
struct Parts {
  int64_t num_items;
  int64_t num_parts;

  int64_t begin(int64_t part) const { return num_items * part / num_parts; }

  // Calls body(part, begin, end) in threads.
  template <class Body>
  void for_each(const Body& body) const {
    torch::stable::parallel_for(0, num_parts, 1, [&](int64_t first, int64_t last) {
      for (int64_t part = first; part < last; ++part) body(part, begin(part), begin(part + 1));
    });
  }
};

}  // namespace torchembed
