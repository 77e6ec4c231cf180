// The row kernels for x86-64 with AVX2, in vectors of 32 bytes.

#if defined(__x86_64__)

#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "random_bits.h"
#include "row_kernels.h"

// What stands above is shared with the other sets and must run on any processor. What stands below,
// templates included, is compiled for this one alone, in a namespace of its own.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif

#define TORCHEMBED_ISA avx2
#define TORCHEMBED_VECTOR_BYTES 32
#include "row_kernel_set.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
