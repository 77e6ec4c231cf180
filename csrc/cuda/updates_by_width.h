// Updates of rows of one width. Each has a file of its own, so that they are compiled side by side,
// and like wide rows for fewer GPUs.

#pragma once

#include <cuda_runtime.h>

#include "update_rows.h"

namespace torchembed {

// Launch the update of float32 rows of so many columns; `update`'s counters are zero. They return
// cudaErrorInvalidValue for a rule that has no kernel of that width.
cudaError_t launch_update_of_64_columns(const RowUpdate& update, int device, cudaStream_t stream);
cudaError_t launch_update_of_96_columns(const RowUpdate& update, int device, cudaStream_t stream);

// The same of rows of 16 bits, with gradients of float32 or bfloat16.
cudaError_t launch_update_of_128_columns_of_16_bits(const RowUpdate& update, int device,
                                                    cudaStream_t stream);

}  // namespace torchembed
