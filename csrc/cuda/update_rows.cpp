// The operation that updates rows on a GPU.

#include "update_rows.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

namespace torchembed {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check_contiguous(const char* name, const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous; call .contiguous()");
}

const float* floats(const char* name, const std::optional<Tensor>& tensor) {
  if (!tensor) return nullptr;
  check_contiguous(name, *tensor);
  return tensor->const_data_ptr<float>();
}

bool is_wide(const char* name, const Tensor& ids) {
  check_contiguous(name, ids);
  const ScalarType type = ids.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Int || type == ScalarType::Long, name,
                  " must be int32 or int64, got ", torch::headeronly::toString(type));
  return type == ScalarType::Long;
}

GradType grad_type(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return GradType::kFloat32;
    case ScalarType::Half:
      return GradType::kFloat16;
    case ScalarType::BFloat16:
      return GradType::kBFloat16;
    default:
      STD_TORCH_CHECK(false, "grad must be float32, float16 or bfloat16, got ",
                      torch::headeronly::toString(type));
  }
}

// `stream` as in sort_rows. What depends on sorted positions is in their order.
void update_rows_on(const Tensor& weight, std::optional<Tensor> state, const Tensor& unique_rows,
                    const Tensor& starts, const Tensor& num_runs, std::optional<Tensor> chunk_sums,
                    std::optional<Tensor> group_sums, const Tensor& grad,
                    const Tensor& gradient_rows, std::optional<Tensor> scales, const Tensor& lr,
                    std::optional<Tensor> grad_multiplier, std::optional<Tensor> skip,
                    int64_t optimizer, double eps, double weight_decay, double max_gradient,
                    int64_t stream) {
  check_contiguous("weight", weight);
  check_contiguous("grad", grad);
  const int64_t dim = weight.size(1), grad_bytes = dim * grad.element_size();
  STD_TORCH_CHECK(dim <= kMaxUpdateDim && dim % 4 == 0 && grad_bytes % 16 == 0,
                  "rows must be multiples of 16 bytes and have at most ", kMaxUpdateDim,
                  " columns, got ", dim);
  STD_TORCH_CHECK(grad.size(1) == dim, "grad must have ", dim, " columns, got ", grad.size(1));
  RowUpdate update;
  update.weight = weight.mutable_data_ptr<float>();
  update.state = state ? state->mutable_data_ptr<float>() : nullptr;
  update.rows_are_wide = is_wide("unique_rows", unique_rows);
  update.unique_rows = unique_rows.const_data_ptr();
  update.starts = starts.const_data_ptr<int32_t>();
  update.num_runs = num_runs.const_data_ptr<int32_t>();
  update.chunk_sums = floats("chunk_sums", chunk_sums);
  update.group_sums = floats("group_sums", group_sums);
  update.grad = grad.const_data_ptr();
  update.gradient_rows_are_wide = is_wide("gradient_rows", gradient_rows);
  update.gradient_rows = gradient_rows.const_data_ptr();
  update.scales = floats("scales", scales);
  update.lr = lr.const_data_ptr<float>();
  update.grad_multiplier = floats("grad_multiplier", grad_multiplier);
  update.skip = floats("skip", skip);
  update.num_ids = unique_rows.numel();
  update.dim = static_cast<int>(dim);
  update.eps = static_cast<float>(eps);
  update.weight_decay = static_cast<float>(weight_decay);
  update.max_gradient = static_cast<float>(max_gradient);
  const char* const error = update_rows(update, grad_type(grad.scalar_type()), optimizer,
                                        weight.get_device_index(), reinterpret_cast<void*>(stream));
  STD_TORCH_CHECK(error == nullptr, "updating rows on the GPU failed: ", error);
}

STABLE_TORCH_LIBRARY_FRAGMENT(torchembed_native, library) {
  library.def(
      "update_rows(Tensor(a!) weight, Tensor(b!)? state, Tensor unique_rows, Tensor starts,"
      " Tensor num_runs, Tensor? chunk_sums, Tensor? group_sums, Tensor grad,"
      " Tensor gradient_rows, Tensor? scales, Tensor lr, Tensor? grad_multiplier, Tensor? skip,"
      " int optimizer, float eps, float weight_decay, float max_gradient, int stream) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(torchembed_native, CUDA, library) {
  library.impl("update_rows", TORCH_BOX(&update_rows_on));
}

}  // namespace
}  // namespace torchembed
