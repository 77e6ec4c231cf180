// The row kernels for any processor, in vectors of 16 bytes.

#include <torch/headeronly/util/Half.h>

#include <cmath>
#include <cstring>

#include "random_bits.h"
#include "row_kernels.h"

#define TORCHEMBED_ISA portable
#define TORCHEMBED_VECTOR_BYTES 16
#include "row_kernel_set.h"
