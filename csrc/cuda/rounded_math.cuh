// Roots and quotients rounded to nearest, for operands that are neither tiny nor huge. They take
// the steps that the compiler's own __fsqrt_rn and __fdiv_rn take for such operands, but without
// the branch on each operand that decides whether it is one, so that several can be in flight at
// once. Callers test the range of several operands at once. Others need the compiler's functions.

#pragma once

#include <cuda_runtime.h>

namespace torchembed {
namespace {

// Within these bounds no intermediate result overflows or becomes subnormal, so that the residuals
// below are exact.
constexpr float kLeastRadicand = 0x1p-100f, kMostRadicand = 0x1p100f;
constexpr float kLeastDivisor = 0x1p-60f, kMostDivisor = 0x1p60f;
// The bounds of dividends. They need no upper one where their squares are part of a radicand.
constexpr float kLeastDividend = 0x1p-60f, kMostDividend = 0x1p10f;

__device__ float moderate_root(float radicand) {
  float estimate;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(radicand));
  // One Newton step. A fused multiply-add computes the residual exactly, which makes the result the
  // nearest float.
  const float root = radicand * estimate;
  return __fmaf_rn(__fmaf_rn(-root, root, radicand), estimate * 0.5f, root);
}

// Quotients by a divisor (Markstein 1990), whose reciprocal many dividends may share. None of them
// may be more than 2**60 divisors. With one below kLeastDividend the last bit may be wrong, and the
// sign of a zero, which only a row as tiny would show.
class ModerateDivisor {
 public:
  explicit __device__ ModerateDivisor(float value) : value_(value) {
    float estimate;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(value));
    reciprocal_ = __fmaf_rn(__fmaf_rn(-value, estimate, 1.0f), estimate, estimate);
  }

  __device__ float divide(float dividend) const {
    const float quotient = reciprocal_ * dividend;
    return __fmaf_rn(reciprocal_, __fmaf_rn(-value_, quotient, dividend), quotient);
  }

 private:
  float value_;
  float reciprocal_;
};

}  // namespace
}  // namespace torchembed
