// One set of row kernels, in namespace torchembed::TORCHEMBED_ISA; included once for each set. The
// namespace matters: were inline functions of two sets of the same name, the linker would keep one
// of them, and a processor could get instructions that it lacks.

#pragma once

#include "lookup_kernels.h"
#include "row_kernels.h"
#include "update_kernels.h"

#define TORCHEMBED_QUOTE_EXPANDED(name) #name
#define TORCHEMBED_QUOTE(name) TORCHEMBED_QUOTE_EXPANDED(name)

namespace torchembed::TORCHEMBED_ISA {

extern const RowKernels kRowKernels;
const RowKernels kRowKernels = {
    TORCHEMBED_QUOTE(TORCHEMBED_ISA),
    pooled_lookup,
    pooled_weights_backward,
    sequence_lookup,
    update_rows,
};

}  // namespace torchembed::TORCHEMBED_ISA
