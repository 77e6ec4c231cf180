// Updates of rows of 128 columns, and the choice among all of them.

#include <cuda_runtime.h>

#include "update_kernel.cuh"
#include "update_rows.h"
#include "update_wide_rows.h"
#include "updates_by_width.h"

namespace torchembed {
namespace {

template <class Grad>
cudaError_t launch_rule(const RowUpdate& update, int device, cudaStream_t stream) {
  switch (update.rule) {
    case Rule::kSgd:
      return launch_update<float, Grad, 128, Rule::kSgd>(update, device, stream);
    case Rule::kAdagrad:
      return launch_update<float, Grad, 128, Rule::kAdagrad>(update, device, stream);
    case Rule::kRowwiseAdagrad:
      return launch_update<float, Grad, 128, Rule::kRowwiseAdagrad>(update, device, stream);
    case Rule::kAdam:
      break;
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch(const RowUpdate& update, int device, cudaStream_t stream) {
  // Counters start at zero. The memset is on the same stream, so it is captured with the kernel.
  const int32_t* const end_of_counts = update.num_grouped + update.num_chunks / kChunk;
  const size_t num_counts = end_of_counts - update.num_taken;
  const cudaError_t error =
      cudaMemsetAsync(update.num_taken, 0, num_counts * sizeof(int32_t), stream);
  if (error != cudaSuccess) return error;
  if (update.dim == 64) return launch_update_of_64_columns(update, device, stream);
  if (update.dim == 96) return launch_update_of_96_columns(update, device, stream);
  if (update.dim != 128) return launch_wide_update(update, device, stream);
  if (update.row_type != RowType::kFloat32) {
    return launch_update_of_128_columns_of_16_bits(update, device, stream);
  }
  switch (update.grad_type) {
    case RowType::kFloat32:
      return launch_rule<float>(update, device, stream);
    case RowType::kFloat16:
      return launch_rule<__half>(update, device, stream);
    case RowType::kBFloat16:
      return launch_rule<__nv_bfloat16>(update, device, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

const char* update_rows(const RowUpdate& update, int device, void* stream) {
  // The library links a CUDA runtime of its own, whose current device may not be torch's, which the
  // caller has set.
  int current = device;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess && current != device) error = cudaSetDevice(device);
  if (error == cudaSuccess) {
    error = launch(update, device, static_cast<cudaStream_t>(stream));
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace torchembed
