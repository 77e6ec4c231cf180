// The operation that sorts a batch's rows and finds the runs of equal ones.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "row_kernels.h"
#include "run_chunks.h"
#include "tensors.h"
#include "threads.h"

namespace torchembed {
namespace {

constexpr int64_t kGrainIds = 16384;

// The most bits that one pass sorts: 2048 counters, and the ends of as many streams of stores, stay
// in the first-level cache.
constexpr int kMaxDigitBits = 11;

// An id's sorting key, which is its row + 1 so that row -1 comes first, and its position.
template <class Key>
struct Entry {
  Key key;
  uint32_t position;
};

// One stable pass of a radix sort: writes read(0), read(1), ... to `to` in the order of the
// digit_bits bits above `shift`. Each part counts its digits first; the sums over
// lower digits, and over earlier parts of the same digit, are where its entries go. So the sort is
// stable, and parts write to disjoint positions without atomics.
template <class Key, class Read>
void scatter_by_digit(const Read& read, Entry<Key>* to, Parts parts, int shift, int digit_bits,
                      std::vector<uint32_t>& counts) {
  const int64_t num_digits = int64_t{1} << digit_bits;
  const auto digit_of = [&](Entry<Key> entry) {
    return (uint32_t)(entry.key >> shift) & (uint32_t)(num_digits - 1);
  };
  counts.assign(num_digits * parts.num_parts, 0);
  parts.for_each([&](int64_t part, int64_t begin, int64_t end) {
    uint32_t* const count = counts.data() + part * num_digits;
    for (int64_t index = begin; index < end; ++index) ++count[digit_of(read(index))];
  });
  uint32_t next = 0;
  for (int64_t digit = 0; digit < num_digits; ++digit) {
    for (int64_t part = 0; part < parts.num_parts; ++part) {
      next += std::exchange(counts[part * num_digits + digit], next);
    }
  }
  parts.for_each([&](int64_t part, int64_t begin, int64_t end) {
    uint32_t* const target = counts.data() + part * num_digits;
    for (int64_t index = begin; index < end; ++index) {
      const Entry<Key> entry = read(index);
      to[target[digit_of(entry)]++] = entry;
    }
  });
}

// The rows' entries in order of key, sorted on its lowest key_bits bits.
template <class Key>
std::unique_ptr<Entry<Key>[]> sort_rows(const IdArray& rows, Parts parts, int key_bits) {
  const int num_passes = std::max(1, (key_bits + kMaxDigitBits - 1) / kMaxDigitBits);
  const int digit_bits = (key_bits + num_passes - 1) / num_passes;
  std::unique_ptr<Entry<Key>[]> sorted(new Entry<Key>[parts.num_items]);
  std::unique_ptr<Entry<Key>[]> source(new Entry<Key>[num_passes > 1 ? parts.num_items : 0]);
  std::vector<uint32_t> counts;
  const auto read_row = [&](int64_t index) {
    return Entry<Key>{(Key)((uint64_t)rows[index] + 1), (uint32_t)index};
  };
  scatter_by_digit<Key>(read_row, sorted.get(), parts, 0, digit_bits, counts);
  for (int pass = 1; pass < num_passes; ++pass) {
    std::swap(sorted, source);
    const auto read_entry = [&](int64_t index) { return source[index]; };
    scatter_by_digit<Key>(read_entry, sorted.get(), parts, pass * digit_bits, digit_bits, counts);
  }
  return sorted;
}

// Writes the runs of sorted entries; returns their number.
template <class Key, class Row>
int64_t write_runs(const Entry<Key>* sorted, Parts parts, Row* unique_rows, int32_t* starts,
                   int32_t* order) {
  const int64_t num_ids = parts.num_items;
  // Key 0 is that of row -1, which has no run: as the key before the first entry it makes no start.
  const auto starts_run = [&](int64_t index) {
    const Key key = sorted[index].key;
    const Key previous = index == 0 ? 0 : sorted[index - 1].key;
    return key != previous;
  };
  std::vector<int64_t> first_runs(parts.num_parts + 1);
  parts.for_each([&](int64_t part, int64_t begin, int64_t end) {
    int64_t num_runs = 0;
    for (int64_t index = begin; index < end; ++index) num_runs += starts_run(index);
    first_runs[part + 1] = num_runs;
  });
  for (int64_t part = 0; part < parts.num_parts; ++part) first_runs[part + 1] += first_runs[part];
  parts.for_each([&](int64_t part, int64_t begin, int64_t end) {
    int64_t index = begin;
    // Every entry is written as if it started a run, and the next one overwrites it unless it did:
    // a branch on it would often be mispredicted. The loop ends with this part's last
    // run, so that nothing is written where the next part writes.
    for (int64_t run = first_runs[part]; run < first_runs[part + 1]; ++index) {
      order[index] = (int32_t)sorted[index].position;
      unique_rows[run] = (Row)(sorted[index].key - 1);
      starts[run] = (int32_t)index;
      run += starts_run(index);
    }
    for (; index < end; ++index) order[index] = (int32_t)sorted[index].position;
  });
  const int64_t num_runs = first_runs.back();
  std::fill(unique_rows + num_runs, unique_rows + num_ids, (Row)-1);
  std::fill(starts + num_runs, starts + num_ids + 1, (int32_t)num_ids);
  return num_runs;
}

// Writes the run of each whole chunk to the window of kRunChunk positions in which the chunk
// starts, and -1 to other windows. No two chunks start in one window, so threads write to disjoint
// entries.
void write_chunk_runs(const int32_t* starts, Parts runs, int32_t* chunk_runs, int64_t num_windows) {
  std::fill(chunk_runs, chunk_runs + num_windows, -1);
  runs.for_each([&](int64_t, int64_t begin, int64_t end) {
    for (int64_t run = begin; run < end; ++run) {
      const int64_t num_chunks = (starts[run + 1] - starts[run]) / kRunChunk;
      std::fill_n(chunk_runs + starts[run] / kRunChunk, num_chunks, (int32_t)run);
    }
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> find_runs(const Tensor& rows, int64_t num_rows) {
  const int64_t num_ids = rows.numel();
  STD_TORCH_CHECK(num_ids <= INT32_MAX, "rows must hold fewer than 2**31 ids, got ", num_ids);
  STD_TORCH_CHECK(num_rows >= 0, "num_rows must not be negative, got ", num_rows);
  const IdArray ids = id_array("rows", rows, num_ids);
  const Tensor unique_rows = torch::stable::new_empty(rows, {num_ids});
  const Tensor starts = torch::stable::new_empty(rows, {num_ids + 1}, ScalarType::Int);
  const Tensor order = torch::stable::new_empty(rows, {num_ids}, ScalarType::Int);
  const Tensor num_runs = torch::stable::new_empty(rows, {1}, ScalarType::Int);
  const int64_t num_windows = num_ids / kRunChunk;
  const Tensor chunk_runs = torch::stable::new_empty(rows, {num_windows}, ScalarType::Int);

  const Parts parts{num_ids, num_threads_for(num_ids, kGrainIds)};
  const int key_bits = std::bit_width((uint64_t)num_rows);
  const auto find = [&]<class Key>(Key) {
    const std::unique_ptr<Entry<Key>[]> sorted = sort_rows<Key>(ids, parts, key_bits);
    const auto write = [&](auto* unique) {
      return write_runs(sorted.get(), parts, unique, starts.mutable_data_ptr<int32_t>(),
                        order.mutable_data_ptr<int32_t>());
    };
    return ids.is_wide() ? write(unique_rows.mutable_data_ptr<int64_t>())
                         : write(unique_rows.mutable_data_ptr<int32_t>());
  };
  const int64_t num_found = key_bits <= 32 ? find(uint32_t{}) : find(uint64_t{});
  *num_runs.mutable_data_ptr<int32_t>() = (int32_t)num_found;
  write_chunk_runs(starts.const_data_ptr<int32_t>(), {num_found, parts.num_parts},
                   chunk_runs.mutable_data_ptr<int32_t>(), num_windows);
  return {unique_rows, starts, order, num_runs, chunk_runs};
}

STABLE_TORCH_LIBRARY_FRAGMENT(torchembed_native, library) {
  library.def(
      "find_runs(Tensor rows, SymInt num_rows) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(torchembed_native, CPU, library) {
  library.impl("find_runs", TORCH_BOX(&find_runs));
}

}  // namespace
}  // namespace torchembed
