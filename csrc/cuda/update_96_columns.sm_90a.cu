// Updates of rows of 96 columns.

#include <cuda_runtime.h>

#include "narrow_kernel.cuh"
#include "updates_by_width.h"

namespace torchembed {

cudaError_t launch_update_of_96_columns(const RowUpdate& update, int device, cudaStream_t stream) {
  return launch_narrow_update<96>(update, device, stream);
}

}  // namespace torchembed
