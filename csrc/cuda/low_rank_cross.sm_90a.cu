// A matrix product of small depth, and what a cross layer does with each tile of it before it
// leaves the registers: the passes of low_rank_cross.py on GPUs of compute capability 9.0.
//
// A block takes 128 rows and goes through columns, 64 at a time. One thread lets factors, and the
// tiles that the pass reads, come into shared memory, several ahead. Two groups of four warps have
// 64 rows each of the product's left factor in registers, multiply, and write what leaves in the
// place of what came. Where each tile of the product has a program of its own instead, both factors
// are read so often that the cache's rate is what limits it.
//
// The byte floor is that of low_rank_cross.py.

#include <cuda_runtime.h>

#include <algorithm>

#include "hopper.cuh"
#include "low_rank_cross.h"

namespace torchembed {
namespace {

constexpr int kGroups = 2, kGroupRows = 64, kRows = kGroups * kGroupRows;
constexpr int kThreads = (kGroups + 1) * kGroupThreads;
constexpr int kWarps = kGroups * kGroupThreads / 32;
constexpr int kDepth = 64;  // of a step: what one tile of a factor has
constexpr int kMostSteps = kMostDepth / kDepth;
// Tiles of factors, and pairs of those that the pass reads and writes, on their way.
constexpr int kFactorStages = 16, kPairStages = 3;
constexpr int kFactorBytes = 64 * kTileRowBytes, kTileBytes = kRows * kTileRowBytes;
constexpr int kSumBytes = kWarps * kTileColumns * 4;
static_assert(kRows == kSummedRows && kTileColumns == kPartColumns);
// Of threads that only ask for copies, and of those that compute.
constexpr int kFewRegisters = 40, kManyRegisters = 232;

struct Maps {
  CUtensorMap left, right;
  CUtensorMap read[2 * kMostLayers];
  CUtensorMap written[kMostParts];
};

struct Shape {
  int num_rows, num_columns, num_steps, num_pairs;
  int num_splits;  // blocks that share the columns of a row block
  int first_tiles[kMostParts];
  int num_parts;
};

// What is in shared memory.
struct Layout {
  uint32_t factors, pairs, sums, factors_full, factors_empty, pairs_full, pairs_empty;

  explicit __device__ Layout(uint32_t begin)
      : factors(begin),
        pairs(factors + kFactorStages * kFactorBytes),
        sums(pairs + kPairStages * 2 * kTileBytes),
        factors_full(sums + kSumBytes),
        factors_empty(factors_full + kFactorStages * 8),
        pairs_full(factors_empty + kFactorStages * 8),
        pairs_empty(pairs_full + kPairStages * 8) {}

  static constexpr int kBytes = kFactorStages * kFactorBytes + kPairStages * 2 * kTileBytes +
                                kSumBytes + 16 * (kFactorStages + kPairStages);
};

// Where in a ring of kStages something is, with a barrier for each that says it is full, and one
// that it is empty.
template <int kStages>
struct Turn {
  uint32_t full, empty;  // of stage 0
  int stage = 0;
  uint32_t parity = 0;

  __device__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ int before() const { return stage == 0 ? kStages - 1 : stage - 1; }
  __device__ void wait_until_full() const { wait_for(full + 8 * stage, parity); }
  __device__ void wait_until_empty() const { wait_for(empty + 8 * stage, parity ^ 1); }
  __device__ void expect(uint32_t num_bytes) const { expect_bytes(full + 8 * stage, num_bytes); }
  __device__ void release(int of_stage) const { arrive(empty + 8 * of_stage); }
};

template <CrossPass kPass>
constexpr bool kIsForward = kPass == CrossPass::kFirstForward || kPass == CrossPass::kForward;

struct Block {
  int first_row, first_tile, end_tile;
};

// Lets all that a block reads come, in the order in which it is needed.
template <CrossPass kPass>
__device__ void load_block(const Maps& maps, const Shape& shape, const Layout& at,
                           const Block& block) {
  Turn<kFactorStages> factor{at.factors_full, at.factors_empty};
  Turn<kPairStages> pair{at.pairs_full, at.pairs_empty};
  const auto load_factor = [&](const CUtensorMap& map, int column, int row) {
    factor.wait_until_empty();
    factor.expect(kFactorBytes);
    load_tile(at.factors + factor.stage * kFactorBytes, map, column, row,
              factor.full + 8 * factor.stage);
    factor.next();
  };
  const auto load_pairs = [&](int tile) {
    constexpr int kNumRead = kPass == CrossPass::kFirstForward ? 1 : 2;
    for (int number = 0; number < shape.num_pairs; ++number, pair.next()) {
      pair.wait_until_empty();
      pair.expect(kNumRead * kTileBytes);
#pragma unroll
      for (int i = 0; i < kNumRead; ++i) {
        load_tile(at.pairs + (2 * pair.stage + i) * kTileBytes, maps.read[2 * number + i],
                  tile * kTileColumns, block.first_row, pair.full + 8 * pair.stage);
      }
    }
  };
  for (int step = 0; step < shape.num_steps; ++step) {
    for (int group = 0; group < kGroups; ++group) {
      load_factor(maps.left, step * kDepth, block.first_row + group * kGroupRows);
    }
  }
  const auto load_right = [&](int tile) {
    for (int step = 0; step < shape.num_steps; ++step) {
      const int depth = step * kDepth, column = tile * kTileColumns;
      load_factor(maps.right, kIsForward<kPass> ? depth : column,
                  kIsForward<kPass> ? column : depth);
    }
  };
  // Pairs wait until those before have left, which takes products: of one pair a tile those of the
  // tile before, of several those of the tile itself.
  constexpr bool kHasOnePair = kPass != CrossPass::kInputBackward;
  if (kHasOnePair) load_pairs(block.first_tile);
  for (int tile = block.first_tile; tile < block.end_tile; ++tile) {
    load_right(tile);
    const int next = kHasOnePair ? tile + 1 : tile - 1;
    if (next >= block.first_tile && next < block.end_tile) load_pairs(next);
  }
  if (!kHasOnePair) load_pairs(block.end_tile - 1);
}

// A warp's part of what a group of warps has of a tile.
struct Lane {
  int group, row;  // of the first of its rows, 8 apart, among the group's
  int pair;        // of each 8 columns

  __device__ uint32_t place(int half, int piece) const {
    return place_in_tile(group * kGroupRows + row + 8 * half, piece, pair);
  }
  // Of the group's threads, the one that asks for copies.
  __device__ static bool is_first() { return threadIdx.x % kGroupThreads == 0; }
};

// Of a forward pass, in place: a pair of x0 becomes z, and one of x the layer's output.
template <class Value, CrossPass kPass>
__device__ void cross_forward(const Lane& lane, const float (&sum)[32], const uint32_t (&bias)[8],
                              uint32_t first, uint32_t second) {
#pragma unroll
  for (int piece = 0; piece < 8; ++piece) {
    const float2 of_bias = unpacked<Value>(bias[piece]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t place = lane.place(half, piece);
      const float* const product = sum + 4 * piece + 2 * half;
      const float2 z = {product[0] + of_bias.x, product[1] + of_bias.y};
      const float2 x0 = unpacked<Value>(load_shared(first + place));
      float2 x = x0;
      if constexpr (kPass == CrossPass::kForward) {
        x = unpacked<Value>(load_shared(second + place));
      }
      store_shared(first + place, packed<Value>(z.x, z.y));
      store_shared(second + place,
                   packed<Value>(__fmaf_rn(x0.x, z.x, x.x), __fmaf_rn(x0.y, z.y, x.y)));
    }
  }
}

// A pair of the gradient becomes grad_x, and one of x0 grad_z, whose sums over the lane's rows are
// returned.
template <class Value>
__device__ void cross_backward(const Lane& lane, const float (&sum)[32], uint32_t first,
                               uint32_t second, float (&column_sums)[16]) {
#pragma unroll
  for (int piece = 0; piece < 8; ++piece) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t place = lane.place(half, piece);
      const float* const product = sum + 4 * piece + 2 * half;
      const float2 grad = unpacked<Value>(load_shared(first + place));
      const float2 x0 = unpacked<Value>(load_shared(second + place));
      const float2 grad_x = {product[0] + grad.x, product[1] + grad.y};
      const float2 grad_z = {grad_x.x * x0.x, grad_x.y * x0.y};
      store_shared(first + place, packed<Value>(grad_x.x, grad_x.y));
      store_shared(second + place, packed<Value>(grad_z.x, grad_z.y));
      float* const total = column_sums + 2 * piece;
      total[0] = half == 0 ? grad_z.x : total[0] + grad_z.x;
      total[1] = half == 0 ? grad_z.y : total[1] + grad_z.y;
    }
  }
}

// Adds up what lanes have of a tile's columns, over all rows of the block.
__device__ void put_sums(const Lane& lane, float (&column_sums)[16], uint32_t shared, float* sums,
                         int num_columns, bool is_first_tile, bool is_last_tile) {
  constexpr int kWritten = 1 + kGroups, kRead = kWritten + 1, kAll = kGroups * kGroupThreads;
  const int warp = threadIdx.x / 32;
  if (lane.group == 1 && !is_first_tile) sync_threads(kRead, kAll);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
#pragma unroll
    for (int apart = 4; apart < 32; apart *= 2) {
      column_sums[i] += __shfl_xor_sync(0xFFFFFFFFu, column_sums[i], apart);
    }
    const int column = i / 2 * 8 + lane.pair * 2 + i % 2;
    if (threadIdx.x % 32 < 4) {
      store_shared(shared + (warp * kTileColumns + column) * 4, __float_as_uint(column_sums[i]));
    }
  }
  if (lane.group == 1) {
    arrive_threads(kWritten, kAll);
    return;
  }
  sync_threads(kWritten, kAll);
  if (threadIdx.x < kTileColumns && threadIdx.x < num_columns) {
    float total = 0.0f;
    for (int i = 0; i < kWarps; ++i) {
      total += __uint_as_float(load_shared(shared + (i * kTileColumns + threadIdx.x) * 4));
    }
    sums[threadIdx.x] = total;
  }
  if (!is_last_tile) arrive_threads(kRead, kAll);
}

// Adds grad * z of a layer, and the gradient itself of the first one.
template <class Value>
__device__ void add_layer(const Lane& lane, float (&sum)[32], uint32_t first, uint32_t second,
                          bool is_first_layer) {
#pragma unroll
  for (int piece = 0; piece < 8; ++piece) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t place = lane.place(half, piece);
      float* const total = sum + 4 * piece + 2 * half;
      const float2 grad = unpacked<Value>(load_shared(first + place));
      const float2 z = unpacked<Value>(load_shared(second + place));
      if (is_first_layer) {
        total[0] += grad.x;
        total[1] += grad.y;
      }
      total[0] = __fmaf_rn(grad.x, z.x, total[0]);
      total[1] = __fmaf_rn(grad.y, z.y, total[1]);
    }
  }
}

template <class Value>
__device__ void put_tile(const Lane& lane, const float (&sum)[32], uint32_t tile) {
#pragma unroll
  for (int piece = 0; piece < 8; ++piece) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* const total = sum + 4 * piece + 2 * half;
      store_shared(tile + lane.place(half, piece), packed<Value>(total[0], total[1]));
    }
  }
}

// Multiplies, and makes of each tile what the pass writes.
template <class Value, CrossPass kPass>
__device__ void compute_block(const Maps& maps, const Shape& shape, const Layout& at,
                              const Block& block, const Value* bias, float* sums) {
  const int warp = threadIdx.x / 32, lane_of_warp = threadIdx.x % 32;
  const Lane lane{warp / 4, warp % 4 * 16 + lane_of_warp / 4, lane_of_warp % 4};
  Turn<kFactorStages> factor{at.factors_full, at.factors_empty};
  Turn<kPairStages> pair{at.pairs_full, at.pairs_empty};

  uint32_t left[kMostSteps][kDepth / 16][4];
#pragma unroll
  for (int step = 0; step < kMostSteps; ++step) {
    if (step >= shape.num_steps) break;
#pragma unroll
    for (int group = 0; group < kGroups; ++group, factor.next()) {
      // Also for the other group's: a phase that nobody has waited for looks like the one after it.
      factor.wait_until_full();
      if (group == lane.group) {
#pragma unroll
        for (int k = 0; k < kDepth / 16; ++k) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            left[step][k][i] =
                load_shared(at.factors + factor.stage * kFactorBytes +
                            place_in_tile(lane.row + i % 2 * 8, 2 * k + i / 2, lane.pair));
          }
        }
      }
      __syncwarp();
      if (lane_of_warp == 0) factor.release(factor.stage);
    }
  }

  for (int tile = block.first_tile; tile < block.end_tile; ++tile) {
    const int column = tile * kTileColumns;
    uint32_t bias_pairs[8];
    if constexpr (kIsForward<kPass>) {
#pragma unroll
      for (int piece = 0; piece < 8; ++piece) {
        const int of_pair = column + 8 * piece + 2 * lane.pair;
        const bool is_inside = of_pair < shape.num_columns;
        bias_pairs[piece] = is_inside ? *reinterpret_cast<const uint32_t*>(bias + of_pair) : 0;
      }
    }
    float sum[32];
    int previous = 0;
#pragma unroll
    for (int step = 0; step < kMostSteps; ++step) {
      if (step >= shape.num_steps) break;
      factor.wait_until_full();
      begin_products();
#pragma unroll
      for (int k = 0; k < kDepth / 16; ++k) {
        constexpr int kPartBytes = kIsForward<kPass> ? 16 * 2 : 16 * kTileRowBytes;
        const uint32_t right = at.factors + factor.stage * kFactorBytes + k * kPartBytes;
        multiply<Value, !kIsForward<kPass>>(sum, left[step][k], tile_descriptor(right), step + k);
      }
      commit_products();
      if (step > 0) {
        wait_for_products<1>();
        if (lane_of_warp == 0) factor.release(previous);
      }
      previous = factor.stage;
      factor.next();
    }
    wait_for_sum(sum);
    if (lane_of_warp == 0) factor.release(previous);
    if (Lane::is_first() && tile > block.first_tile) {
      wait_for_stores();
      pair.release(pair.before());
    }

    if constexpr (kPass == CrossPass::kInputBackward) {
      for (int layer = 0; layer < shape.num_pairs; ++layer) {
        if (layer > 0) {
          sync_threads(1 + lane.group, kGroupThreads);
          if (Lane::is_first()) pair.release(pair.before());
        }
        pair.wait_until_full();
        const uint32_t first = at.pairs + pair.stage * 2 * kTileBytes;
        add_layer<Value>(lane, sum, first, first + kTileBytes, layer == 0);
        if (layer + 1 == shape.num_pairs) put_tile<Value>(lane, sum, first);
        pair.next();
      }
    } else {
      pair.wait_until_full();
      const uint32_t first = at.pairs + pair.stage * 2 * kTileBytes;
      if constexpr (kIsForward<kPass>) {
        cross_forward<Value, kPass>(lane, sum, bias_pairs, first, first + kTileBytes);
      } else {
        float column_sums[16];
        cross_backward<Value>(lane, sum, first, first + kTileBytes, column_sums);
        put_sums(lane, column_sums, at.sums, sums + column, shape.num_columns - column,
                 tile == block.first_tile, tile + 1 == block.end_tile);
      }
      pair.next();
    }
    show_writes();
    sync_threads(1 + lane.group, kGroupThreads);
    if (Lane::is_first()) {
      const int row = block.first_row + lane.group * kGroupRows;
      const uint32_t source =
          at.pairs + pair.before() * 2 * kTileBytes + lane.group * kGroupRows * kTileRowBytes;
      if (row < shape.num_rows) {
        if constexpr (kPass == CrossPass::kInputBackward) {
          int part = shape.num_parts - 1;
          while (shape.first_tiles[part] > tile) --part;
          const int of_part = (tile - shape.first_tiles[part]) * kTileColumns;
          store_tile(maps.written[part], of_part, row, source);
        } else {
          store_tile(maps.written[0], column, row, source);
          store_tile(maps.written[1], column, row, source + kTileBytes);
        }
      }
      commit_stores();
    }
  }
  if (Lane::is_first()) wait_for_stores();
}

template <class Value, CrossPass kPass>
__global__ void __launch_bounds__(kThreads, 1)
    cross_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Shape shape,
                 const Value* const bias, float* const sums) {
  extern __shared__ __align__(1024) char shared[];
  const Layout at(shared_address(shared));
  const int num_tiles = (shape.num_columns + kTileColumns - 1) / kTileColumns;
  const int row_block = blockIdx.x / shape.num_splits, split = blockIdx.x % shape.num_splits;
  const Block block{row_block * kRows, num_tiles * split / shape.num_splits,
                    num_tiles * (split + 1) / shape.num_splits};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kFactorStages; ++i) {
      init_barrier(at.factors_full + 8 * i, 1);
      init_barrier(at.factors_empty + 8 * i, kWarps);
    }
    for (int i = 0; i < kPairStages; ++i) {
      init_barrier(at.pairs_full + 8 * i, 1);
      init_barrier(at.pairs_empty + 8 * i, kGroups);
    }
    show_barriers();
  }
  __syncthreads();
  if (threadIdx.x >= kGroups * kGroupThreads) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kFewRegisters));
    if (Lane::is_first()) load_block<kPass>(maps, shape, at, block);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kManyRegisters));
    float* const of_rows =
        sums == nullptr ? nullptr : sums + static_cast<int64_t>(row_block) * shape.num_columns;
    compute_block<Value, kPass>(maps, shape, at, block, bias, of_rows);
  }
}

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

// The driver's function, which the library is not linked to; null where there is none.
Encode find_encode() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                             12000, cudaEnableDefault, &result);
  const bool is_found = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
  return is_found ? reinterpret_cast<Encode>(found) : nullptr;
}

// The maps of a call's matrices.
class MapMaker {
 public:
  MapMaker(Encode encode, bool is_half)
      : encode_(encode),
        type_(is_half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16) {}

  // Of a matrix in tiles of `tile_rows` rows. What `streams` through is fetched into the cache by
  // 256 bytes, so that the next tile's are there.
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

// Into how many blocks the columns of a row block are divided, so that the last block is done
// first.
int count_splits(int row_blocks, int num_tiles, int num_multiprocessors) {
  // About how many tiles take as long as what a block does before its first one.
  constexpr int kTilesToBegin = 3;
  int best = 1;
  int64_t least = INT64_MAX;
  for (int splits = 1; splits <= num_tiles; ++splits) {
    const int64_t blocks = int64_t{row_blocks} * splits;
    const int64_t rounds = (blocks + num_multiprocessors - 1) / num_multiprocessors;
    const int64_t time = rounds * ((num_tiles + splits - 1) / splits + kTilesToBegin);
    if (time < least) {
      least = time;
      best = splits;
    }
  }
  return best;
}

template <class Value, CrossPass kPass>
cudaError_t launch(const CrossTiles& tiles, const Maps& maps, const Shape& shape, int num_blocks,
                   cudaStream_t stream) {
  const auto kernel = cross_kernel<Value, kPass>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout::kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<num_blocks, kThreads, Layout::kBytes, stream>>>(
      maps, shape, static_cast<const Value*>(tiles.bias), tiles.sums);
  return cudaGetLastError();
}

template <class Value>
cudaError_t launch_pass(const CrossTiles& tiles, const Maps& maps, const Shape& shape,
                        int num_blocks, cudaStream_t stream) {
  switch (tiles.pass) {
    case CrossPass::kFirstForward:
      return launch<Value, CrossPass::kFirstForward>(tiles, maps, shape, num_blocks, stream);
    case CrossPass::kForward:
      return launch<Value, CrossPass::kForward>(tiles, maps, shape, num_blocks, stream);
    case CrossPass::kBackward:
      return launch<Value, CrossPass::kBackward>(tiles, maps, shape, num_blocks, stream);
    default:
      return launch<Value, CrossPass::kInputBackward>(tiles, maps, shape, num_blocks, stream);
  }
}

}  // namespace

const char* launch_cross(const CrossTiles& tiles, int device, void* stream) {
  static const Encode encode = find_encode();
  if (encode == nullptr) return "the driver has no cuTensorMapEncodeTiled";
  // As in update_rows.
  int current = device, num_multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess && current != device) error = cudaSetDevice(device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return cudaGetErrorString(error);

  const bool is_forward =
      tiles.pass == CrossPass::kFirstForward || tiles.pass == CrossPass::kForward;
  MapMaker maker(encode, tiles.is_half);
  Maps maps{};
  Shape shape{};
  maps.left = maker.make(tiles.left, tiles.num_rows, tiles.depth, kGroupRows);
  maps.right = is_forward ? maker.make(tiles.right, tiles.num_columns, tiles.depth, kTileColumns)
                          : maker.make(tiles.right, tiles.depth, tiles.num_columns, kDepth);
  for (int i = 0; i < tiles.num_read; ++i) {
    maps.read[i] = maker.make(tiles.read[i], tiles.num_rows, tiles.num_columns, kRows, true);
  }
  for (int i = 0, column = 0; i < tiles.num_written; ++i) {
    maps.written[i] = maker.make(tiles.written[i], tiles.num_rows, tiles.widths[i], kGroupRows);
    shape.first_tiles[i] = column / kTileColumns;
    column += tiles.widths[i];
  }
  if (maker.has_failed()) return "cuTensorMapEncodeTiled refused a matrix";
  const int row_blocks = (tiles.num_rows + kRows - 1) / kRows;
  const int num_tiles = (tiles.num_columns + kTileColumns - 1) / kTileColumns;
  shape.num_rows = tiles.num_rows;
  shape.num_columns = tiles.num_columns;
  shape.num_steps = (tiles.depth + kDepth - 1) / kDepth;
  shape.num_pairs = (tiles.num_read + 1) / 2;
  shape.num_parts = tiles.num_written;
  shape.num_splits = count_splits(row_blocks, num_tiles, num_multiprocessors);
  const int num_blocks = row_blocks * shape.num_splits;
  const auto queue = static_cast<cudaStream_t>(stream);
  error = tiles.is_half ? launch_pass<__half>(tiles, maps, shape, num_blocks, queue)
                        : launch_pass<__nv_bfloat16>(tiles, maps, shape, num_blocks, queue);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace torchembed
