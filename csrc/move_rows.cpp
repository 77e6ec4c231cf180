// The operations that move rows between the slots of a cache and where they are stored, and that
// read them from either.

#include <algorithm>
#include <cstring>
#include <vector>

#include "contents.h"
#include "tensors.h"
#include "threads.h"

namespace torchembed {
namespace {

constexpr char kFromClaims[] = "take the moves from claim_slots";
constexpr int64_t kGrainBytes = 131072;

std::vector<RowBytes> mutable_rows(const char* name, const std::vector<Tensor>& tensors) {
  std::vector<RowBytes> rows;
  for (const Tensor& tensor : tensors) {
    rows.push_back(mutable_row_bytes(name, tensor));
    STD_TORCH_CHECK(rows.back().num_rows == rows.front().num_rows, name,
                    " must have as many rows each, got ", rows.back().num_rows, " and ",
                    rows.front().num_rows);
  }
  return rows;
}

void check_widths(const RowBytes& cached, const RowBytes& stored) {
  STD_TORCH_CHECK(cached.num_rows == 0 || stored.num_rows == 0 || cached.bytes == stored.bytes,
                  "stored must have rows of ", cached.bytes, " bytes as cached has, got ",
                  stored.bytes);
}

void move_rows(const Tensor& slots, const Tensor& written_rows, const Tensor& read_rows,
               const Tensor& count, std::vector<Tensor> cached, std::vector<Tensor> stored) {
  const int64_t capacity = slots.numel();
  const int32_t* const slot_of = const_data<int32_t>("slots", slots, capacity);
  const int64_t* const written = const_data<int64_t>("written_rows", written_rows, capacity);
  const int64_t* const read = const_data<int64_t>("read_rows", read_rows, capacity);
  const int64_t* const num_moves = const_data<int64_t>("count", count, 1);
  STD_TORCH_CHECK(!cached.empty() && cached.size() == stored.size(),
                  "cached and stored must hold as many tensors, at least one, got ", cached.size(),
                  " and ", stored.size());
  const std::vector<RowBytes> near = mutable_rows("cached", cached);
  const std::vector<RowBytes> far = mutable_rows("stored", stored);
  int64_t bytes = 0;
  for (size_t pair = 0; pair < near.size(); ++pair) {
    check_widths(near[pair], far[pair]);
    bytes += near[pair].bytes;
  }
  // All before the first row is moved, so that a wrong move leaves nothing half done.
  check_in_range("count", num_moves, 1, 0, capacity + 1, kFromClaims);
  check_in_range("slots", slot_of, *num_moves, 0, near[0].num_rows, kFromClaims);
  check_in_range("written_rows", written, *num_moves, -1, far[0].num_rows, kFromClaims);
  check_in_range("read_rows", read, *num_moves, -1, far[0].num_rows, kFromClaims);
  const auto cost_before = [&](int64_t move) { return move * std::max<int64_t>(bytes, 1); };
  for_equal_costs(*num_moves, kGrainBytes, cost_before, [&](int64_t begin, int64_t end) {
    for (int64_t move = begin; move < end; ++move) {
      for (size_t pair = 0; pair < near.size(); ++pair) {
        const RowBytes &from = near[pair], &to = far[pair];
        if (from.bytes == 0) continue;
        char* const line = from.at(slot_of[move]);
        if (written[move] >= 0 && written[move] == read[move]) {
          char* const other = to.at(read[move]);
          std::swap_ranges(line, line + from.bytes, other);
          continue;
        }
        if (written[move] >= 0) std::memcpy(to.at(written[move]), line, from.bytes);
        if (read[move] >= 0) std::memcpy(line, to.at(read[move]), from.bytes);
      }
    }
  });
}

Tensor read_rows(const Tensor& cached, const Tensor& stored, const Tensor& slots,
                 const Tensor& rows) {
  const int64_t num_ids = rows.numel();
  STD_TORCH_CHECK(cached.dim() == 2 && stored.dim() == 2,
                  "cached and stored must have 2 dimensions, got ", cached.dim(), " and ",
                  stored.dim());
  const RowBytes near = row_bytes("cached", cached), far = row_bytes("stored", stored);
  check_widths(near, far);
  const IdArray slot_of = id_array("slots", slots, num_ids),
                row_of = id_array("rows", rows, num_ids);
  const Tensor out = torch::stable::new_empty(cached, {num_ids, cached.size(1)});
  if (out.numel() == 0) return out;
  const RowBytes results = mutable_row_bytes("out", out);
  const auto cost_before = [&](int64_t position) { return position * results.bytes; };
  for_equal_costs(num_ids, kGrainBytes, cost_before, [&](int64_t begin, int64_t end) {
    for (int64_t position = begin; position < end; ++position) {
      const int64_t slot = slot_of[position], row = row_of[position];
      char* const line = results.at(position);
      if (near.holds(slot)) {
        std::memcpy(line, near.at(slot), results.bytes);
      } else if (far.holds(row)) {
        std::memcpy(line, far.at(row), results.bytes);
      } else {
        std::memset(line, 0, results.bytes);
      }
    }
  });
  return out;
}

STABLE_TORCH_LIBRARY_FRAGMENT(torchembed_native, library) {
  library.def(
      "move_rows(Tensor slots, Tensor written_rows, Tensor read_rows, Tensor count,"
      " Tensor(a!)[] cached, Tensor(b!)[] stored) -> ()");
  library.def("read_rows(Tensor cached, Tensor stored, Tensor slots, Tensor rows) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(torchembed_native, CPU, library) {
  library.impl("move_rows", TORCH_BOX(&move_rows));
  library.impl("read_rows", TORCH_BOX(&read_rows));
}

}  // namespace
}  // namespace torchembed
