// Updates of rows of 256 and 512 columns, by the rules for which they are faster than Triton's.
// Each width is as many kernels again, so they are compiled for one generation alone.

#include <cuda_runtime.h>

#include "stream_kernel.cuh"
#include "update_kernel.cuh"
#include "update_wide_rows.h"

namespace torchembed {
namespace {

template <class Grad>
cudaError_t launch_of(const RowUpdate& update, int device, cudaStream_t stream) {
  if (update.dim == 512 && update.rule == Rule::kRowwiseAdagrad) {
    return launch_update<float, Grad, 512, Rule::kRowwiseAdagrad>(update, device, stream);
  }
  if (update.dim != 256) return cudaErrorInvalidValue;
  switch (update.rule) {
    case Rule::kAdagrad:
      return launch_update<float, Grad, 256, Rule::kAdagrad>(update, device, stream);
    case Rule::kRowwiseAdagrad:
      return launch_update<float, Grad, 256, Rule::kRowwiseAdagrad>(update, device, stream);
    case Rule::kAdam:
      return launch_update<float, Grad, 256, Rule::kAdam>(update, device, stream);
    case Rule::kSgd:
      break;
  }
  return cudaErrorInvalidValue;
}

// Rows of 16 bits.
template <class Value, class Grad>
cudaError_t launch_16_bits(const RowUpdate& update, cudaStream_t stream) {
  if (update.rule == Rule::kRowwiseAdagrad && update.dim == 256) {
    return launch_stream<Value, Grad, 256, Rule::kRowwiseAdagrad, 4, 20>(update, stream);
  }
  if (update.rule == Rule::kRowwiseAdagrad && update.dim == 512) {
    return launch_stream<Value, Grad, 512, Rule::kRowwiseAdagrad, 4, 16>(update, stream);
  }
  if (update.rule == Rule::kAdagrad && update.dim == 256) {
    return launch_stream<Value, Grad, 256, Rule::kAdagrad, 4, 20>(update, stream);
  }
  return cudaErrorInvalidValue;
}

template <class Value>
cudaError_t launch_gradients(const RowUpdate& update, cudaStream_t stream) {
  switch (update.grad_type) {
    case RowType::kFloat32:
      return launch_16_bits<Value, float>(update, stream);
    case RowType::kBFloat16:
      return launch_16_bits<Value, __nv_bfloat16>(update, stream);
    case RowType::kFloat16:
      break;
  }
  return cudaErrorInvalidValue;
}

// Whether the update takes the whole GPU. With its few warps the stream kernel then is the faster
// one for float32 rows too, but the slower one where it must leave multiprocessors to others.
bool takes_all_multiprocessors(const RowUpdate& update, int device) {
  int count = 0;
  return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess &&
         update.num_blocks >= count;
}

cudaError_t launch_32_bits(const RowUpdate& update, int device, cudaStream_t stream) {
  switch (update.grad_type) {
    case RowType::kFloat32:
      if (update.dim == 256 && update.rule == Rule::kRowwiseAdagrad &&
          takes_all_multiprocessors(update, device)) {
        return launch_stream<float, float, 256, Rule::kRowwiseAdagrad, 8, 14>(update, stream);
      }
      return launch_of<float>(update, device, stream);
    case RowType::kFloat16:
      return launch_of<__half>(update, device, stream);
    case RowType::kBFloat16:
      return launch_of<__nv_bfloat16>(update, device, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_wide_update(const RowUpdate& update, int device, cudaStream_t stream) {
  if (update.row_type == RowType::kFloat32) return launch_32_bits(update, device, stream);
  return update.row_type == RowType::kFloat16 ? launch_gradients<__half>(update, stream)
                                              : launch_gradients<__nv_bfloat16>(update, stream);
}

}  // namespace torchembed
