// The interface between the operation that sorts rows on a GPU and its kernels.

#pragma once

#include <cstdint>

namespace torchembed {

// Elements of int32 scratch that sort_rows needs for num_ids rows.
int64_t sort_scratch_size(int64_t num_ids);

// Writes the rows before *count, or all for nullptr, each in [-1, num_rows), to sorted_rows in
// stable ascending order, and the position that each had to order; neither is written from *count
// on. `count` is on the device. `rows` is int32, or int64 where rows_are_wide. Launches on `stream`
// of `device`, which is the caller's current one, and returns the runtime's message where that
// failed, else nullptr.
const char* sort_rows(const void* rows, bool rows_are_wide, int64_t num_ids, const int64_t* count,
                      int64_t num_rows, int32_t* sorted_rows, int32_t* order, int32_t* scratch,
                      int device, void* stream);

}  // namespace torchembed
