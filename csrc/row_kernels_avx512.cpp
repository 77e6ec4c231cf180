// The row kernels for x86-64 with AVX-512, in vectors of 64 bytes.

#if defined(__x86_64__)

#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "random_bits.h"
#include "row_kernels.h"

// What stands above is shared with the other sets and must run on any processor. What stands below,
// templates included, is compiled for this one alone, in a namespace of its own.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c"))), \
                             apply_to = function)
#else
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in GCC's own intrinsics
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c")
#endif

#define TORCHEMBED_ISA avx512
#define TORCHEMBED_VECTOR_BYTES 64
#include "row_kernel_set.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
