// Updating rows on a GPU: what the operation and its kernel agree on.

#pragma once

#include <cstdint>

namespace torchembed {

// Columns of the rows that the kernel takes.
constexpr int kUpdateDim = 128;

enum class GradType { kFloat32, kFloat16, kBFloat16 };

// What the kernel reads and changes. A pointer to what is not there is null.
struct RowUpdate {
  float* weight;            // [R, kUpdateDim]
  float* state;             // [R]
  const void* unique_rows;  // int32, or int64 where rows_are_wide
  const int32_t* starts;
  const int32_t* order;
  const int32_t* num_runs;
  const float* chunk_sums;    // of whole chunks of runs
  const float* group_sums;    // of whole groups of chunks
  const void* grad;           // [G, kUpdateDim]
  const void* gradient_rows;  // of each position; int32, or int64 where gradient_rows_are_wide
  const float* scales;        // of each position
  const float* lr;
  const float* grad_multiplier;
  const float* skip;
  bool rows_are_wide;
  bool gradient_rows_are_wide;
  float eps;
  float weight_decay;
  float max_gradient;
  int num_blocks;  // one fills a multiprocessor
};

// Launches on `stream` of `device`, which is the caller's current one, and returns the runtime's
// message where that failed, else nullptr. Rows and gradients number less than 2**31.
const char* update_rows(const RowUpdate& update, GradType grad_type, int device, void* stream);

}  // namespace torchembed
