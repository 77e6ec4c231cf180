// Roots and quotients rounded to nearest, for operands that are neither tiny nor huge: the steps
// that the compiler's own take then, without asking for each operand whether it is. So several are
// on their way at once. Other operands need the compiler's.

#pragma once

#include <cuda_runtime.h>

namespace torchembed {
namespace {

constexpr float kLeastRadicand = 0x1p-100f, kMostRadicand = 0x1p100f;
constexpr float kLeastDivisor = 0x1p-60f, kMostDivisor = 0x1p60f;
// Of dividends. Their squares are finite.
constexpr float kLeastDividend = 0x1p-60f;

__device__ float reciprocal_estimate(float value) {
  float estimate;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(value));
  return estimate;
}

__device__ float moderate_root(float radicand) {
  float estimate;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(radicand));
  const float root = radicand * estimate;
  return __fmaf_rn(__fmaf_rn(-root, root, radicand), estimate * 0.5f, root);
}

__device__ float moderate_quotient(float dividend, float divisor) {
  const float estimate = reciprocal_estimate(divisor);
  const float reciprocal = __fmaf_rn(__fmaf_rn(-divisor, estimate, 1.0f), estimate, estimate);
  const float quotient = reciprocal * dividend;
  return __fmaf_rn(reciprocal, __fmaf_rn(-divisor, quotient, dividend), quotient);
}

// Many quotients by one divisor (Markstein 1990). None of the dividends may be more than 2**60
// divisors; of those below 2**-100 the last bit may be wrong, which only a row as tiny would show.
class ModerateDivisor {
 public:
  explicit __device__ ModerateDivisor(float value) : value_(value) {
    const float estimate = reciprocal_estimate(value);
    reciprocal_ = __fmaf_rn(estimate, -__fmaf_rn(value, estimate, -1.0f), estimate);
  }

  __device__ float divide(float dividend) const {
    float quotient = dividend * reciprocal_;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float left = __fmaf_rn(-quotient, value_, dividend);
      quotient = __fmaf_rn(left, reciprocal_, quotient);
    }
    return quotient;
  }

 private:
  float value_;
  float reciprocal_;
};

}  // namespace
}  // namespace torchembed
