// The operation that looks up one vector for each id.

#include <algorithm>

#include "row_kernels.h"
#include "tensors.h"
#include "threads.h"

namespace torchembed {
namespace {

Tensor sequence_lookup_forward(const Tensor& weight, const Tensor& rows, ScalarType output_dtype) {
  const int64_t num_ids = rows.numel();
  SequenceLookup op;
  op.weight = row_matrix("weight", weight);
  op.rows = id_array("rows", rows, num_ids);
  op.num_ids = num_ids;
  const Tensor out = torch::stable::new_empty(weight, {num_ids, op.weight.dim}, output_dtype);
  op.out = mutable_row_matrix("out", out);
  if (out.numel() == 0) return out;

  const RowKernels& kernels = row_kernels();
  const auto cost_before = [](int64_t position) { return position; };
  for_equal_costs(num_ids, grain_rows(op.weight.dim), cost_before,
                  [&](int64_t begin, int64_t end) { kernels.sequence_lookup(op, begin, end); });
  return out;
}

STABLE_TORCH_LIBRARY_FRAGMENT(torchembed_native, library) {
  library.def(
      "sequence_lookup_forward(Tensor weight, Tensor rows, ScalarType output_dtype) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(torchembed_native, CPU, library) {
  library.impl("sequence_lookup_forward", TORCH_BOX(&sequence_lookup_forward));
}

}  // namespace
}  // namespace torchembed
