// Updates of rows of 256 and 512 columns. Each width is as many kernels again, so they are compiled
// for one generation alone.

#include <cuda_runtime.h>

#include "update_kernel.cuh"
#include "update_wide_rows.h"

namespace torchembed {
namespace {

template <class Grad, int kDim>
cudaError_t launch_rule(const RowUpdate& update, int device, cudaStream_t stream) {
  switch (update.rule) {
    case Rule::kSgd:
      return launch_update<Grad, kDim, Rule::kSgd>(update, device, stream);
    case Rule::kAdagrad:
      return launch_update<Grad, kDim, Rule::kAdagrad>(update, device, stream);
    case Rule::kRowwiseAdagrad:
      return launch_update<Grad, kDim, Rule::kRowwiseAdagrad>(update, device, stream);
    case Rule::kAdam:
      return launch_update<Grad, kDim, Rule::kAdam>(update, device, stream);
  }
  return cudaErrorInvalidValue;
}

template <class Grad>
cudaError_t launch_dim(const RowUpdate& update, int device, cudaStream_t stream) {
  if (update.dim == 256) return launch_rule<Grad, 256>(update, device, stream);
  if (update.dim == 512) return launch_rule<Grad, 512>(update, device, stream);
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_wide_update(const RowUpdate& update, GradType grad_type, int device,
                               cudaStream_t stream) {
  switch (grad_type) {
    case GradType::kFloat32:
      return launch_dim<float>(update, device, stream);
    case GradType::kFloat16:
      return launch_dim<__half>(update, device, stream);
    case GradType::kBFloat16:
      return launch_dim<__nv_bfloat16>(update, device, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace torchembed
