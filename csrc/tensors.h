// Converts tensors of the stable ABI to the plain data that kernels take. The Python functions have
// checked the arguments; what protects memory is checked again here, since torch.ops calls these
// operations directly too.

#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "row_kernels.h"

namespace torchembed {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void check_layout(const char* name, const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.is_cpu(), name, " must be on the CPU; call .cpu()");
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous; call .contiguous()");
}

inline void check_numel(const char* name, const Tensor& tensor, int64_t numel) {
  STD_TORCH_CHECK(tensor.numel() == numel, name, " must hold ", numel, " elements, got ",
                  tensor.numel());
}

// The data of a tensor of numel elements of type T.
template <class T>
const T* const_data(const char* name, const Tensor& tensor, int64_t numel) {
  check_layout(name, tensor);
  check_numel(name, tensor, numel);
  return tensor.const_data_ptr<T>();
}

template <class T>
T* mutable_data(const char* name, const Tensor& tensor, int64_t numel) {
  check_layout(name, tensor);
  check_numel(name, tensor, numel);
  return tensor.mutable_data_ptr<T>();
}

// The rows of a tensor as bytes, with gaps between them or without.
struct RowBytes {
  char* data;
  int64_t num_rows;
  int64_t bytes;   // of a row
  int64_t stride;  // bytes from the beginning of a row to that of the next one

  bool holds(int64_t row) const { return (uint64_t)row < (uint64_t)num_rows; }
  char* at(int64_t row) const { return data + row * stride; }
};

// The rows of a tensor on the CPU, each of which is contiguous, and none of which overlap.
inline RowBytes row_bytes(const char* name, const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.is_cpu(), name, " must be on the CPU; call .cpu()");
  STD_TORCH_CHECK(tensor.dim() > 0, name, " must have at least one dimension, got a scalar");
  int64_t elements = 1;
  bool is_contiguous = true;
  for (int64_t dim = tensor.dim() - 1; dim > 0; --dim) {
    is_contiguous &= tensor.size(dim) == 1 || tensor.stride(dim) == elements;
    elements *= tensor.size(dim);
  }
  const int64_t num_rows = tensor.size(0), stride = tensor.stride(0);
  STD_TORCH_CHECK(elements == 0 || num_rows == 0 || is_contiguous, name,
                  " must have contiguous rows; call .contiguous()");
  STD_TORCH_CHECK(num_rows < 2 || stride >= elements, name,
                  " must have rows that do not overlap, got rows of ", elements, " elements and a ",
                  "stride of ", stride, "; call .contiguous()");
  const int64_t itemsize = (int64_t)tensor.element_size();
  return {static_cast<char*>(const_cast<void*>(tensor.const_data_ptr())), num_rows,
          elements * itemsize, stride * itemsize};
}

// The same for writing.
inline RowBytes mutable_row_bytes(const char* name, const Tensor& tensor) {
  RowBytes rows = row_bytes(name, tensor);
  rows.data = static_cast<char*>(tensor.mutable_data_ptr());
  return rows;
}

inline IdArray id_array(const char* name, const Tensor& ids, int64_t numel) {
  if (ids.scalar_type() == ScalarType::Int) return IdArray(const_data<int32_t>(name, ids, numel));
  return IdArray(const_data<int64_t>(name, ids, numel));
}

inline FloatType float_type(const char* name, ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return FloatType::kFloat32;
    case ScalarType::Half:
      return FloatType::kFloat16;
    case ScalarType::BFloat16:
      return FloatType::kBFloat16;
    default:
      STD_TORCH_CHECK(false, name, " must be float32, float16 or bfloat16, got ",
                      torch::headeronly::toString(type));
  }
}

// The last dimension of a tensor as rows, for reading.
inline RowMatrix row_matrix(const char* name, const Tensor& tensor) {
  check_layout(name, tensor);
  const FloatType type = float_type(name, tensor.scalar_type());
  STD_TORCH_CHECK(tensor.dim() >= 2, name, " must have 2 dimensions or more, got ", tensor.dim());
  const int64_t dim = tensor.size(tensor.dim() - 1);
  const int64_t num_rows = dim == 0 ? 0 : tensor.numel() / dim;
  return {const_cast<void*>(tensor.const_data_ptr()), type, num_rows, dim};
}

// The same for writing.
inline RowMatrix mutable_row_matrix(const char* name, const Tensor& tensor) {
  RowMatrix matrix = row_matrix(name, tensor);
  matrix.data = tensor.mutable_data_ptr();
  return matrix;
}

}  // namespace torchembed
