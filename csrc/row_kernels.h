// The interface of the kernels over rows of floats, of which there is a set for each instruction
// set. Their arguments are plain data, so that no function of a library is compiled for one of the
// sets.

#pragma once

#include <cstdint>

namespace torchembed {

// The distance of prefetches, in rows: enough to hide the latency of memory behind the work on as
// many rows.
constexpr int64_t kRowsAhead = 32;

enum class FloatType : uint8_t { kFloat32, kFloat16, kBFloat16 };

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

inline int64_t bytes_of(FloatType type) { return type == FloatType::kFloat32 ? 4 : 2; }

// A row-major matrix of floats.
struct RowMatrix {
  void* data;
  FloatType type;
  int64_t num_rows;
  int64_t dim;
};

// An array of int32 or int64, or none.
class IdArray {
 public:
  IdArray() = default;
  explicit IdArray(const int32_t* ids) : ids_(ids), width_(4) {}
  explicit IdArray(const int64_t* ids) : ids_(ids), width_(8) {}

  explicit operator bool() const { return width_ != 0; }
  int64_t operator[](int64_t index) const { return width_ == 8 ? wide()[index] : narrow()[index]; }

  bool is_wide() const { return width_ == 8; }
  const int64_t* wide() const { return static_cast<const int64_t*>(ids_); }
  const int32_t* narrow() const { return static_cast<const int32_t*>(ids_); }

 private:
  const void* ids_ = nullptr;
  int width_ = 0;
};

// Ids in num_features * batch_size bags, feature-major: jagged where there are offsets, else
// hotness[f] ids for each bag of feature f, whose first id stands at feature_begins[f].
struct Bags {
  int64_t num_features;
  int64_t batch_size;
  IdArray offsets;
  const int64_t* hotness;
  const int64_t* feature_begins;

  int64_t begin(int64_t feature, int64_t sample) const {
    if (offsets) return offsets[feature * batch_size + sample];
    return feature_begins[feature] + sample * hotness[feature];
  }
  int64_t end(int64_t feature, int64_t sample) const {
    if (offsets) return offsets[feature * batch_size + sample + 1];
    return feature_begins[feature] + (sample + 1) * hotness[feature];
  }
};

// out[b * num_features + f] is the sum over positions p of bag (f, b) of matrix[rows[p]] times
// scales[p], divided by the number of positions where mean is true.
struct PooledLookup {
  RowMatrix matrix;
  IdArray rows;
  int64_t num_ids;
  const float* scales;  // or null: all ones
  Bags bags;
  bool mean;
  RowMatrix out;
  // Whether to write past the caches; out is then aligned to 64 bytes, its rows multiples of that.
  bool stream_out;
};

struct PooledWeightsBackward {
  RowMatrix grad;  // sample-major: row b * num_features + f
  RowMatrix weight;
  IdArray rows;
  int64_t num_ids;
  Bags bags;
  bool mean;
  float* out;
};

struct SequenceLookup {
  RowMatrix weight;
  IdArray rows;
  int64_t num_ids;
  RowMatrix out;
};

// The values of OptimizerKind in torchembed/core/types.py.
enum class Optimizer : int64_t { kSgd, kAdagrad, kRowwiseAdagrad, kAdam };

struct UpdateRule {
  Optimizer optimizer;
  float lr;
  float grad_multiplier;
  float max_gradient;  // 0: none
  float weight_decay;  // 0: none
  float eps;
  float one_minus_beta1;
  float one_minus_beta2;
  float adam_step_size;
};

// Keys of stochastic rounding, or none: table t holds rows [row_offsets[t], row_offsets[t + 1]),
// and of these the columns from first_columns[t] on.
struct RoundingKeys {
  int64_t num_tables;
  const int64_t* row_offsets;
  const int64_t* row_keys;
  const int64_t* first_columns;  // or null: all zeros
  uint64_t step;
};

struct RowUpdates {
  RowMatrix weight;
  float* state0;
  float* state1;
  IdArray rows;
  int64_t num_rows;
  UpdateRule rule;
  RoundingKeys rounding;
};

// Each runs over a part of its bags, ids or rows, so that threads share the work. A row outside its
// matrix is treated as row -1. Sums run in the order of positions, in 16 lanes and without fused
// multiply-adds whatever the instruction set, so that every machine gives the same bits.
struct RowKernels {
  const char* instruction_set;
  void (*pooled_lookup)(const PooledLookup&, int64_t first_bag, int64_t last_bag);
  // scratch: dim floats.
  void (*pooled_weights_backward)(const PooledWeightsBackward&, int64_t first_bag, int64_t last_bag,
                                  float* scratch);
  void (*sequence_lookup)(const SequenceLookup&, int64_t first_id, int64_t last_id);
  // gradients: dim floats for each of the rows [first, last).
  void (*update_rows)(const RowUpdates&, int64_t first, int64_t last, const float* gradients);
};

// The best set for this processor, or the one that TORCHEMBED_INSTRUCTION_SET names.
const RowKernels& row_kernels();

}  // namespace torchembed
