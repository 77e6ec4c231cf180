// The backward operation of linear layers with a rectifier, on GPUs of compute capability 9.0.

#include <torch/csrc/stable/library.h>

#include "product_tensors.h"

namespace torchembed {
namespace {

// As torchembed::linear_relu_input_backward, except that `sums` gets a partial sum for each
// kSummedRows rows: the caller adds them in a fixed order, which atomics would not.
Tensor input_backward_on(const Tensor& grad, const Tensor& weight, const Tensor& output,
                         const Tensor& sums, int64_t stream) {
  STD_TORCH_CHECK(output.dim() == 2, "output must have 2 dimensions, got ", output.dim());
  ProductTiles tiles = tiles_of(ProductPass::kRectified, grad, output.size(1));
  tiles.right = matrix("weight", weight, grad, tiles.depth, tiles.num_columns);
  tiles.sums = sums_of(tiles, sums, grad);
  read(tiles, "output", output, grad);
  const Tensor grad_product = written(tiles, output, output.size(1));
  launch(tiles, grad, stream);
  return grad_product;
}

STABLE_TORCH_LIBRARY_FRAGMENT(torchembed_native, library) {
  library.def(
      "linear_relu_input_backward(Tensor grad, Tensor weight, Tensor output, Tensor(a!) sums,"
      " int stream) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(torchembed_native, CUDA, library) {
  library.impl("linear_relu_input_backward", TORCH_BOX(&input_backward_on));
}

}  // namespace
}  // namespace torchembed
