// Updating rows on a GPU: what the operation and its kernel agree on.

#pragma once

#include <cstdint>

namespace torchembed {

enum class GradType { kFloat32, kFloat16, kBFloat16 };

// What the kernel reads and changes. A pointer to what is not there is null.
struct RowUpdate {
  float* weight;            // [R, dim]
  float* state;             // [R, dim], or [R] for row-wise Adagrad
  const void* unique_rows;  // int32, or int64 where rows_are_wide
  const int32_t* starts;
  const int32_t* order;
  const int32_t* num_runs;
  float* chunk_sums;          // scratch: [num_ids / kChunk, dim], of whole chunks of runs
  float* group_sums;          // scratch: [num_ids / kChunk**2, dim], of whole groups of chunks
  int32_t* group_starts;      // scratch: [num_ids / kChunk**2], the first chunk of each, or -1
  const void* grad;           // [G, dim]
  const void* gradient_rows;  // of each position; int32, or int64 where gradient_rows_are_wide
  const float* scales;        // of each position
  const float* lr;
  const float* grad_multiplier;
  const float* skip;
  int64_t num_ids;
  int dim;  // 32, 64 or 128
  int num_blocks;
  int max_warps;
  bool rows_are_wide;
  bool gradient_rows_are_wide;
  float eps;
  float weight_decay;
  float max_gradient;
};

// Occurrences in a chunk, and chunks in a group: CHUNK of run_sums.py.
constexpr int kChunk = 32;

// Writes chunk_sums and group_sums, on `stream` of the current device.
void launch_sum_chunks(const RowUpdate& update, GradType grad_type, void* stream);

// Launches on `stream` of `device`, which is the caller's current one, and returns the runtime's
// message where that failed, else nullptr. `optimizer` is a value of
// torchembed.core.types.OptimizerKind: SGD or either Adagrad.
const char* update_rows(const RowUpdate& update, GradType grad_type, int64_t optimizer, int device,
                        void* stream);

}  // namespace torchembed
