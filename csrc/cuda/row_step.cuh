// The optimizers' update of a row from its summed gradient.

#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "rounded_math.cuh"
#include "row_elements.cuh"
#include "update_rows.h"

namespace torchembed {
namespace {

// A lane's view of the matrices that are read and written.
template <class Grad>
struct Matrices {
  LaneOfMatrix<float> weight;
  LaneOfMatrix<float> state;
  LaneOfMatrix<const Grad> grad;

  explicit __device__ Matrices(const RowUpdate& update)
      : weight(update.weight), state(update.state), grad(static_cast<const Grad*>(update.grad)) {}
};

// Divides by sqrt(total) + eps. All lanes take the same branch, since `total` is the row's. The
// dividends need no test: `total` contains their squares, which bounds the quotient, and the last
// bit of the quotient of a tiny one is given up, see ModerateDivisor.
__device__ void divide_by_root(Elements& gradient, float total, float eps) {
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

// The same with a total for each element. One test for the lane's four elements, so that the four
// roots and quotients are computed without a branch between them.
__device__ void divide_by_roots(Elements& gradient, const Elements& totals, float eps) {
  float least = INFINITY, most = 0.0f, least_dividend = INFINITY;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    least = fminf(least, totals.at[i]);
    most = fmaxf(most, totals.at[i]);
    least_dividend = fminf(least_dividend, fabsf(gradient.at[i]));
  }
  if (least >= kLeastRadicand && most <= kMostRadicand && least_dividend >= kLeastDividend &&
      eps >= 0.0f && eps <= kMostDivisor / 2.0f) {
    gradient.for_each([&](float value, int i) {
      return ModerateDivisor(moderate_root(totals.at[i]) + eps).divide(value);
    });
  } else {
    gradient.for_each(
        [&](float value, int i) { return __fdiv_rn(value, __fsqrt_rn(totals.at[i]) + eps); });
  }
}

// A row and its state, loaded before the gradients are summed, so that their latency is hidden.
template <bool kRowwise>
struct Row {
  Packed<float> weight;
  std::conditional_t<kRowwise, float, Packed<float>> state;

  template <class Grad>
  __device__ void load(const RowUpdate& update, const Matrices<Grad>& matrices, int row) {
    weight.load(matrices.weight.at(row));
    if constexpr (kRowwise) {
      state = update.state[row];
    } else {
      state.load(matrices.state.at(row));
    }
  }

  template <class Grad>
  __device__ void step(const RowUpdate& update, const Matrices<Grad>& matrices, float lr, int row,
                       Elements gradient) const {
    Elements old = weight.elements();
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
    if constexpr (kRowwise) {
      const float row_total =
          state + sum_squares(gradient) * (1.0f / kDim);  // exact: kDim is a power of two
      if (lane_of_warp() == 0) update.state[row] = row_total;
      divide_by_root(gradient, row_total, update.eps);
    } else {
      Elements squares = state.elements();
      squares.for_each([&](float value, int i) { return value + gradient.at[i] * gradient.at[i]; });
      store_elements(matrices.state.at(row), squares);
      divide_by_roots(gradient, squares, update.eps);
    }
    old.for_each([&](float value, int i) { return value - lr * gradient.at[i]; });
    store_elements(matrices.weight.at(row), old);
  }
};

}  // namespace
}  // namespace torchembed
