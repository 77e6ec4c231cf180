// Checks tensors and makes of them the arguments of the kernel of shallow products.

#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "shallow_product.h"

namespace torchembed {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Rows are numbered by int, also those past the end in the last block: the largest such number must
// not overflow.
constexpr int64_t kMostRows = (int64_t{1} << 31) - kSummedRows;

inline void check_device(const char* name, const Tensor& tensor, const Tensor& left) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == left.get_device_index(), name,
                  " must be on the device of the product's left factor");
}

// The data of `tensor`, which must have the dtype of `left` and begin at a multiple of 16 bytes:
// tensor maps take no other address.
inline const void* matrix(const char* name, const Tensor& tensor, const Tensor& left,
                          int64_t num_rows, int64_t num_columns) {
  STD_TORCH_CHECK(tensor.dim() == 2 && tensor.size(0) == num_rows && tensor.size(1) == num_columns,
                  name, " must have shape (", num_rows, ", ", num_columns, ")");
  STD_TORCH_CHECK(tensor.scalar_type() == left.scalar_type(), name, " must be ",
                  torch::headeronly::toString(left.scalar_type()), ", got ",
                  torch::headeronly::toString(tensor.scalar_type()));
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous; call .contiguous()");
  check_device(name, tensor, left);
  const void* const data = tensor.const_data_ptr();
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(data) % 16 == 0, name, " must lie on 16 bytes");
  return data;
}

// The arguments of a pass over [num_rows, num_columns] with `left` as the product's first factor,
// so far without the matrices that the pass reads and writes. Columns and depth must be multiples
// of 8, since the row stride of a tensor map is a multiple of 16 bytes.
inline ProductTiles tiles_of(ProductPass pass, const Tensor& left, int64_t num_columns) {
  const ScalarType type = left.scalar_type();
  STD_TORCH_CHECK(left.dim() == 2, "the product's left factor must have 2 dimensions, got ",
                  left.dim());
  STD_TORCH_CHECK(type == ScalarType::BFloat16 || type == ScalarType::Half,
                  "matrices must be bfloat16 or float16, got ", torch::headeronly::toString(type));
  const int64_t num_rows = left.size(0), depth = left.size(1);
  STD_TORCH_CHECK(num_rows > 0 && num_rows < kMostRows && num_columns > 0 &&
                      num_columns < (int64_t{1} << 31) && num_columns % 8 == 0,
                  "the product must have rows, and a multiple of 8 columns, got ", num_rows,
                  " and ", num_columns);
  STD_TORCH_CHECK(depth > 0 && depth <= kMostDepth && depth % 8 == 0,
                  "the product's depth must be a multiple of 8 up to ", kMostDepth, ", got ",
                  depth);
  ProductTiles tiles{};
  tiles.pass = pass;
  tiles.is_half = type == ScalarType::Half;
  tiles.left = matrix("the product's left factor", left, left, num_rows, depth);
  tiles.num_rows = static_cast<int>(num_rows);
  tiles.num_columns = static_cast<int>(num_columns);
  tiles.depth = static_cast<int>(depth);
  return tiles;
}

inline void read(ProductTiles& tiles, const char* name, const Tensor& tensor, const Tensor& left) {
  tiles.read[tiles.num_read++] = matrix(name, tensor, left, tiles.num_rows, tiles.num_columns);
}

// Allocates a matrix that the pass writes, and adds it to the arguments.
inline Tensor written(ProductTiles& tiles, const Tensor& like, int64_t num_columns) {
  const Tensor tensor = torch::stable::new_empty(like, {tiles.num_rows, num_columns});
  tiles.widths[tiles.num_written] = static_cast<int>(num_columns);
  tiles.written[tiles.num_written++] = tensor.mutable_data_ptr();
  return tensor;
}

// The data of `sums`, to which a pass writes sums over kSummedRows rows each.
inline float* sums_of(const ProductTiles& tiles, const Tensor& sums, const Tensor& left) {
  const int64_t num_sums = (tiles.num_rows + kSummedRows - 1) / kSummedRows;
  STD_TORCH_CHECK(
      sums.dim() == 2 && sums.size(0) == num_sums && sums.size(1) == tiles.num_columns &&
          sums.is_contiguous() && sums.scalar_type() == ScalarType::Float,
      "sums must be contiguous, float32, of shape (", num_sums, ", ", tiles.num_columns, ")");
  check_device("sums", sums, left);
  return sums.mutable_data_ptr<float>();
}

// `stream` as in sort_rows.
inline void launch(const ProductTiles& tiles, const Tensor& left, int64_t stream) {
  const char* const error =
      launch_product(tiles, left.get_device_index(), reinterpret_cast<void*>(stream));
  STD_TORCH_CHECK(error == nullptr, "a product on the GPU failed: ", error);
}

}  // namespace torchembed
