// The operation that sorts a batch's rows on a GPU.

#include "sort_rows.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

namespace torchembed {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// `stream` is the address of the caller's CUDA stream. Python passes it, since the library could
// ask for the current stream only by linking torch's CUDA libraries, which a torch for CPUs lacks.
std::tuple<Tensor, Tensor> sort_rows_on(const Tensor& rows, int64_t num_rows,
                                        std::optional<Tensor> count, int64_t stream) {
  const ScalarType type = rows.scalar_type();
  const int64_t num_ids = rows.numel();
  STD_TORCH_CHECK(type == ScalarType::Int || type == ScalarType::Long,
                  "rows must be int32 or int64, got ", torch::headeronly::toString(type));
  STD_TORCH_CHECK(rows.is_contiguous(), "rows must be contiguous; call .contiguous()");
  STD_TORCH_CHECK(num_ids > 0 && num_ids < (int64_t{1} << 31),
                  "rows must hold between 1 and 2**31 - 1 ids, got ", num_ids);
  STD_TORCH_CHECK(num_rows >= 0 && num_rows < (int64_t{1} << 31),
                  "num_rows must be less than 2**31, got ", num_rows);
  const int64_t* num_used = nullptr;
  if (count) {
    STD_TORCH_CHECK(
        count->scalar_type() == ScalarType::Long && count->numel() == 1 && count->is_cuda(),
        "count must be one int64 on the GPU");
    num_used = count->const_data_ptr<int64_t>();
  }
  const Tensor sorted_rows = torch::stable::new_empty(rows, {num_ids}, ScalarType::Int);
  const Tensor order = torch::stable::new_empty(rows, {num_ids}, ScalarType::Int);
  // Torch's allocator may give this memory away again as soon as the tensor is gone, though kernels
  // still run: whatever uses it next on this stream comes after them.
  const Tensor scratch =
      torch::stable::new_empty(rows, {sort_scratch_size(num_ids)}, ScalarType::Int);
  const char* const error =
      sort_rows(rows.const_data_ptr(), type == ScalarType::Long, num_ids, num_used, num_rows,
                sorted_rows.mutable_data_ptr<int32_t>(), order.mutable_data_ptr<int32_t>(),
                scratch.mutable_data_ptr<int32_t>(), rows.get_device_index(),
                reinterpret_cast<void*>(stream));
  STD_TORCH_CHECK(error == nullptr, "sorting rows on the GPU failed: ", error);
  return {sorted_rows, order};
}

STABLE_TORCH_LIBRARY_FRAGMENT(torchembed_native, library) {
  library.def(
      "sort_rows(Tensor rows, int num_rows, Tensor? count, int stream) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(torchembed_native, CUDA, library) {
  library.impl("sort_rows", TORCH_BOX(&sort_rows_on));
}

}  // namespace
}  // namespace torchembed
