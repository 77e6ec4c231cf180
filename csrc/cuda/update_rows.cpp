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

// Checks that `tensor` holds numel elements, contiguously and on the device of `weight`.
void check_memory(const char* name, const Tensor& tensor, const Tensor& weight, int64_t numel) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == weight.get_device_index(), name,
                  " must be on the device of weight; call .to(weight.device)");
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous; call .contiguous()");
  STD_TORCH_CHECK(tensor.numel() == numel, name, " must hold ", numel, " elements, got ",
                  tensor.numel());
}

template <class Value>
const Value* values(const char* name, const std::optional<Tensor>& tensor, const Tensor& weight,
                    int64_t numel) {
  if (!tensor) return nullptr;
  check_memory(name, *tensor, weight, numel);
  return tensor->const_data_ptr<Value>();
}

struct Indices {
  const void* data = nullptr;
  bool wide = false;
};

Indices indices(const char* name, const std::optional<Tensor>& tensor, const Tensor& weight,
                int64_t numel) {
  if (!tensor) return {};
  check_memory(name, *tensor, weight, numel);
  const ScalarType type = tensor->scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Int || type == ScalarType::Long, name,
                  " must be int32 or int64, got ", torch::headeronly::toString(type));
  return {tensor->const_data_ptr(), type == ScalarType::Long};
}

RowType row_type(const char* name, const Tensor& rows) {
  switch (rows.scalar_type()) {
    case ScalarType::Float:
      return RowType::kFloat32;
    case ScalarType::Half:
      return RowType::kFloat16;
    case ScalarType::BFloat16:
      return RowType::kBFloat16;
    default:
      STD_TORCH_CHECK(false, name, " must be float32, float16 or bfloat16, got ",
                      torch::headeronly::toString(rows.scalar_type()));
  }
}

// Numbers of states that each optimizer has, and whether they are rows.
struct States {
  int64_t count;
  bool are_rows;
};

States states_of(int64_t optimizer) {
  switch (static_cast<Rule>(optimizer)) {
    case Rule::kSgd:
      return {0, true};
    case Rule::kAdagrad:
      return {1, true};
    case Rule::kRowwiseAdagrad:
      return {1, false};
    case Rule::kAdam:
      return {2, true};
  }
  STD_TORCH_CHECK(false, "optimizer must be a value of OptimizerKind, got ", optimizer);
}

float* state_data(const char* name, const std::optional<Tensor>& state, const Tensor& weight,
                  bool is_needed, bool are_rows) {
  STD_TORCH_CHECK(state.has_value() == is_needed, name,
                  is_needed ? " must be given" : " must be None", " for this optimizer");
  if (!is_needed) return nullptr;
  check_memory(name, *state, weight, are_rows ? weight.numel() : weight.size(0));
  return state->mutable_data_ptr<float>();
}

// `stream` is as in sort_rows. For Adam `lr` is the corrected step size.
void update_rows_on(const Tensor& weight, std::optional<Tensor> state0,
                    std::optional<Tensor> state1, const Tensor& unique_rows, const Tensor& starts,
                    const Tensor& order, const Tensor& num_runs, const Tensor& chunk_runs,
                    const Tensor& grad, std::optional<Tensor> gradient_rows,
                    std::optional<Tensor> scales, const Tensor& lr, std::optional<Tensor> step,
                    std::optional<Tensor> grad_multiplier, std::optional<Tensor> skip,
                    std::optional<Tensor> row_offsets, std::optional<Tensor> row_keys,
                    std::optional<Tensor> first_columns, int64_t optimizer, double eps,
                    double one_minus_beta1, double one_minus_beta2, double weight_decay,
                    double max_gradient, int64_t num_blocks, int64_t stream) {
  const int64_t dim = weight.dim() == 2 ? weight.size(1) : 0;
  RowUpdate update;
  update.row_type = row_type("weight", weight);
  update.grad_type = row_type("grad", grad);
  for (const Tensor* rows : {&weight, &grad}) {
    STD_TORCH_CHECK(
        rows->dim() == 2 && has_update_of(dim, update.row_type) && rows->size(1) == dim &&
            rows->is_contiguous(),
        "weight and grad must be contiguous and both have 128, 256 or 512 columns, or 64 "
        "or 96 where weight is float32");
  }
  const States states = states_of(optimizer);
  check_memory("grad", grad, weight, grad.numel());
  const int64_t num_ids = order.numel();
  STD_TORCH_CHECK(num_ids < (int64_t{1} << 31), "order must hold fewer than 2**31 ids, got ",
                  num_ids);
  STD_TORCH_CHECK(weight.size(0) < (int64_t{1} << 31) && grad.size(0) < (int64_t{1} << 31),
                  "weight and grad must have fewer than 2**31 rows, got ", weight.size(0), " and ",
                  grad.size(0));
  STD_TORCH_CHECK(gradient_rows || grad.size(0) == num_ids, "grad must have ", num_ids,
                  " rows (one for each id), got ", grad.size(0));
  STD_TORCH_CHECK(num_blocks > 0 && num_blocks < (int64_t{1} << 31),
                  "num_blocks must lie in [1, 2**31), got ", num_blocks);
  const Indices rows = indices("unique_rows", unique_rows, weight, num_ids);
  const Indices of_gradients = indices("gradient_rows", gradient_rows, weight, num_ids);
  const int64_t num_chunks = num_ids / kRunChunk, num_groups = num_chunks / kRunChunk;
  STD_TORCH_CHECK(chunk_runs.numel() == num_chunks, "chunk_runs must hold ", num_chunks,
                  " elements (one for each ", kRunChunk, " ids), got ", chunk_runs.numel());
  // Scratch memory for the largest number of chunks that the ids can have: how many they have is
  // known on the GPU alone, and the host does not wait for it.
  const Tensor sums =
      torch::stable::new_empty(weight, {num_chunks + num_groups, dim}, ScalarType::Float);
  const Tensor counts =
      torch::stable::new_empty(order, {1 + num_chunks + num_groups}, ScalarType::Int);
  update.dim = static_cast<int>(dim);
  update.rule = static_cast<Rule>(optimizer);
  update.weight = weight.mutable_data_ptr();
  update.state0 = state_data("state0", state0, weight, states.count > 0, states.are_rows);
  update.state1 = state_data("state1", state1, weight, states.count > 1, states.are_rows);
  update.unique_rows = rows.data;
  update.starts = values<int32_t>("starts", starts, weight, num_ids + 1);
  update.order = values<int32_t>("order", order, weight, num_ids);
  update.num_runs = values<int32_t>("num_runs", num_runs, weight, 1);
  update.chunk_runs = values<int32_t>("chunk_runs", chunk_runs, weight, num_chunks);
  update.grad = grad.const_data_ptr();
  update.gradient_rows = of_gradients.data;
  update.scales = values<float>("scales", scales, weight, num_ids);
  update.lr = values<float>("lr", lr, weight, 1);
  update.grad_multiplier = values<float>("grad_multiplier", grad_multiplier, weight, 1);
  update.skip = values<float>("skip", skip, weight, 1);
  update.chunk_sums = sums.mutable_data_ptr<float>();
  update.group_sums = update.chunk_sums + num_chunks * dim;
  update.num_taken = counts.mutable_data_ptr<int32_t>();
  update.num_summed = update.num_taken + 1;
  update.num_grouped = update.num_summed + num_chunks;
  update.num_ids = static_cast<int>(num_ids);
  update.num_chunks = static_cast<int>(num_chunks);
  update.rows_are_wide = rows.wide;
  update.gradient_rows_are_wide = of_gradients.wide;
  update.eps = static_cast<float>(eps);
  update.one_minus_beta1 = static_cast<float>(one_minus_beta1);
  update.one_minus_beta2 = static_cast<float>(one_minus_beta2);
  update.weight_decay = static_cast<float>(weight_decay);
  update.max_gradient = static_cast<float>(max_gradient);
  update.num_blocks = static_cast<int>(num_blocks);
  const bool is_random = row_keys.has_value();
  STD_TORCH_CHECK(is_random == row_offsets.has_value() && (is_random || !first_columns) &&
                      (step.has_value() || !is_random),
                  "row_offsets, row_keys and step must be given together, and first_columns only "
                  "with them");
  const int64_t num_tables = is_random ? row_keys->numel() : 0;
  STD_TORCH_CHECK(!is_random || num_tables > 0, "row_keys must not be empty");
  update.row_offsets = values<int64_t>("row_offsets", row_offsets, weight, num_tables + 1);
  update.row_keys = values<int64_t>("row_keys", row_keys, weight, num_tables);
  update.first_columns = values<int64_t>("first_columns", first_columns, weight, num_tables);
  update.step = values<float>("step", step, weight, 1);
  update.num_tables = static_cast<int>(num_tables);
  const char* const error =
      update_rows(update, weight.get_device_index(), reinterpret_cast<void*>(stream));
  STD_TORCH_CHECK(error == nullptr, "updating rows on the GPU failed: ", error);
}

STABLE_TORCH_LIBRARY_FRAGMENT(torchembed_native, library) {
  library.def(
      "update_rows(Tensor(a!) weight, Tensor(b!)? state0, Tensor(c!)? state1, Tensor unique_rows,"
      " Tensor starts, Tensor order, Tensor num_runs, Tensor chunk_runs, Tensor grad, Tensor? "
      "gradient_rows,"
      " Tensor? scales, Tensor lr, Tensor? step, Tensor? grad_multiplier, Tensor? skip,"
      " Tensor? row_offsets, Tensor? row_keys, Tensor? first_columns, int optimizer,"
      " float eps, float one_minus_beta1, float one_minus_beta2, float weight_decay, float "
      "max_gradient, int num_blocks, int stream) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(torchembed_native, CUDA, library) {
  library.impl("update_rows", TORCH_BOX(&update_rows_on));
}

}  // namespace
}  // namespace torchembed
