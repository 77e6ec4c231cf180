// The operation that lets rows exchange the places at which they are stored.

#include <algorithm>
#include <tuple>
#include <vector>

#include "contents.h"
#include "tensors.h"

namespace torchembed {
namespace {

constexpr char kFromClaims[] = "take the moves from claim_slots";

// REGION_BITS of torchembed/core/row_caches.py.
constexpr int kRegionBits = 16;

struct PlacedMove {
  int32_t place;
  int64_t move;
};

std::tuple<Tensor, Tensor, Tensor> exchange_places(const Tensor& slots, const Tensor& written_rows,
                                                   const Tensor& read_rows, const Tensor& count,
                                                   const Tensor& place_of_row) {
  const int64_t capacity = slots.numel(), num_rows = place_of_row.numel();
  const int32_t* const slot_of = const_data<int32_t>("slots", slots, capacity);
  const int64_t* const written = const_data<int64_t>("written_rows", written_rows, capacity);
  const int64_t* const read = const_data<int64_t>("read_rows", read_rows, capacity);
  const int64_t num_moves = *const_data<int64_t>("count", count, 1);
  int32_t* const place_of = mutable_data<int32_t>("place_of_row", place_of_row, num_rows);
  check_in_range("count", &num_moves, 1, 0, capacity + 1, kFromClaims);
  check_in_range("written_rows", written, num_moves, -1, num_rows, kFromClaims);
  check_in_range("read_rows", read, num_moves, 0, num_rows, kFromClaims);

  std::vector<PlacedMove> moves(num_moves);
  for (int64_t move = 0; move < num_moves; ++move) moves[move] = {place_of[read[move]], move};
  std::stable_sort(moves.begin(), moves.end(), [](const PlacedMove& one, const PlacedMove& other) {
    return one.place >> kRegionBits < other.place >> kRegionBits;
  });
  const Tensor out_slots = torch::stable::new_empty(slots, {capacity}),
               written_places = torch::stable::new_empty(written_rows, {capacity}),
               read_places = torch::stable::new_empty(read_rows, {capacity});
  int32_t* const out_slot = out_slots.mutable_data_ptr<int32_t>();
  int64_t* const written_place = written_places.mutable_data_ptr<int64_t>();
  int64_t* const read_place = read_places.mutable_data_ptr<int64_t>();
  for (int64_t entry = 0; entry < num_moves; ++entry) {
    const auto [place, move] = moves[entry];
    out_slot[entry] = slot_of[move];
    read_place[entry] = place;
    written_place[entry] = written[move] < 0 ? -1 : place;
    if (written[move] >= 0) std::swap(place_of[written[move]], place_of[read[move]]);
  }
  return {out_slots, written_places, read_places};
}

STABLE_TORCH_LIBRARY_FRAGMENT(torchembed_native, library) {
  library.def(
      "exchange_places(Tensor slots, Tensor written_rows, Tensor read_rows, Tensor count, "
      "Tensor(a!) place_of_row) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(torchembed_native, CPU, library) {
  library.impl("exchange_places", TORCH_BOX(&exchange_places));
}

}  // namespace
}  // namespace torchembed
