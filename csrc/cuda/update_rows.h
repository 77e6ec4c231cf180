// The interface between the operation that updates rows on a GPU and its kernels.

#pragma once

#include <cstdint>

#include "../run_chunks.h"

namespace torchembed {

enum class RowType : uint8_t { kFloat32, kFloat16, kBFloat16 };

// The values of OptimizerKind in torchembed/core/types.py.
enum class Rule : uint8_t { kSgd = 0, kAdagrad = 1, kRowwiseAdagrad = 2, kAdam = 3 };

// Whether the kernels take rows of `dim` columns; those of 16 bits have 128 or more.
constexpr bool has_update_of(int64_t dim, RowType type) {
  const bool is_narrow = dim == 64 || dim == 96;
  return dim == 128 || dim == 256 || dim == 512 || (is_narrow && type == RowType::kFloat32);
}

// The kernels' arguments. Optional ones are null where they are not given.
struct RowUpdate {
  void* weight;             // [R, D] of row_type
  float* state0;            // [R, D]; [R] for row-wise Adagrad, null for SGD
  const void* unique_rows;  // int32, or int64 where rows_are_wide
  const int32_t* starts;
  const int32_t* order;
  const int32_t* num_runs;
  const int32_t* chunk_runs;  // [num_chunks]: the run whose whole chunk starts in a window, or -1
  const void* grad;           // [G, D] of grad_type
  const void* gradient_rows;  // of each position; int32, or int64 where gradient_rows_are_wide
  const float* scales;        // of each position
  const float* lr;            // for Adam the corrected step size
  const float* grad_multiplier;
  const float* skip;
  float* chunk_sums;  // scratch, [num_chunks, D]
  float* group_sums;  // scratch, [num_chunks / kRunChunk, D]
  // Three arrays of counters in one allocation, one after the other, so that one memset clears
  // them.
  int32_t* num_taken;    // scratch, [1]: blocks of runs that warps have taken
  int32_t* num_summed;   // scratch, [num_chunks]: finished sums of a long run, at its first window
  int32_t* num_grouped;  // scratch, [num_chunks / kRunChunk]: finished chunks of a group
  int num_ids;
  int num_chunks;  // num_ids / kRunChunk: windows, each of which has one whole chunk at most
  Rule rule;
  bool rows_are_wide;
  bool gradient_rows_are_wide;
  float eps;
  float weight_decay;
  float max_gradient;
  int num_blocks;
  int dim;        // columns of a row, D
  float* state1;  // as weight for Adam, else null
  float one_minus_beta1, one_minus_beta2;
  // The rounding of 16-bit rows: at random where there are row_keys, else to nearest.
  const int64_t* row_offsets;    // [num_tables + 1]
  const int64_t* row_keys;       // [num_tables]
  const int64_t* first_columns;  // [num_tables]; null where each table has its columns from 0 on
  const float* step;
  int num_tables;
  RowType row_type, grad_type;
};

// Launches on `stream` of `device`, which is the caller's current one, and returns the runtime's
// message where that failed, else nullptr. Rows and gradients number less than 2**31.
const char* update_rows(const RowUpdate& update, int device, void* stream);

}  // namespace torchembed
