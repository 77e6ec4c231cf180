// The operation that sums the gradients of each row of a batch and updates the row, in one pass.

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "contents.h"
#include "row_kernels.h"
#include "run_chunks.h"
#include "tensors.h"
#include "threads.h"

namespace torchembed {
namespace {

// The cost of a run in addition to that of its gradients, in gradients: its row and state are read
// and written.
constexpr int64_t kRunCost = 4;

// Runs summed before their rows are updated, so that the sums are still in cache.
constexpr int64_t kRunsAtOnce = 32;

// The gradients of runs, and the arrays by which they are found in the batch.
struct RunGradients {
  RowMatrix grad;
  const int32_t* starts;
  const int32_t* order;
  int64_t num_ids;
  IdArray gradient_rows;  // or none: position p has gradient row p
  const float* scales;    // or null: all ones
};

// Sums the gradients of a few runs at a time.
class RunSummer {
 public:
  explicit RunSummer(const RunGradients& gradients)
      : gradients_(gradients), sums_(kRunsAtOnce * gradients.grad.dim) {}

  // The sums of runs [first, last), at most kRunsAtOnce of them: dim floats each.
  const float* sum(const RowKernels& kernels, int64_t first, int64_t last) {
    const int64_t num_runs = last - first, begin = gradients_.starts[first];
    // The first gradients of the next runs are gathered too, so that the kernel can prefetch them.
    const int64_t end = std::min<int64_t>(gradients_.starts[last] + kRowsAhead, gradients_.num_ids);
    gather(begin, end);
    int32_t offsets[kRunsAtOnce + 1];
    for (int64_t run = 0; run <= num_runs; ++run) {
      offsets[run] = gradients_.starts[first + run] - (int32_t)begin;
    }
    // A run is a bag of gradients, so the kernel of pooled lookups sums it, with the same bits.
    PooledLookup op{};
    op.matrix = gradients_.grad;
    op.rows = IdArray(rows_.data());
    op.num_ids = end - begin;
    op.scales = gradients_.scales ? scales_.data() : nullptr;
    op.bags = {1, num_runs, IdArray(offsets), nullptr, nullptr};
    op.out = {sums_.data(), FloatType::kFloat32, num_runs, gradients_.grad.dim};
    kernels.pooled_lookup(op, 0, num_runs);
    return sums_.data();
  }

 private:
  // Copies the gradient rows and scales of sorted positions [begin, end) into contiguous arrays.
  void gather(int64_t begin, int64_t end) {
    const int32_t* const positions = gradients_.order + begin;
    const int64_t count = end - begin;
    if ((int64_t)rows_.size() < count) rows_.resize(count);
    for (int64_t index = 0; index < count; ++index) {
      const int64_t position = positions[index];
      rows_[index] = gradients_.gradient_rows ? gradients_.gradient_rows[position] : position;
    }
    if (gradients_.scales == nullptr) return;
    if ((int64_t)scales_.size() < count) scales_.resize(count);
    for (int64_t index = 0; index < count; ++index) {
      scales_[index] = gradients_.scales[positions[index]];
    }
  }

  const RunGradients gradients_;
  std::vector<float> sums_;
  std::vector<int64_t> rows_;
  std::vector<float> scales_;
};

float scalar(const char* name, const Tensor& tensor) { return *const_data<float>(name, tensor, 1); }

float* state_data(const char* name, const std::optional<Tensor>& state, int64_t numel) {
  STD_TORCH_CHECK(state.has_value(), name, " must be given for this optimizer");
  return mutable_data<float>(name, *state, numel);
}

RoundingKeys rounding_keys(const Tensor& row_offsets, const Tensor& row_keys,
                           const std::optional<Tensor>& first_columns, int64_t num_rows,
                           float step) {
  RoundingKeys keys;
  keys.num_tables = row_keys.numel();
  keys.row_offsets = const_data<int64_t>("row_offsets", row_offsets, keys.num_tables + 1);
  keys.row_keys = const_data<int64_t>("row_keys", row_keys, keys.num_tables);
  keys.first_columns = first_columns
                           ? const_data<int64_t>("first_columns", *first_columns, keys.num_tables)
                           : nullptr;
  keys.step = (uint64_t)(int64_t)step;
  STD_TORCH_CHECK(keys.num_tables > 0 && keys.row_offsets[keys.num_tables] >= num_rows,
                  "row_offsets must cover the ", num_rows, " rows of weight");
  return keys;
}

constexpr char kTakeFromFindRuns[] = "take the runs from find_runs";

// Checks what the kernels rely on: that the runs are those of the rows of weight. Rows must be
// distinct, since threads update them concurrently.
void check_runs(const RunGradients& gradients, const RowUpdates& op) {
  const char* const advice = kTakeFromFindRuns;
  const int64_t num_ids = gradients.num_ids, num_runs = op.num_rows;
  check_in_range("starts", gradients.starts, num_runs + 1, 0, num_ids + 1, advice);
  check_ascending("starts", gradients.starts, num_runs + 1, false, advice);
  check_in_range("order", gradients.order, num_ids, 0, num_ids, advice);
  check_in_range("unique_rows", op.rows, num_runs, 0, op.weight.num_rows, advice);
  check_ascending("unique_rows", op.rows, num_runs, true, advice);
  if (!gradients.gradient_rows) return;
  check_in_range("gradient_rows", gradients.gradient_rows, num_ids, 0, gradients.grad.num_rows,
                 "they are rows of grad");
}

void rowwise_update(const Tensor& weight, std::optional<Tensor> state0,
                    std::optional<Tensor> state1, const Tensor& unique_rows, const Tensor& starts,
                    const Tensor& order, const Tensor& num_runs, const Tensor& chunk_runs,
                    const Tensor& grad, std::optional<Tensor> gradient_rows,
                    std::optional<Tensor> scales, const Tensor& lr, std::optional<Tensor> step,
                    std::optional<Tensor> grad_multiplier, std::optional<Tensor> skip,
                    std::optional<Tensor> row_offsets, std::optional<Tensor> row_keys,
                    std::optional<Tensor> first_columns, int64_t optimizer, double eps,
                    double beta1, double beta2, double weight_decay, double max_gradient) {
  const int64_t num_ids = order.numel();
  if (num_ids == 0 || weight.numel() == 0 || grad.numel() == 0) return;
  if (skip && scalar("skip", *skip) != 0) return;

  RunGradients gradients;
  gradients.grad = row_matrix("grad", grad);
  gradients.starts = const_data<int32_t>("starts", starts, num_ids + 1);
  gradients.order = const_data<int32_t>("order", order, num_ids);
  gradients.num_ids = num_ids;
  if (gradient_rows) gradients.gradient_rows = id_array("gradient_rows", *gradient_rows, num_ids);
  gradients.scales = scales ? const_data<float>("scales", *scales, num_ids) : nullptr;

  RowUpdates op{};
  op.weight = mutable_row_matrix("weight", weight);
  op.rows = id_array("unique_rows", unique_rows, num_ids);
  op.num_rows = *const_data<int32_t>("num_runs", num_runs, 1);
  STD_TORCH_CHECK(gradients.grad.dim == op.weight.dim, "grad must have ", op.weight.dim,
                  " columns, got ", gradients.grad.dim);
  check_in_range("num_runs", &op.num_rows, 1, 0, num_ids + 1, kTakeFromFindRuns);
  check_numel("chunk_runs", chunk_runs, num_ids / kRunChunk);
  STD_TORCH_CHECK(gradients.gradient_rows || gradients.grad.num_rows == num_ids, "grad must have ",
                  num_ids, " rows (one for each id), got ", gradients.grad.num_rows);
  if (checks_contents()) check_runs(gradients, op);

  UpdateRule& rule = op.rule;
  rule.optimizer = (Optimizer)optimizer;
  rule.lr = scalar("lr", lr);
  rule.grad_multiplier = grad_multiplier ? scalar("grad_multiplier", *grad_multiplier) : 1.0f;
  rule.max_gradient = (float)max_gradient;
  rule.weight_decay = (float)weight_decay;
  rule.eps = (float)eps;
  rule.one_minus_beta1 = (float)(1 - beta1);
  rule.one_minus_beta2 = (float)(1 - beta2);
  const float step_count = step ? scalar("step", *step) : 0.0f;
  switch (rule.optimizer) {
    case Optimizer::kSgd:
      break;
    case Optimizer::kAdagrad:
      op.state0 = state_data("state0", state0, weight.numel());
      break;
    case Optimizer::kRowwiseAdagrad:
      op.state0 = state_data("state0", state0, op.weight.num_rows);
      break;
    case Optimizer::kAdam: {
      STD_TORCH_CHECK(step.has_value(), "step must be given for Adam");
      op.state0 = state_data("state0", state0, weight.numel());
      op.state1 = state_data("state1", state1, weight.numel());
      // In float64: of the first steps 1 - beta2 ** step would have few correct digits in float32.
      const double correction1 = 1 - std::pow(beta1, step_count);
      const double correction2 = 1 - std::pow(beta2, step_count);
      rule.adam_step_size = (float)(rule.lr * std::sqrt(correction2) / correction1);
      break;
    }
    default:
      STD_TORCH_CHECK(false, "optimizer must be a value of OptimizerKind, got ", optimizer);
  }
  if (row_keys) {
    STD_TORCH_CHECK(row_offsets.has_value() && step.has_value(),
                    "row_offsets and step must be given for stochastic rounding");
    op.rounding =
        rounding_keys(*row_offsets, *row_keys, first_columns, op.weight.num_rows, step_count);
  }

  const RowKernels& kernels = row_kernels();
  const auto cost_before = [&](int64_t run) { return gradients.starts[run] + kRunCost * run; };
  for_equal_costs(op.num_rows, grain_rows(op.weight.dim), cost_before,
                  [&](int64_t begin, int64_t end) {
                    RunSummer summer(gradients);
                    for (int64_t first = begin; first < end; first += kRunsAtOnce) {
                      const int64_t last = std::min(first + kRunsAtOnce, end);
                      const float* const sums = summer.sum(kernels, first, last);
                      kernels.update_rows(op, first, last, sums);
                    }
                  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(torchembed_native, library) {
  library.def(
      "rowwise_update(Tensor(a!) weight, Tensor(b!)? state0, Tensor(c!)? state1,"
      " Tensor unique_rows, Tensor starts, Tensor order, Tensor num_runs, Tensor chunk_runs,"
      " Tensor grad, Tensor? gradient_rows, Tensor? scales,"
      " Tensor lr, Tensor? step, Tensor? grad_multiplier, Tensor? skip,"
      " Tensor? row_offsets, Tensor? row_keys, Tensor? first_columns,"
      " int optimizer, float eps, float beta1, float beta2, float weight_decay,"
      " float max_gradient) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(torchembed_native, CPU, library) {
  library.impl("rowwise_update", TORCH_BOX(&rowwise_update));
}

}  // namespace
}  // namespace torchembed
