// The operations of low-rank cross layers on a GPU of compute capability 9.0.

#include <torch/csrc/stable/library.h>

#include <tuple>
#include <vector>

#include "product_tensors.h"

namespace torchembed {
namespace {

// As torchembed::low_rank_cross_forward.
std::tuple<Tensor, Tensor> forward_on(const Tensor& x0, const Tensor& h, const Tensor& u,
                                      const Tensor& bias, const Tensor& x, int64_t stream) {
  STD_TORCH_CHECK(x0.dim() == 2, "x0 must have 2 dimensions, got ", x0.dim());
  // The first layer's x is x0 itself. Its own pass reads the matrix once instead of twice.
  const bool is_first = x.const_data_ptr() == x0.const_data_ptr();
  ProductTiles tiles =
      tiles_of(is_first ? ProductPass::kFirstForward : ProductPass::kForward, h, x0.size(1));
  tiles.right = matrix("u", u, h, tiles.num_columns, tiles.depth);
  STD_TORCH_CHECK(
      bias.numel() == tiles.num_columns && bias.scalar_type() == h.scalar_type() &&
          bias.is_contiguous() && reinterpret_cast<uintptr_t>(bias.const_data_ptr()) % 4 == 0,
      "bias must be contiguous, on 4 bytes, with an element for each column, and of h's dtype");
  check_device("bias", bias, h);
  tiles.bias = bias.const_data_ptr();
  read(tiles, "x0", x0, h);
  if (!is_first) read(tiles, "x", x, h);
  const Tensor z = written(tiles, x0, x0.size(1)), out = written(tiles, x0, x0.size(1));
  launch(tiles, h, stream);
  return {out, z};
}

// As torchembed::low_rank_cross_backward, except that `sums` gets a partial sum for each
// kSummedRows rows, which the caller adds in a fixed order.
std::tuple<Tensor, Tensor> backward_on(const Tensor& grad, const Tensor& grad_h, const Tensor& v,
                                       const Tensor& x0, const Tensor& sums, int64_t stream) {
  STD_TORCH_CHECK(grad.dim() == 2, "grad must have 2 dimensions, got ", grad.dim());
  ProductTiles tiles = tiles_of(ProductPass::kBackward, grad_h, grad.size(1));
  tiles.right = matrix("v", v, grad_h, tiles.depth, tiles.num_columns);
  tiles.sums = sums_of(tiles, sums, grad_h);
  read(tiles, "grad", grad, grad_h);
  read(tiles, "x0", x0, grad_h);
  const Tensor grad_x = written(tiles, grad, grad.size(1));
  const Tensor grad_z = written(tiles, grad, grad.size(1));
  launch(tiles, grad_h, stream);
  return {grad_x, grad_z};
}

// As torchembed::low_rank_cross_input_backward. All widths but the last are multiples of
// kPartColumns, so that no tile of the product lies in two of the parts that are written.
std::vector<Tensor> input_backward_on(const Tensor& grad_h, const Tensor& v,
                                      std::vector<Tensor> grads, std::vector<Tensor> z,
                                      std::vector<int64_t> widths, int64_t stream) {
  STD_TORCH_CHECK(!grads.empty() && grads.size() == z.size() && grads.size() <= kMostLayers,
                  "grads and z must be of as many layers, up to ", kMostLayers, ", got ",
                  grads.size(), " and ", z.size());
  STD_TORCH_CHECK(v.dim() == 2, "v must have 2 dimensions, got ", v.dim());
  ProductTiles tiles = tiles_of(ProductPass::kInputBackward, grad_h, v.size(1));
  tiles.right = matrix("v", v, grad_h, tiles.depth, tiles.num_columns);
  for (size_t layer = 0; layer < grads.size(); ++layer) {
    read(tiles, "grads", grads[layer], grad_h);
    read(tiles, "z", z[layer], grad_h);
  }
  STD_TORCH_CHECK(!widths.empty() && widths.size() <= kMostParts, "widths must be of up to ",
                  kMostParts, " parts, got ", widths.size());
  int64_t total = 0;
  for (size_t part = 0; part < widths.size(); ++part) {
    const int64_t unit = part + 1 < widths.size() ? kPartColumns : 8;
    STD_TORCH_CHECK(widths[part] > 0 && widths[part] % unit == 0, "widths must be multiples of ",
                    unit, ", got ", widths[part]);
    total += widths[part];
  }
  STD_TORCH_CHECK(total == tiles.num_columns, "widths must add up to ", tiles.num_columns, ", got ",
                  total);
  std::vector<Tensor> parts;
  for (const int64_t width : widths) parts.push_back(written(tiles, grad_h, width));
  launch(tiles, grad_h, stream);
  return parts;
}

STABLE_TORCH_LIBRARY_FRAGMENT(torchembed_native, library) {
  library.def(
      "low_rank_cross_forward(Tensor x0, Tensor h, Tensor u, Tensor bias, Tensor x, int stream)"
      " -> (Tensor, Tensor)");
  library.def(
      "low_rank_cross_backward(Tensor grad, Tensor grad_h, Tensor v, Tensor x0, Tensor(a!) sums,"
      " int stream) -> (Tensor, Tensor)");
  library.def(
      "low_rank_cross_input_backward(Tensor grad_h, Tensor v, Tensor[] grads, Tensor[] z,"
      " int[] widths, int stream) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(torchembed_native, CUDA, library) {
  library.impl("low_rank_cross_forward", TORCH_BOX(&forward_on));
  library.impl("low_rank_cross_backward", TORCH_BOX(&backward_on));
  library.impl("low_rank_cross_input_backward", TORCH_BOX(&input_backward_on));
}

}  // namespace
}  // namespace torchembed
