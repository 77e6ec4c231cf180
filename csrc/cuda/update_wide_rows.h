// Updates of wide rows, which have a file of their own since they are compiled for fewer GPUs.

#pragma once

#include <cuda_runtime.h>

#include "update_rows.h"

namespace torchembed {

// Launches the update of rows of 256 or 512 columns; `update`'s counters are zero. Returns
// cudaErrorInvalidValue for a rule that has no kernel of that width.
cudaError_t launch_wide_update(const RowUpdate& update, int device, cudaStream_t stream);

}  // namespace torchembed
