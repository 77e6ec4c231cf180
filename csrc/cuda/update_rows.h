// Updating rows on a GPU: what the operation and its kernels agree on.

#pragma once

#include <cstdint>

#include "../run_chunks.h"

namespace torchembed {

// Columns of the rows that the kernels take.
constexpr int kUpdateDim = 128;

enum class GradType { kFloat32, kFloat16, kBFloat16 };

// What the kernels read and change. A pointer to what is not there is null.
struct RowUpdate {
  float* weight;            // [R, kUpdateDim]
  float* state;             // [R] where is_rowwise, else as weight
  const void* unique_rows;  // int32, or int64 where rows_are_wide
  const int32_t* starts;
  const int32_t* order;
  const int32_t* num_runs;
  const int32_t* chunk_runs;  // [num_chunks]: the run whose whole chunk is at a slot, or -1
  const void* grad;           // [G, kUpdateDim]
  const void* gradient_rows;  // of each position; int32, or int64 where gradient_rows_are_wide
  const float* scales;        // of each position
  const float* lr;
  const float* grad_multiplier;
  const float* skip;
  float* chunk_sums;     // scratch, [num_chunks, kUpdateDim]
  float* group_sums;     // scratch, [num_chunks / kRunChunk, kUpdateDim]
  int32_t* num_taken;    // scratch, [1]: blocks of runs that warps have taken
  int32_t* num_summed;   // right behind, [num_chunks]: of a long run's sums, at its first slot
  int32_t* num_grouped;  // right behind, [num_chunks / kRunChunk]: of a group's chunks
  int num_ids;
  int num_chunks;  // whole ones that all ids together have
  bool is_rowwise;
  bool rows_are_wide;
  bool gradient_rows_are_wide;
  float eps;
  float weight_decay;
  float max_gradient;
  int num_blocks;
};

// Launches on `stream` of `device`, which is the caller's current one, and returns the runtime's
// message where that failed, else nullptr. Rows and gradients number less than 2**31.
const char* update_rows(const RowUpdate& update, GradType grad_type, int device, void* stream);

}  // namespace torchembed
