// Tensor maps: descriptions of matrices in global memory for the tile copies of hopper.cuh.

#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "hopper.cuh"

namespace torchembed {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

// The driver's function that encodes tensor maps, null where there is none. It is looked up at run
// time: linking the driver's library would keep torchembed from loading on machines without one.
Encode find_encode() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                             12000, cudaEnableDefault, &result);
  const bool is_found = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
  return is_found ? reinterpret_cast<Encode>(found) : nullptr;
}

// Makes the tensor maps of a call and remembers whether one of them failed.
class MapMaker {
 public:
  MapMaker(Encode encode, bool is_half)
      : encode_(encode),
        type_(is_half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16) {}

  // The map of a matrix in tiles of kTileColumns columns and `tile_rows` rows. Accesses past its
  // ends read zeros and store nothing. A matrix that `streams`, each tile read once from left to
  // right, is fetched into the second-level cache by 256 bytes, two tiles' rows at a time.
  CUtensorMap make(const void* matrix, int num_rows, int num_columns, int tile_rows,
                   bool streams = false) {
    const cuuint64_t sizes[] = {static_cast<cuuint64_t>(num_columns),
                                static_cast<cuuint64_t>(num_rows)};
    const cuuint64_t stride = sizes[0] * 2;
    const cuuint32_t box[] = {kTileColumns, static_cast<cuuint32_t>(tile_rows)};
    const cuuint32_t steps[] = {1, 1};
    CUtensorMap map;
    const CUresult result =
        encode_(&map, type_, 2, const_cast<void*>(matrix), sizes, &stride, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                streams ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) has_failed_ = true;
    return map;
  }
  bool has_failed() const { return has_failed_; }

 private:
  Encode encode_;
  CUtensorMapDataType type_;
  bool has_failed_ = false;
};

}  // namespace
}  // namespace torchembed
