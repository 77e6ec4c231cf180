// The operations of low-rank cross layers on a GPU of compute capability 9.0.

#include "low_rank_cross.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>
#include <vector>

namespace torchembed {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Rows are numbered by int up to the end of the last block.
constexpr int64_t kMostRows = (int64_t{1} << 31) - kSummedRows;

// `tensor`, of 16-bit numbers like `left`.
const void* matrix(const char* name, const Tensor& tensor, const Tensor& left, int64_t num_rows,
                   int64_t num_columns) {
  STD_TORCH_CHECK(tensor.dim() == 2 && tensor.size(0) == num_rows && tensor.size(1) == num_columns,
                  name, " must have shape (", num_rows, ", ", num_columns, ")");
  STD_TORCH_CHECK(tensor.scalar_type() == left.scalar_type(), name, " must be ",
                  torch::headeronly::toString(left.scalar_type()), ", got ",
                  torch::headeronly::toString(tensor.scalar_type()));
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous; call .contiguous()");
  const void* const data = tensor.const_data_ptr();
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(data) % 16 == 0, name, " must lie on 16 bytes");
  return data;
}

// Of a pass over [num_rows, num_columns] with `left` as the product's first factor.
CrossTiles tiles_of(CrossPass pass, const Tensor& left, int64_t num_columns) {
  const ScalarType type = left.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::BFloat16 || type == ScalarType::Half,
                  "matrices must be bfloat16 or float16, got ", torch::headeronly::toString(type));
  const int64_t num_rows = left.size(0), depth = left.size(1);
  STD_TORCH_CHECK(num_rows > 0 && num_rows < kMostRows && num_columns > 0 &&
                      num_columns < (int64_t{1} << 31) && num_columns % 8 == 0,
                  "x0 must have rows, and a multiple of 8 columns, got ", num_rows, " and ",
                  num_columns);
  STD_TORCH_CHECK(depth > 0 && depth <= kMostDepth && depth % 8 == 0,
                  "the product's depth must be a multiple of 8 up to ", kMostDepth, ", got ",
                  depth);
  CrossTiles tiles{};
  tiles.pass = pass;
  tiles.is_half = type == ScalarType::Half;
  tiles.left = matrix("the product's left factor", left, left, num_rows, depth);
  tiles.num_rows = static_cast<int>(num_rows);
  tiles.num_columns = static_cast<int>(num_columns);
  tiles.depth = static_cast<int>(depth);
  return tiles;
}

void read(CrossTiles& tiles, const char* name, const Tensor& tensor, const Tensor& left) {
  tiles.read[tiles.num_read++] = matrix(name, tensor, left, tiles.num_rows, tiles.num_columns);
}

// A new matrix that the pass writes.
Tensor written(CrossTiles& tiles, const Tensor& like, int64_t num_columns) {
  const Tensor tensor = torch::stable::new_empty(like, {tiles.num_rows, num_columns});
  tiles.widths[tiles.num_written] = static_cast<int>(num_columns);
  tiles.written[tiles.num_written++] = tensor.mutable_data_ptr();
  return tensor;
}

// `stream` as in sort_rows.
void launch(const CrossTiles& tiles, const Tensor& left, int64_t stream) {
  const char* const error =
      launch_cross(tiles, left.get_device_index(), reinterpret_cast<void*>(stream));
  STD_TORCH_CHECK(error == nullptr, "a cross layer on the GPU failed: ", error);
}

// As in torchembed::low_rank_cross_forward.
std::tuple<Tensor, Tensor> forward_on(const Tensor& x0, const Tensor& h, const Tensor& u,
                                      const Tensor& bias, const Tensor& x, int64_t stream) {
  const bool is_first = x.const_data_ptr() == x0.const_data_ptr();
  CrossTiles tiles =
      tiles_of(is_first ? CrossPass::kFirstForward : CrossPass::kForward, h, x0.size(1));
  tiles.right = matrix("u", u, h, tiles.num_columns, tiles.depth);
  STD_TORCH_CHECK(
      bias.numel() == tiles.num_columns && bias.scalar_type() == h.scalar_type() &&
          bias.is_contiguous() && reinterpret_cast<uintptr_t>(bias.const_data_ptr()) % 4 == 0,
      "bias must be contiguous, on 4 bytes, with an element for each column, and of h's dtype");
  tiles.bias = bias.const_data_ptr();
  read(tiles, "x0", x0, h);
  if (!is_first) read(tiles, "x", x, h);
  const Tensor z = written(tiles, x0, x0.size(1)), out = written(tiles, x0, x0.size(1));
  launch(tiles, h, stream);
  return {out, z};
}

// As in torchembed::low_rank_cross_backward, with sums over kSummedRows rows each.
std::tuple<Tensor, Tensor> backward_on(const Tensor& grad, const Tensor& grad_h, const Tensor& v,
                                       const Tensor& x0, const Tensor& sums, int64_t stream) {
  CrossTiles tiles = tiles_of(CrossPass::kBackward, grad_h, grad.size(1));
  tiles.right = matrix("v", v, grad_h, tiles.depth, tiles.num_columns);
  const int64_t num_sums = (tiles.num_rows + kSummedRows - 1) / kSummedRows;
  STD_TORCH_CHECK(
      sums.dim() == 2 && sums.size(0) == num_sums && sums.size(1) == tiles.num_columns &&
          sums.is_contiguous() && sums.scalar_type() == ScalarType::Float,
      "sums must be contiguous, float32, of shape (", num_sums, ", ", tiles.num_columns, ")");
  tiles.sums = sums.mutable_data_ptr<float>();
  read(tiles, "grad", grad, grad_h);
  read(tiles, "x0", x0, grad_h);
  const Tensor grad_x = written(tiles, grad, grad.size(1));
  const Tensor grad_z = written(tiles, grad, grad.size(1));
  launch(tiles, grad_h, stream);
  return {grad_x, grad_z};
}

// As in torchembed::low_rank_cross_input_backward; all widths but the last are multiples of
// kPartColumns.
std::vector<Tensor> input_backward_on(const Tensor& grad_h, const Tensor& v,
                                      std::vector<Tensor> grads, std::vector<Tensor> z,
                                      std::vector<int64_t> widths, int64_t stream) {
  STD_TORCH_CHECK(!grads.empty() && grads.size() == z.size() && grads.size() <= kMostLayers,
                  "grads and z must be of as many layers, up to ", kMostLayers, ", got ",
                  grads.size(), " and ", z.size());
  CrossTiles tiles = tiles_of(CrossPass::kInputBackward, grad_h, v.size(1));
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
