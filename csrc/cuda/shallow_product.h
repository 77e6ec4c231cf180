// The interface between the operations and the kernel of matrix products of small depth with an
// elementwise epilogue, on a GPU.

#pragma once

#include <cstdint>

namespace torchembed {

// Limits of the kernel: the product's depth, and of a cross network the layers and the parts of a
// gradient.
constexpr int kMostDepth = 512, kMostLayers = 4, kMostParts = 4;
// Rows over which the kernel sums, and the width of a tile, in which parts of a gradient are
// counted.
constexpr int kSummedRows = 128, kPartColumns = 64;

// Passes, with the matrices that they read, and what they write, where product = left @ right.
enum class ProductPass {
  kFirstForward,   // x0: z = product + bias and x0 * z + x0
  kForward,        // x0 and x: z = product + bias and x0 * z + x
  kBackward,       // grad and x0: grad_x = grad + product and grad_z = grad_x * x0; grad_z's sums
  kInputBackward,  // grad and z of each layer: product + grad[0] + sum(grad[l] * z[l]), in parts
  kRectified,      // output: grad = product where output > 0, else 0; its sums
};

// The arguments of the kernel. Matrices are of 16-bit numbers, contiguous and aligned to 16 bytes.
struct ProductTiles {
  ProductPass pass;
  bool is_half;       // float16, else bfloat16
  const void* left;   // [num_rows, depth]
  const void* right;  // forward [num_columns, depth], backward [depth, num_columns]
  const void* bias;   // [num_columns], in forward
  float* sums;        // [ceil(num_rows / kSummedRows), num_columns], where the pass has sums
  const void* read[2 * kMostLayers];  // [num_rows, num_columns] each
  int num_read;
  void* written[kMostParts];  // [num_rows, widths[i]] each
  int widths[kMostParts];
  int num_written;
  int num_rows, num_columns, depth;  // columns and depth are multiples of 8
};

// Launches on `stream` of `device`, which is the caller's current one. Returns the message of what
// failed, else nullptr.
const char* launch_product(const ProductTiles& tiles, int device, void* stream);

}  // namespace torchembed
