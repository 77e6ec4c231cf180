// The operations that pool the rows of each bag into one vector, and their gradients.

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "bags.h"
#include "row_kernels.h"
#include "tensors.h"
#include "threads.h"

namespace torchembed {
namespace {

constexpr int64_t kGrainIds = 16384;

// Output of more bytes than this is evicted from the caches before it is read, so it is written by
// streaming stores, which need not read the lines first and leave the caches to rows.
constexpr int64_t kStreamBytes = 16 << 20;

std::optional<Tensor> as_float32(const std::optional<Tensor>& tensor) {
  if (!tensor || tensor->scalar_type() == ScalarType::Float) return tensor;
  return torch::stable::to(*tensor, ScalarType::Float);
}

// Calls body(first_bag, last_bag) in threads. The cost of a bag is that of its ids and one more,
// for the vector that is written, so that many empty bags are divided among threads too.
template <class Body>
void for_each_bag(const BagLayout& layout, int64_t grain, const Body& body) {
  const auto cost_before = [&](int64_t bag) { return layout.begin(bag) + bag; };
  for_equal_costs(layout.num_bags(), grain, cost_before, body);
}

// Likewise where only ids get a result: empty bags, which may be any number, then cost no time.
template <class Body>
void for_each_bag_of_ids(const BagLayout& layout, int64_t grain, const Body& body) {
  if (layout.num_bag_ids() > 0) for_each_bag(layout, grain, body);
}

Tensor pooled_lookup_forward(const Tensor& weight, const Tensor& rows,
                             std::optional<Tensor> offsets, std::vector<int64_t> hotness,
                             std::optional<Tensor> per_id_weights, int64_t num_features,
                             int64_t batch_size, bool mean, ScalarType output_dtype) {
  const int64_t num_ids = rows.numel();
  const BagLayout layout(offsets, hotness, num_features, batch_size, num_ids);
  const std::optional<Tensor> scales = as_float32(per_id_weights);
  PooledLookup op{};
  op.matrix = row_matrix("weight", weight);
  op.rows = id_array("rows", rows, num_ids);
  op.num_ids = num_ids;
  op.bags = layout.bags();
  op.scales = scales ? const_data<float>("per_id_weights", *scales, num_ids) : nullptr;
  op.mean = mean;
  const Tensor out =
      torch::stable::new_empty(weight, {batch_size, num_features, op.matrix.dim}, output_dtype);
  op.out = mutable_row_matrix("out", out);
  if (out.numel() == 0) return out;
  const int64_t row_bytes = op.out.dim * bytes_of(op.out.type);
  // Streaming stores need aligned addresses, and whole cache lines: a partly written line would be
  // read from memory after all.
  op.stream_out = op.out.num_rows * row_bytes > kStreamBytes && row_bytes % 64 == 0 &&
                  reinterpret_cast<uintptr_t>(op.out.data) % 64 == 0;

  const RowKernels& kernels = row_kernels();
  for_each_bag(layout, grain_rows(op.matrix.dim),
               [&](int64_t begin, int64_t end) { kernels.pooled_lookup(op, begin, end); });
  return out;
}

std::tuple<Tensor, Tensor> pooled_lookup_gradient_map(
    const Tensor& ids_like, std::optional<Tensor> offsets, std::vector<int64_t> hotness,
    std::optional<Tensor> per_id_weights, int64_t num_features, int64_t batch_size, bool mean) {
  const int64_t num_ids = ids_like.numel();
  const BagLayout layout(offsets, hotness, num_features, batch_size, num_ids);
  const std::optional<Tensor> weights = as_float32(per_id_weights);
  const float* const factors =
      weights ? const_data<float>("per_id_weights", *weights, num_ids) : nullptr;
  const int64_t num_scales = mean || factors ? num_ids : 0;
  const Tensor gradient_rows = torch::stable::new_empty(ids_like, {num_ids}, ScalarType::Int);
  const Tensor scales = torch::stable::new_empty(ids_like, {num_scales}, ScalarType::Float);
  int32_t* const gradient_row_of = gradient_rows.mutable_data_ptr<int32_t>();
  float* const scale_of = scales.mutable_data_ptr<float>();

  // Padding ids get gradient row 0, which exists; their rows are -1, so that it is added nowhere.
  const int64_t num_bag_ids = layout.num_bag_ids();
  std::fill(gradient_row_of + num_bag_ids, gradient_row_of + num_ids, 0);
  for (int64_t position = num_bag_ids; position < num_scales; ++position) {
    scale_of[position] = factors ? factors[position] : 1.0f;
  }
  const Bags bags = layout.bags();
  for_each_bag_of_ids(layout, kGrainIds, [&](int64_t first_bag, int64_t last_bag) {
    int64_t feature = first_bag / batch_size, sample = first_bag % batch_size;
    int64_t begin = bags.begin(feature, sample);
    for (int64_t bag = first_bag; bag < last_bag; ++bag) {
      const int64_t end = bags.end(feature, sample);
      for (int64_t position = begin; position < end; ++position) {
        gradient_row_of[position] = (int32_t)(sample * num_features + feature);
        if (num_scales == 0) continue;
        const float divisor = mean ? (float)(end - begin) : 1.0f;
        scale_of[position] = (factors ? factors[position] : 1.0f) / divisor;
      }
      begin = end;
      if (++sample == batch_size) {
        sample = 0;
        ++feature;
      }
    }
  });
  return {gradient_rows, scales};
}

Tensor pooled_lookup_weights_backward(const Tensor& grad, const Tensor& weight, const Tensor& rows,
                                      std::optional<Tensor> offsets, std::vector<int64_t> hotness,
                                      bool mean) {
  const int64_t num_ids = rows.numel();
  STD_TORCH_CHECK(grad.dim() == 3, "grad must have 3 dimensions, got ", grad.dim());
  const BagLayout layout(offsets, hotness, grad.size(1), grad.size(0), num_ids);
  PooledWeightsBackward op;
  op.grad = row_matrix("grad", grad);
  op.weight = row_matrix("weight", weight);
  STD_TORCH_CHECK(op.grad.dim == op.weight.dim, "grad must have ", op.weight.dim, " columns, got ",
                  op.grad.dim);
  op.rows = id_array("rows", rows, num_ids);
  op.num_ids = num_ids;
  op.bags = layout.bags();
  op.mean = mean;
  const Tensor out = torch::stable::new_empty(rows, {num_ids}, ScalarType::Float);
  op.out = out.mutable_data_ptr<float>();
  std::fill(op.out + layout.num_bag_ids(), op.out + num_ids, 0.0f);

  const RowKernels& kernels = row_kernels();
  for_each_bag_of_ids(layout, grain_rows(op.weight.dim), [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(op.weight.dim);
    kernels.pooled_weights_backward(op, begin, end, scratch.data());
  });
  return out;
}

STABLE_TORCH_LIBRARY_FRAGMENT(torchembed_native, library) {
  library.def(
      "pooled_lookup_forward(Tensor weight, Tensor rows, Tensor? offsets, int[] hotness,"
      " Tensor? per_id_weights, int num_features, SymInt batch_size, bool mean,"
      " ScalarType output_dtype) -> Tensor");
  library.def(
      "pooled_lookup_gradient_map(Tensor ids_like, Tensor? offsets, int[] hotness,"
      " Tensor? per_id_weights, int num_features, SymInt batch_size, bool mean)"
      " -> (Tensor, Tensor)");
  library.def(
      "pooled_lookup_weights_backward(Tensor grad, Tensor weight, Tensor rows, Tensor? offsets,"
      " int[] hotness, bool mean) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(torchembed_native, CPU, library) {
  library.impl("pooled_lookup_forward", TORCH_BOX(&pooled_lookup_forward));
  library.impl("pooled_lookup_gradient_map", TORCH_BOX(&pooled_lookup_gradient_map));
  library.impl("pooled_lookup_weights_backward", TORCH_BOX(&pooled_lookup_weights_backward));
}

}  // namespace
}  // namespace torchembed
