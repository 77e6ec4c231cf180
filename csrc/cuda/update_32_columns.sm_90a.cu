// Updates of rows of 32 columns.

#include <cuda_runtime.h>

#include "narrow_kernel.cuh"
#include "update_narrow_rows.h"

namespace torchembed {

cudaError_t launch_update_of_32_columns(const RowUpdate& update, int device, cudaStream_t stream) {
  return launch_narrow_update<32>(update, device, stream);
}

}  // namespace torchembed
