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

template <class Value>
const Value* values(const char* name, const std::optional<Tensor>& tensor) {
  if (!tensor) return nullptr;
  STD_TORCH_CHECK(tensor->is_contiguous(), name, " must be contiguous; call .contiguous()");
  return tensor->const_data_ptr<Value>();
}

struct Indices {
  const void* data = nullptr;
  bool wide = false;
};

Indices indices(const char* name, const std::optional<Tensor>& tensor) {
  if (!tensor) return {};
  const ScalarType type = tensor->scalar_type();
  STD_TORCH_CHECK(tensor->is_contiguous(), name, " must be contiguous; call .contiguous()");
  STD_TORCH_CHECK(type == ScalarType::Int || type == ScalarType::Long, name,
                  " must be int32 or int64, got ", torch::headeronly::toString(type));
  return {tensor->const_data_ptr(), type == ScalarType::Long};
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

// `stream` as in sort_rows. One state for each row is row-wise Adagrad's, one for each element
// Adagrad's.
void update_rows_on(const Tensor& weight, const Tensor& state, const Tensor& unique_rows,
                    const Tensor& starts, const Tensor& order, const Tensor& num_runs,
                    const Tensor& chunk_runs, const Tensor& grad,
                    std::optional<Tensor> gradient_rows, std::optional<Tensor> scales,
                    const Tensor& lr, std::optional<Tensor> grad_multiplier,
                    std::optional<Tensor> skip, double eps, double weight_decay,
                    double max_gradient, int64_t num_blocks, int64_t stream) {
  for (const Tensor* rows : {&weight, &grad}) {
    STD_TORCH_CHECK(rows->dim() == 2 && rows->size(1) == kUpdateDim && rows->is_contiguous(),
                    "weight and grad must be contiguous and have ", kUpdateDim, " columns");
  }
  const bool is_rowwise = state.numel() == weight.size(0);
  STD_TORCH_CHECK(state.is_contiguous() && (is_rowwise || state.numel() == weight.numel()),
                  "state must be contiguous and have ", weight.size(0), " or ", weight.numel(),
                  " elements, got ", state.numel());
  const Indices rows = indices("unique_rows", unique_rows);
  const Indices of_gradients = indices("gradient_rows", gradient_rows);
  const int64_t num_chunks = order.numel() / kRunChunk, num_groups = num_chunks / kRunChunk;
  STD_TORCH_CHECK(chunk_runs.numel() == num_chunks, "chunk_runs must hold ", num_chunks,
                  " elements (one for each ", kRunChunk, " ids), got ", chunk_runs.numel());
  const Tensor sums =
      torch::stable::new_empty(weight, {num_chunks + num_groups, kUpdateDim}, ScalarType::Float);
  const Tensor counts =
      torch::stable::new_empty(order, {1 + num_chunks + num_groups}, ScalarType::Int);
  RowUpdate update;
  update.weight = weight.mutable_data_ptr<float>();
  update.state = state.mutable_data_ptr<float>();
  update.unique_rows = rows.data;
  update.starts = values<int32_t>("starts", starts);
  update.order = values<int32_t>("order", order);
  update.num_runs = values<int32_t>("num_runs", num_runs);
  update.chunk_runs = values<int32_t>("chunk_runs", chunk_runs);
  update.grad = grad.const_data_ptr();
  update.gradient_rows = of_gradients.data;
  update.scales = values<float>("scales", scales);
  update.lr = values<float>("lr", lr);
  update.grad_multiplier = values<float>("grad_multiplier", grad_multiplier);
  update.skip = values<float>("skip", skip);
  update.chunk_sums = sums.mutable_data_ptr<float>();
  update.group_sums = update.chunk_sums + num_chunks * kUpdateDim;
  update.num_taken = counts.mutable_data_ptr<int32_t>();
  update.num_summed = update.num_taken + 1;
  update.num_grouped = update.num_summed + num_chunks;
  update.num_ids = static_cast<int>(order.numel());
  update.num_chunks = static_cast<int>(num_chunks);
  update.is_rowwise = is_rowwise;
  update.rows_are_wide = rows.wide;
  update.gradient_rows_are_wide = of_gradients.wide;
  update.eps = static_cast<float>(eps);
  update.weight_decay = static_cast<float>(weight_decay);
  update.max_gradient = static_cast<float>(max_gradient);
  update.num_blocks = static_cast<int>(num_blocks);
  const char* const error = update_rows(update, grad_type(grad.scalar_type()),
                                        weight.get_device_index(), reinterpret_cast<void*>(stream));
  STD_TORCH_CHECK(error == nullptr, "updating rows on the GPU failed: ", error);
}

STABLE_TORCH_LIBRARY_FRAGMENT(torchembed_native, library) {
  library.def(
      "update_rows(Tensor(a!) weight, Tensor(b!) state, Tensor unique_rows, Tensor starts,"
      " Tensor order, Tensor num_runs, Tensor chunk_runs, Tensor grad, Tensor? gradient_rows,"
      " Tensor? scales, Tensor lr, Tensor? grad_multiplier, Tensor? skip, float eps,"
      " float weight_decay, float max_gradient, int num_blocks, int stream) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(torchembed_native, CUDA, library) {
  library.impl("update_rows", TORCH_BOX(&update_rows_on));
}

}  // namespace
}  // namespace torchembed
