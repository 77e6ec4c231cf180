// Vectors of 16 floats in one instruction set, and their loads and stores.
//
// A vector is as many hardware vectors as 16 floats take. Rows of 16-bit floats are widened as they
// are loaded and rounded to nearest, ties to even, as they are stored.

#pragma once

#include "row_kernels.h"

namespace torchembed::TORCHEMBED_ISA {

constexpr int kLanes = 16;

#define TORCHEMBED_INLINE inline __attribute__((always_inline))

// One hardware vector of floats, and the unsigned integers of as many bits.
typedef float Part __attribute__((vector_size(TORCHEMBED_VECTOR_BYTES)));
typedef uint32_t PartBits __attribute__((vector_size(TORCHEMBED_VECTOR_BYTES)));

constexpr int kPartLanes = TORCHEMBED_VECTOR_BYTES / 4;
constexpr int kParts = kLanes / kPartLanes;

// Vectors that are summed in registers at a time. Where there are 16 registers that is half of
// them; the others hold what is loaded.
constexpr int kMaxVectors = TORCHEMBED_VECTOR_BYTES / 8;

// Below, load_part and store_part move a hardware vector, or given a count that many of its lanes,
// fewer than all: the others are loaded as zeros, and not stored.

// The bits of the bfloat16 nearest to each float, ties to even, in the lower halves. The addition
// could carry a NaN over into infinity, so NaNs are replaced by the quiet one.
TORCHEMBED_INLINE PartBits bfloat16_bits(Part part) {
  const PartBits bits = (PartBits)part;
  const PartBits rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const PartBits is_nan = (PartBits)((bits & 0x7FFFFFFF) > 0x7F800000);
  return (rounded & ~is_nan) | (is_nan & 0x7FC0);
}

#if TORCHEMBED_VECTOR_BYTES == 64

TORCHEMBED_INLINE Part load_part(const float* source) { return _mm512_loadu_ps(source); }
TORCHEMBED_INLINE Part load_part(const Half* source) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)source));
}
TORCHEMBED_INLINE Part load_part(const BFloat16* source) {
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)source));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}
TORCHEMBED_INLINE void store_part(float* target, Part part) { _mm512_storeu_ps(target, part); }
TORCHEMBED_INLINE void stream_part(float* target, Part part) { _mm512_stream_ps(target, part); }
TORCHEMBED_INLINE void store_part(Half* target, Part part) {
  _mm256_storeu_si256((__m256i*)target, _mm512_cvtps_ph(part, _MM_FROUND_TO_NEAREST_INT));
}
TORCHEMBED_INLINE void store_part(BFloat16* target, Part part) {
  const __m256i bits = _mm512_cvtepi32_epi16((__m512i)bfloat16_bits(part));
  _mm256_storeu_si256((__m256i*)target, bits);
}
TORCHEMBED_INLINE Part sqrt_part(Part part) { return _mm512_sqrt_ps(part); }

TORCHEMBED_INLINE __mmask16 first_lanes(int count) { return (__mmask16)((1 << count) - 1); }
TORCHEMBED_INLINE Part load_part(const float* source, int count) {
  return _mm512_maskz_loadu_ps(first_lanes(count), source);
}
TORCHEMBED_INLINE Part load_part(const Half* source, int count) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(count), source));
}
TORCHEMBED_INLINE Part load_part(const BFloat16* source, int count) {
  const __m256i bits = _mm256_maskz_loadu_epi16(first_lanes(count), source);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
TORCHEMBED_INLINE void store_part(float* target, Part part, int count) {
  _mm512_mask_storeu_ps(target, first_lanes(count), part);
}
TORCHEMBED_INLINE void store_part(Half* target, Part part, int count) {
  const __m256i bits = _mm512_cvtps_ph(part, _MM_FROUND_TO_NEAREST_INT);
  _mm256_mask_storeu_epi16(target, first_lanes(count), bits);
}
TORCHEMBED_INLINE void store_part(BFloat16* target, Part part, int count) {
  const __m256i bits = _mm512_cvtepi32_epi16((__m512i)bfloat16_bits(part));
  _mm256_mask_storeu_epi16(target, first_lanes(count), bits);
}

#elif TORCHEMBED_VECTOR_BYTES == 32

TORCHEMBED_INLINE Part load_part(const float* source) { return _mm256_loadu_ps(source); }
TORCHEMBED_INLINE Part load_part(const Half* source) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)source));
}
TORCHEMBED_INLINE Part load_part(const BFloat16* source) {
  const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)source));
  return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}
TORCHEMBED_INLINE void store_part(float* target, Part part) { _mm256_storeu_ps(target, part); }
TORCHEMBED_INLINE void stream_part(float* target, Part part) { _mm256_stream_ps(target, part); }
TORCHEMBED_INLINE void store_part(Half* target, Part part) {
  _mm_storeu_si128((__m128i*)target, _mm256_cvtps_ph(part, _MM_FROUND_TO_NEAREST_INT));
}
TORCHEMBED_INLINE void store_part(BFloat16* target, Part part) {
  const __m256i bits = (__m256i)bfloat16_bits(part);
  const __m128i low = _mm256_castsi256_si128(bits), high = _mm256_extracti128_si256(bits, 1);
  _mm_storeu_si128((__m128i*)target, _mm_packus_epi32(low, high));
}
TORCHEMBED_INLINE Part sqrt_part(Part part) { return _mm256_sqrt_ps(part); }

TORCHEMBED_INLINE Part load_part(const float* source, int count) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_maskload_ps(source, _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lanes));
}

#else

TORCHEMBED_INLINE Part load_part(const float* source) {
  Part part;
  std::memcpy(&part, source, sizeof(part));
  return part;
}
TORCHEMBED_INLINE Part load_part(const Half* source) {
  Part part;
  for (int lane = 0; lane < kPartLanes; ++lane) {
    part[lane] = torch::headeronly::Half(source[lane].bits, torch::headeronly::Half::from_bits());
  }
  return part;
}
TORCHEMBED_INLINE Part load_part(const BFloat16* source) {
  PartBits bits;
  for (int lane = 0; lane < kPartLanes; ++lane) bits[lane] = source[lane].bits;
  return (Part)(bits << 16);
}
TORCHEMBED_INLINE void store_part(float* target, Part part) {
  std::memcpy(target, &part, sizeof(part));
}
TORCHEMBED_INLINE void stream_part(float* target, Part part) { store_part(target, part); }
TORCHEMBED_INLINE void store_part(Half* target, Part part) {
  for (int lane = 0; lane < kPartLanes; ++lane) {
    target[lane].bits = torch::headeronly::Half(part[lane]).x;
  }
}
TORCHEMBED_INLINE void store_part(BFloat16* target, Part part) {
  const PartBits bits = bfloat16_bits(part);
  for (int lane = 0; lane < kPartLanes; ++lane) target[lane].bits = (uint16_t)bits[lane];
}
TORCHEMBED_INLINE Part sqrt_part(Part part) {
  for (int lane = 0; lane < kPartLanes; ++lane) part[lane] = __builtin_sqrtf(part[lane]);
  return part;
}

TORCHEMBED_INLINE Part load_part(const float* source, int count) {
  Part part{};
  if (count > 0) part[0] = source[0];
  if (count > 1) part[1] = source[1];
  if (count > 2) part[2] = source[2];
  return part;
}

#endif

#if TORCHEMBED_VECTOR_BYTES < 64

// Copies fewer than 8 elements.
template <class Element>
TORCHEMBED_INLINE void copy_few(Element* target, const Element* source, int count) {
  if (count & 4) {
    std::memcpy(target, source, 4 * sizeof(Element));
    target += 4, source += 4;
  }
  if (count & 2) {
    std::memcpy(target, source, 2 * sizeof(Element));
    target += 2, source += 2;
  }
  if (count & 1) *target = *source;
}

template <class Element>
TORCHEMBED_INLINE Part load_part(const Element* source, int count) {
  Element padded[kPartLanes] = {};
  copy_few(padded, source, count);
  return load_part(padded);
}
template <class Element>
TORCHEMBED_INLINE void store_part(Element* target, Part part, int count) {
  Element padded[kPartLanes];
  store_part(padded, part);
  copy_few(target, padded, count);
}

#endif

struct Floats {
  Part parts[kParts];
};

#define TORCHEMBED_ELEMENTWISE(op)                                                            \
  TORCHEMBED_INLINE Floats operator op(Floats a, Floats b) {                                  \
    for (int part = 0; part < kParts; ++part) a.parts[part] = a.parts[part] op b.parts[part]; \
    return a;                                                                                 \
  }                                                                                           \
  TORCHEMBED_INLINE Floats operator op(Floats a, float b) {                                   \
    for (int part = 0; part < kParts; ++part) a.parts[part] = a.parts[part] op b;             \
    return a;                                                                                 \
  }
TORCHEMBED_ELEMENTWISE(+)
TORCHEMBED_ELEMENTWISE(-)
TORCHEMBED_ELEMENTWISE(*)
TORCHEMBED_ELEMENTWISE(/)
#undef TORCHEMBED_ELEMENTWISE

TORCHEMBED_INLINE Floats sqrt(Floats x) {
  for (int part = 0; part < kParts; ++part) x.parts[part] = sqrt_part(x.parts[part]);
  return x;
}

// Clamps each element to [-limit, limit]. A comparison with NaN is false, so NaN stays NaN; the
// minimum instruction of x86 would replace it.
TORCHEMBED_INLINE Floats clamp(Floats x, float limit) {
  for (int part = 0; part < kParts; ++part) {
    const Part value = x.parts[part], most = Part{} + limit;
    const Part below = value > most ? most : value;
    x.parts[part] = below < -most ? -most : below;
  }
  return x;
}

TORCHEMBED_INLINE float sum_of_lanes(Floats x) {
  float lanes[kLanes];
  for (int part = 0; part < kParts; ++part) store_part(lanes + part * kPartLanes, x.parts[part]);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

// The lanes of a vector that a row fills: all, or the first few where a row ends. Types, so that
// whole vectors are compiled without masks.
struct AllLanes {};
struct FirstLanes {
  int count;
};

template <class Element>
TORCHEMBED_INLINE Floats load(const Element* source, AllLanes) {
  Floats x;
  for (int part = 0; part < kParts; ++part) x.parts[part] = load_part(source + part * kPartLanes);
  return x;
}

template <class Element>
TORCHEMBED_INLINE void store(Element* target, Floats x, AllLanes) {
  for (int part = 0; part < kParts; ++part) store_part(target + part * kPartLanes, x.parts[part]);
}

// Stores past the caches, where the instruction set can; target is aligned to 64 bytes.
TORCHEMBED_INLINE void stream(float* target, Floats x, AllLanes) {
  for (int part = 0; part < kParts; ++part) stream_part(target + part * kPartLanes, x.parts[part]);
}

template <class Element, class Lanes>
TORCHEMBED_INLINE void stream(Element* target, Floats x, Lanes lanes) {
  store(target, x, lanes);
}

// Streaming stores are weakly ordered: without a fence another thread could see that this one is
// done before it sees them.
TORCHEMBED_INLINE void end_streaming() {
#if TORCHEMBED_VECTOR_BYTES > 16
  _mm_sfence();
#endif
}

// Lanes past the count are zeros.
template <class Element>
TORCHEMBED_INLINE Floats load(const Element* source, FirstLanes lanes) {
  Floats x{};
  for (int part = 0; part < kParts; ++part) {
    const int count = lanes.count - part * kPartLanes;
    if (count >= kPartLanes) {
      x.parts[part] = load_part(source + part * kPartLanes);
    } else if (count > 0) {
      x.parts[part] = load_part(source + part * kPartLanes, count);
    }
  }
  return x;
}

template <class Element>
TORCHEMBED_INLINE void store(Element* target, Floats x, FirstLanes lanes) {
  for (int part = 0; part < kParts; ++part) {
    const int count = lanes.count - part * kPartLanes;
    if (count >= kPartLanes) {
      store_part(target + part * kPartLanes, x.parts[part]);
    } else if (count > 0) {
      store_part(target + part * kPartLanes, x.parts[part], count);
    }
  }
}

template <int kValue>
struct Count {
  static constexpr int value = kValue;
};

// Calls body(column, Count<number of vectors>, lanes) over blocks of a row, as wide as fit
// registers.
template <class Body>
TORCHEMBED_INLINE void for_each_block(int64_t dim, const Body& body) {
  int64_t column = 0;
  const auto take = [&](auto count) __attribute__((always_inline)) {
    if constexpr (count.value <= kMaxVectors) {
      for (; dim - column >= count.value * kLanes; column += count.value * kLanes) {
        body(column, count, AllLanes{});
      }
    }
  };
  take(Count<8>{});
  take(Count<4>{});
  take(Count<2>{});
  take(Count<1>{});
  if (column < dim) body(column, Count<1>{}, FirstLanes{(int)(dim - column)});
}

// Calls body(column, lanes) over the vectors of a row.
template <class Body>
TORCHEMBED_INLINE void for_each_vector(int64_t dim, const Body& body) {
  int64_t column = 0;
  for (; dim - column >= kLanes; column += kLanes) body(column, AllLanes{});
  if (column < dim) body(column, FirstLanes{(int)(dim - column)});
}

// Calls body with a null pointer to the element type that type names.
template <class Body>
TORCHEMBED_INLINE void with_element(FloatType type, const Body& body) {
  switch (type) {
    case FloatType::kFloat32:
      return body((float*)nullptr);
    case FloatType::kFloat16:
      return body((Half*)nullptr);
    case FloatType::kBFloat16:
      return body((BFloat16*)nullptr);
  }
}

}  // namespace torchembed::TORCHEMBED_ISA
