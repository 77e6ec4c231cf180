// The kernel that updates rows from their summed gradients.

#pragma once

#include "lookup_kernels.h"
#include "random_bits.h"
#include "row_kernels.h"
#include "row_vectors.h"

namespace torchembed::TORCHEMBED_ISA {

// What a row's rounding bits at one step are drawn from.
struct RowRounding {
  uint64_t key = 0;          // its counters are the groups of four columns
  int64_t first_column = 0;  // the place, in its group, of the column that the row begins with

  // Random bits for kLanes columns of the row from `column` on, of which the upper 16 count. 64 are
  // drawn for each group and give 16 to each of its columns, the upper ones to the first.
  TORCHEMBED_INLINE void draw(int64_t column, uint64_t* bits) const {
    const uint64_t place = (uint64_t)(first_column + column);
    uint64_t groups[kLanes / 4 + 1];
    for (int group = 0; group <= kLanes / 4; ++group) {
      groups[group] = random_bits(key, place / 4 + group);
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint64_t at = place % 4 + lane;
      bits[lane] = groups[at / 4] << at % 4 * 16;
    }
  }
};

inline RowRounding row_rounding(const RoundingKeys& rounding, int64_t row) {
  int64_t table = 0, after = rounding.num_tables;
  while (after - table > 1) {
    const int64_t middle = (table + after) / 2;
    (rounding.row_offsets[middle] <= row ? table : after) = middle;
  }
  const uint64_t row_key = random_bits((uint64_t)rounding.row_keys[table], (uint64_t)row);
  const uint64_t key = random_bits(row_key, rounding.step);
  const int64_t first_column = rounding.first_columns ? rounding.first_columns[table] : 0;
  return {shifted_key(key, (uint64_t)first_column / 4), first_column % 4};
}

// Stochastic rounding: x as a value of Element, rounded up or down with probability proportional to
// nearness, by adding random bits below the last one that is kept. Infinities, NaN and what would
// overflow Element stay as they are, to be rounded to nearest by the store: the addition could
// carry a NaN into infinity and a finite number past the largest one.
TORCHEMBED_INLINE float with_noise(float x, uint64_t random, const BFloat16*) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  const uint32_t rounded = (bits + (uint32_t)(random >> 48)) & 0xFFFF0000;
  const bool is_finite = (bits & 0x7F800000) != 0x7F800000;
  return __builtin_bit_cast(float, is_finite ? rounded : bits);
}

TORCHEMBED_INLINE float with_noise(float x, uint64_t random, const Half*) {
  const uint32_t noise = (uint32_t)(random >> 51);
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  const float normal = __builtin_bit_cast(float, (bits + noise) & 0xFFFFE000);
  // Below 2**-14 float16 is spaced evenly, by 2**-24; both products are exact.
  const float steps = __builtin_floorf(__builtin_fabsf(x) * 0x1p24f + (float)noise * 0x1p-13f);
  const float subnormal = __builtin_copysignf(steps * 0x1p-24f, x);
  const float rounded = __builtin_fabsf(x) < 0x1p-14f ? subnormal : normal;
  const bool fits = __builtin_fabsf(rounded) <= 65504.0f && (bits & 0x7F800000) != 0x7F800000;
  return fits ? rounded : x;
}

template <class Element>
TORCHEMBED_INLINE Floats with_noise(Floats x, const RowRounding& rounding, int64_t column,
                                    const Element* type) {
  float lanes[kLanes];
  uint64_t bits[kLanes];
  store(lanes, x, AllLanes{});
  rounding.draw(column, bits);
  for (int lane = 0; lane < kLanes; ++lane) {
    lanes[lane] = with_noise(lanes[lane], bits[lane], type);
  }
  return load(lanes, AllLanes{});
}

// Updates rows [first, last) of op.rows from their summed gradients, one after the other. Arguments
// are copied to local variables, as in pool_columns.
template <Optimizer kOptimizer, class Element>
void update_rows_of(const RowUpdates& op, int64_t first, int64_t last, const float* gradients) {
  constexpr bool kStatePerRow = kOptimizer == Optimizer::kRowwiseAdagrad;
  constexpr bool kTwoStates = kOptimizer == Optimizer::kAdam;
  constexpr bool kOneState = kOptimizer == Optimizer::kAdagrad || kTwoStates;
  const RowMatrix matrix = op.weight;
  const int64_t dim = matrix.dim, last_row = op.num_rows - 1;
  const IdArray rows = op.rows;
  const UpdateRule rule = op.rule;
  const bool stochastic = sizeof(Element) == 2 && op.rounding.num_tables > 0;

  for (int64_t index = first; index < last; ++index, gradients += dim) {
    const int64_t next = rows[index + kRowsAhead < last_row ? index + kRowsAhead : last_row];
    if (has_row(matrix, next)) {
      prefetch((const Element*)matrix.data + next * dim, dim);
      if constexpr (kStatePerRow) prefetch(op.state0 + next, 1);
      if constexpr (kOneState) prefetch(op.state0 + next * dim, dim);
      if constexpr (kTwoStates) prefetch(op.state1 + next * dim, dim);
    }
    const int64_t row = rows[index];
    if (!has_row(matrix, row)) continue;
    Element* const weight = (Element*)matrix.data + row * dim;
    float* const state0 = kOneState ? op.state0 + row * dim : nullptr;
    float* const state1 = kTwoStates ? op.state1 + row * dim : nullptr;
    const auto gradient_at = [&](int64_t column, Floats old, auto lanes) {
      Floats gradient = load(gradients + column, lanes) * rule.grad_multiplier;
      if (rule.max_gradient > 0) gradient = clamp(gradient, rule.max_gradient);
      if (rule.weight_decay != 0) gradient = gradient + old * rule.weight_decay;
      return gradient;
    };

    float divisor = 1;
    if constexpr (kStatePerRow) {
      Floats squares{};
      for_each_vector(dim, [&](int64_t column, auto lanes) {
        const Floats gradient = gradient_at(column, load(weight + column, lanes), lanes);
        squares = squares + gradient * gradient;
      });
      op.state0[row] += sum_of_lanes(squares) / (float)dim;
      divisor = __builtin_sqrtf(op.state0[row]) + rule.eps;
    }
    const RowRounding rounding = stochastic ? row_rounding(op.rounding, row) : RowRounding{};
    for_each_vector(dim, [&](int64_t column, auto lanes) {
      const Floats old = load(weight + column, lanes);
      const Floats gradient = gradient_at(column, old, lanes);
      Floats change;
      if constexpr (kOptimizer == Optimizer::kSgd) {
        change = gradient * rule.lr;
      } else if constexpr (kOptimizer == Optimizer::kAdagrad) {
        const Floats total = load(state0 + column, lanes) + gradient * gradient;
        store(state0 + column, total, lanes);
        change = gradient / (sqrt(total) + rule.eps) * rule.lr;
      } else if constexpr (kOptimizer == Optimizer::kRowwiseAdagrad) {
        change = gradient / divisor * rule.lr;
      } else {
        Floats mean = load(state0 + column, lanes), square = load(state1 + column, lanes);
        mean = mean + (gradient - mean) * rule.one_minus_beta1;
        square = square + (gradient * gradient - square) * rule.one_minus_beta2;
        store(state0 + column, mean, lanes);
        store(state1 + column, square, lanes);
        change = mean / (sqrt(square) + rule.eps) * rule.adam_step_size;
      }
      Floats updated = old - change;
      if constexpr (sizeof(Element) == 2) {
        if (stochastic) updated = with_noise(updated, rounding, column, weight);
      }
      store(weight + column, updated, lanes);
    });
  }
}

void update_rows(const RowUpdates& op, int64_t first, int64_t last, const float* gradients) {
  with_element(op.weight.type, [&](auto* type) {
    using Element = std::remove_pointer_t<decltype(type)>;
    switch (op.rule.optimizer) {
      case Optimizer::kSgd:
        return update_rows_of<Optimizer::kSgd, Element>(op, first, last, gradients);
      case Optimizer::kAdagrad:
        return update_rows_of<Optimizer::kAdagrad, Element>(op, first, last, gradients);
      case Optimizer::kRowwiseAdagrad:
        return update_rows_of<Optimizer::kRowwiseAdagrad, Element>(op, first, last, gradients);
      case Optimizer::kAdam:
        return update_rows_of<Optimizer::kAdam, Element>(op, first, last, gradients);
    }
  });
}

}  // namespace torchembed::TORCHEMBED_ISA
