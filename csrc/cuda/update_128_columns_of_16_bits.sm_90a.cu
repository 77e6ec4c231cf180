// Updates of rows of 128 columns of 16 bits.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "update_kernel.cuh"
#include "updates_by_width.h"

namespace torchembed {
namespace {

template <class Value, class Grad>
cudaError_t launch_rule(const RowUpdate& update, int device, cudaStream_t stream) {
  switch (update.rule) {
    case Rule::kSgd:
      return launch_update<Value, Grad, 128, Rule::kSgd>(update, device, stream);
    case Rule::kAdagrad:
      return launch_update<Value, Grad, 128, Rule::kAdagrad>(update, device, stream);
    case Rule::kRowwiseAdagrad:
      return launch_update<Value, Grad, 128, Rule::kRowwiseAdagrad>(update, device, stream);
    case Rule::kAdam:
      break;
  }
  return cudaErrorInvalidValue;
}

template <class Value>
cudaError_t launch_gradients(const RowUpdate& update, int device, cudaStream_t stream) {
  switch (update.grad_type) {
    case RowType::kFloat32:
      return launch_rule<Value, float>(update, device, stream);
    case RowType::kBFloat16:
      return launch_rule<Value, __nv_bfloat16>(update, device, stream);
    case RowType::kFloat16:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_update_of_128_columns_of_16_bits(const RowUpdate& update, int device,
                                                    cudaStream_t stream) {
  return update.row_type == RowType::kFloat16
             ? launch_gradients<__half>(update, device, stream)
             : launch_gradients<__nv_bfloat16>(update, device, stream);
}

}  // namespace torchembed
