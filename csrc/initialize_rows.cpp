// Writes the initial values of new rows, which are functions of (table key, id, column), bit for
// bit those of torchembed/ops/initialize_rows/reference.py: only operations that IEEE 754 rounds in
// one way, in the reference's order.

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>
#include <optional>
#include <vector>

#include "random_bits.h"
#include "tensors.h"
#include "threads.h"

namespace torchembed {
namespace {

// The values of InitializerKind in torchembed/core/types.py.
constexpr int32_t kUniform = 0;
constexpr int32_t kNormal = 1;

// 2**24 steps are the interval from 0 to 1, or one turn.
constexpr int32_t kSteps = 1 << 24;

int32_t uniform_steps(uint64_t key, uint64_t counter) {
  return (int32_t)(random_bits(key, counter) >> 40);
}

// The logarithm of steps / 2**24, for steps in [1, 2**24].
float log_of_steps(int32_t steps) {
  const int32_t bits = std::bit_cast<int32_t>((float)steps);
  const int32_t exponent = (bits - 0x3F3504F3) >> 23;
  const float x = std::bit_cast<float>(bits - exponent * (1 << 23));
  const float s = (x - 1.0f) / (x + 1.0f);
  const float z = s * s;
  const float series =
      ((z * (float)(2.0 / 9) + (float)(2.0 / 7)) * z + (float)(2.0 / 5)) * z + (float)(2.0 / 3);
  return (float)(exponent - 24) * std::numbers::ln2_v<float> + (s * 2.0f + s * z * series);
}

// The cosine of steps / 2**24 turns, for steps in [0, 2**24).
float cosine_of_turn(int32_t steps) {
  const int32_t quarter = (steps + kSteps / 8) / (kSteps / 4);
  const float t = (float)(steps - quarter * (kSteps / 4)) * (float)(2 * std::numbers::pi / kSteps);
  const float z = t * t;
  float magnitude;
  if (quarter % 2 == 0) {
    magnitude = (float)(-1.0 / 3628800);
    for (const double term : {1.0 / 40320, -1.0 / 720, 1.0 / 24, -0.5, 1.0}) {
      magnitude = z * magnitude + (float)term;
    }
  } else {
    const float sine =
        ((z * (float)(1.0 / 362880) - (float)(1.0 / 5040)) * z + (float)(1.0 / 120)) * z -
        (float)(1.0 / 6);
    magnitude = t * z * sine + t;
  }
  return quarter == 1 || quarter == 2 ? -magnitude : magnitude;
}

float standard_normal(uint64_t key, uint64_t column) {
  const float log = log_of_steps(kSteps - uniform_steps(key, 2 * column));
  return std::sqrt(log * -2.0f) * cosine_of_turn(uniform_steps(key, 2 * column + 1));
}

// The initial values of one table.
struct TableValues {
  uint64_t key;
  int32_t kind;
  float first;
  float second;
  uint64_t first_column;
};

// Writes dim values of the row of an id.
void fill_row(const TableValues& table, int64_t id, float* values, int64_t dim) {
  const uint64_t key = random_bits(table.key, (uint64_t)id);
  for (int64_t column = 0; column < dim; ++column) {
    const uint64_t counter = table.first_column + (uint64_t)column;
    if (table.kind == kUniform) {
      const float uniform = (float)uniform_steps(key, counter) * (1.0f / kSteps);
      values[column] = table.first + table.second * uniform;
    } else if (table.kind == kNormal) {
      values[column] = table.first + table.second * standard_normal(key, counter);
    } else {
      values[column] = table.first;
    }
  }
}

void store_row(char* row, FloatType type, const float* values, int64_t dim) {
  switch (type) {
    case FloatType::kFloat32:
      std::copy_n(values, dim, (float*)row);
      break;
    case FloatType::kFloat16:
      std::transform(values, values + dim, (Half*)row,
                     [](float value) { return Half{torch::headeronly::Half(value).x}; });
      break;
    case FloatType::kBFloat16:
      std::transform(values, values + dim, (BFloat16*)row,
                     [](float value) { return BFloat16{torch::headeronly::BFloat16(value).x}; });
      break;
  }
}

// An optimizer's state, of floats for as many rows as the weight has; no bytes a row where there
// is none.
RowBytes row_state(const char* name, const std::optional<Tensor>& state, int64_t num_rows) {
  if (!state) return {};
  STD_TORCH_CHECK(state->scalar_type() == ScalarType::Float, name, " must be float32, got ",
                  torch::headeronly::toString(state->scalar_type()));
  const RowBytes rows = mutable_row_bytes(name, *state);
  STD_TORCH_CHECK(rows.num_rows == num_rows, name, " must have ", num_rows, " rows, got ",
                  rows.num_rows);
  return rows;
}

void initialize_rows(const Tensor& weight, std::optional<Tensor> state0,
                     std::optional<Tensor> state1, const Tensor& rows, const Tensor& ids,
                     const Tensor& tables, std::optional<Tensor> num_new, const Tensor& table_keys,
                     const Tensor& kinds, const Tensor& parameters,
                     std::optional<Tensor> first_columns, double initial_state) {
  if (weight.numel() == 0) return;
  const int64_t num_tables = table_keys.numel();
  int64_t num_rows = rows.numel();
  STD_TORCH_CHECK(weight.dim() == 2, "weight must have 2 dimensions, got ", weight.dim());
  const int64_t dim = weight.size(1);
  const FloatType type = float_type("weight", weight.scalar_type());
  const RowBytes weights = mutable_row_bytes("weight", weight);
  const RowBytes states[] = {row_state("state0", state0, weights.num_rows),
                             row_state("state1", state1, weights.num_rows)};
  const int64_t* const row_numbers = const_data<int64_t>("rows", rows, num_rows);
  const int64_t* const row_ids = const_data<int64_t>("ids", ids, num_rows);
  const int32_t* const row_tables = const_data<int32_t>("tables", tables, num_rows);
  const int64_t* const keys = const_data<int64_t>("table_keys", table_keys, num_tables);
  const int32_t* const table_kinds = const_data<int32_t>("kinds", kinds, num_tables);
  const float* const numbers = const_data<float>("parameters", parameters, 2 * num_tables);
  const int64_t* const columns =
      first_columns ? const_data<int64_t>("first_columns", *first_columns, num_tables) : nullptr;
  if (num_new) {
    const int64_t count = *const_data<int64_t>("num_new", *num_new, 1);
    num_rows = std::clamp<int64_t>(count, 0, num_rows);
  }

  const auto initialize = [&](int64_t begin, int64_t end) {
    std::vector<float> values(dim);
    for (int64_t entry = begin; entry < end; ++entry) {
      const int64_t row = row_numbers[entry], table = row_tables[entry];
      // One unsigned comparison covers row -1 as well. What is no row or no table is left alone, so
      // that no memory outside the tensors is touched.
      if (!weights.holds(row)) continue;
      if ((uint64_t)table >= (uint64_t)num_tables) continue;
      const TableValues of_table{(uint64_t)keys[table], table_kinds[table], numbers[2 * table],
                                 numbers[2 * table + 1], columns ? (uint64_t)columns[table] : 0};
      fill_row(of_table, row_ids[entry], values.data(), dim);
      store_row(weights.at(row), type, values.data(), dim);
      for (const RowBytes& state : states) {
        std::fill_n((float*)state.at(row), state.bytes / sizeof(float), (float)initial_state);
      }
    }
  };
  const auto cost_before = [](int64_t entry) { return entry; };
  for_equal_costs(num_rows, grain_rows(dim), cost_before, initialize);
}

STABLE_TORCH_LIBRARY_FRAGMENT(torchembed_native, library) {
  library.def(
      "initialize_rows(Tensor(a!) weight, Tensor(b!)? state0, Tensor(c!)? state1,"
      " Tensor rows, Tensor ids, Tensor tables, Tensor? num_new,"
      " Tensor table_keys, Tensor kinds, Tensor parameters, Tensor? first_columns,"
      " float initial_state) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(torchembed_native, CPU, library) {
  library.impl("initialize_rows", TORCH_BOX(&initialize_rows));
}

}  // namespace
}  // namespace torchembed
