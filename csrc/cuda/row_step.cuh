// The optimizers' update of a row from its summed gradient.

#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "rounded_math.cuh"
#include "row_elements.cuh"
#include "row_rounding.cuh"
#include "update_rows.h"

namespace torchembed {
namespace {

// A lane's view of the matrices that are read and written: rows of Values, gradients of Grads.
template <class Value, class Grad, int kDim>
struct Matrices {
  LaneOfMatrix<Value, kDim> weight;
  LaneOfMatrix<float, kDim> state0, state1;
  LaneOfMatrix<const Grad, kDim> grad;

  explicit __device__ Matrices(const RowUpdate& update)
      : weight(static_cast<Value*>(update.weight)),
        state0(update.state0),
        state1(update.state1),
        grad(static_cast<const Grad*>(update.grad)) {}
};

// Divides by sqrt(total) + eps. All lanes of a row take the same branch, since `total` is the
// row's. The dividends need no test: `total` contains their squares, which bounds the quotient, and
// the last bit of the quotient of a tiny one is given up, see ModerateDivisor.
template <int kDim>
__device__ void divide_by_root(Elements<kDim>& gradient, float total, float eps) {
  float divisor = moderate_root(total) + eps;
  if (total >= kLeastRadicand && total <= kMostRadicand && divisor >= kLeastDivisor &&
      divisor <= kMostDivisor) {
    const ModerateDivisor moderate(divisor);
    gradient.for_each([&](float value, int) { return moderate.divide(value); });
  } else {
    divisor = __fsqrt_rn(total) + eps;
    gradient.for_each([&](float value, int) { return __fdiv_rn(value, divisor); });
  }
}

// The same with a total for each element. One test for the lane's elements, so that their roots and
// quotients are computed without a branch between them. Unless totals contain the squares of the
// dividends, kBoundsDividends must be true.
template <bool kBoundsDividends, int kDim>
__device__ void divide_by_roots(Elements<kDim>& gradient, const Elements<kDim>& totals, float eps) {
  float least = INFINITY, most = 0.0f, least_dividend = INFINITY, most_dividend = 0.0f;
#pragma unroll
  for (int i = 0; i < Elements<kDim>::kCount; ++i) {
    least = fminf(least, totals.at[i]);
    most = fmaxf(most, totals.at[i]);
    least_dividend = fminf(least_dividend, fabsf(gradient.at[i]));
    if constexpr (kBoundsDividends) most_dividend = fmaxf(most_dividend, fabsf(gradient.at[i]));
  }
  if (least >= kLeastRadicand && most <= kMostRadicand && least_dividend >= kLeastDividend &&
      most_dividend <= kMostDividend && eps >= 0.0f && eps <= kMostDivisor / 2.0f) {
    gradient.for_each([&](float value, int i) {
      return ModerateDivisor(moderate_root(totals.at[i]) + eps).divide(value);
    });
  } else {
    gradient.for_each(
        [&](float value, int i) { return __fdiv_rn(value, __fsqrt_rn(totals.at[i]) + eps); });
  }
}

template <Rule kRule>
constexpr bool has_row_state = kRule == Rule::kAdagrad || kRule == Rule::kAdam;

// A row of Values and its state, loaded before the gradients are summed, so that their latency is
// hidden.
template <class Value, int kDim, Rule kRule>
struct Row {
  struct Nothing {};
  using PackedRow = Packed<float, kDim>;

  Packed<Value, kDim> weight;
  std::conditional_t<has_row_state<kRule>, PackedRow,
                     std::conditional_t<kRule == Rule::kRowwiseAdagrad, float, Nothing>>
      state0;
  std::conditional_t<kRule == Rule::kAdam, PackedRow, Nothing> state1;

  template <class Grad>
  __device__ void load(const RowUpdate& update, const Matrices<Value, Grad, kDim>& matrices,
                       int row) {
    weight.load(matrices.weight.at(row));
    if constexpr (kRule == Rule::kRowwiseAdagrad) state0 = update.state0[row];
    if constexpr (has_row_state<kRule>) state0.load(matrices.state0.at(row));
    if constexpr (kRule == Rule::kAdam) state1.load(matrices.state1.at(row));
  }

  // kIsCold: the row is read by nobody else before the next step, so that its place in the cache is
  // better given to gradients. `rounding` is the row's, for Values of 16 bits. All lanes of the
  // warp call it, since they may add squares by shuffles; those of rows that are not `stored`
  // compute what nobody reads.
  template <bool kIsCold = false, class Grad>
  __device__ void step(const RowUpdate& update, const Matrices<Value, Grad, kDim>& matrices,
                       float lr, int row, Elements<kDim> gradient,
                       const RowRounding<Value>& rounding = {}, bool stored = true) const {
    Elements<kDim> old = weight.elements();
    if (update.grad_multiplier != nullptr || update.max_gradient > 0.0f ||
        update.weight_decay != 0.0f) {
      const float multiplier = update.grad_multiplier == nullptr ? 1.0f : *update.grad_multiplier;
      const float most = update.max_gradient > 0.0f ? update.max_gradient : INFINITY;
      gradient.for_each([&](float value, int i) {
        value *= multiplier;
        // fminf and fmaxf would turn a NaN into a bound and so hide it; comparisons keep it.
        if (value > most) value = most;
        if (value < -most) value = -most;
        if (update.weight_decay != 0.0f) value += update.weight_decay * old.at[i];
        return value;
      });
    }
    if constexpr (kRule == Rule::kRowwiseAdagrad) {
      const float squares = sum_squares<Value>(gradient);
      constexpr bool kIsPower = (kDim & (kDim - 1)) == 0;  // the reciprocal is exact
      const float row_total =
          state0 + (kIsPower ? squares * (1.0f / kDim) : __fdiv_rn(squares, float{kDim}));
      if (stored && lane_of_row<kDim>() == 0) update.state0[row] = row_total;
      divide_by_root(gradient, row_total, update.eps);
    } else if constexpr (kRule == Rule::kAdagrad) {
      Elements<kDim> squares = state0.elements();
      squares.for_each([&](float value, int i) { return value + gradient.at[i] * gradient.at[i]; });
      if (stored) store_elements<kIsCold>(matrices.state0.at(row), squares);
      divide_by_roots<false>(gradient, squares, update.eps);
    } else if constexpr (kRule == Rule::kAdam) {
      Elements<kDim> first = state0.elements(), second = state1.elements();
      first.for_each([&](float value, int i) {
        return value + (gradient.at[i] - value) * update.one_minus_beta1;
      });
      second.for_each([&](float value, int i) {
        return value + (gradient.at[i] * gradient.at[i] - value) * update.one_minus_beta2;
      });
      if (stored) {
        store_elements<kIsCold>(matrices.state0.at(row), first);
        store_elements<kIsCold>(matrices.state1.at(row), second);
      }
      divide_by_roots<true>(first, second, update.eps);
      gradient = first;
    }
    old.for_each([&](float value, int i) { return value - lr * gradient.at[i]; });
    if (!stored) return;
    if constexpr (std::is_same_v<Value, float>) {
      store_elements<kIsCold>(matrices.weight.at(row), old);
    } else {
      rounding.template store<kIsCold>(matrices.weight.at(row), old);
    }
  }
};

}  // namespace
}  // namespace torchembed
