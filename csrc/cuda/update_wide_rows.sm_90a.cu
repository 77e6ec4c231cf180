// Updates of rows of 256 and 512 columns, by the rules for which they are faster than Triton's.
// Each width is as many kernels again, so they are compiled for one generation alone.

#include <cuda_runtime.h>

#include "update_kernel.cuh"
#include "update_wide_rows.h"

namespace torchembed {
namespace {

template <class Grad>
cudaError_t launch_of(const RowUpdate& update, int device, cudaStream_t stream) {
  if (update.dim == 512 && update.rule == Rule::kRowwiseAdagrad) {
    return launch_update<Grad, 512, Rule::kRowwiseAdagrad>(update, device, stream);
  }
  if (update.dim != 256) return cudaErrorInvalidValue;
  switch (update.rule) {
    case Rule::kAdagrad:
      return launch_update<Grad, 256, Rule::kAdagrad>(update, device, stream);
    case Rule::kRowwiseAdagrad:
      return launch_update<Grad, 256, Rule::kRowwiseAdagrad>(update, device, stream);
    case Rule::kAdam:
      return launch_update<Grad, 256, Rule::kAdam>(update, device, stream);
    case Rule::kSgd:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_wide_update(const RowUpdate& update, GradType grad_type, int device,
                               cudaStream_t stream) {
  switch (grad_type) {
    case GradType::kFloat32:
      return launch_of<float>(update, device, stream);
    case GradType::kFloat16:
      return launch_of<__half>(update, device, stream);
    case GradType::kBFloat16:
      return launch_of<__nv_bfloat16>(update, device, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace torchembed
