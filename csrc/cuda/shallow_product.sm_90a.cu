// A matrix product of small depth with the elementwise part of a layer as its epilogue, applied to
// each tile while it is in registers, on GPUs of compute capability 9.0.
//
// A block takes 128 rows and loops over their columns, 64 at a time. It is warp-specialized: one
// producer thread issues the copies of factors, and of the tiles that the pass reads, into rings of
// buffers in shared memory, several ahead. Two consumer warpgroups hold 64 rows each of the
// product's left factor in registers, multiply, and write their results over the tiles that were
// read, from where they are copied out. With a block for each tile of the product instead, both
// factors would be read so often that the second-level cache's bandwidth would be the limit.
//
// Byte floor: the matrices that a pass reads and writes once each, and the factors once.

#include <cuda_runtime.h>

#include <algorithm>

#include "hopper.cuh"
#include "shallow_product.h"
#include "shallow_product_passes.cuh"
#include "tile_maps.cuh"

namespace torchembed {
namespace {

constexpr int kRows = kGroups * kGroupRows;
constexpr int kThreads = (kGroups + 1) * kGroupThreads;
constexpr int kDepth = 64;  // depth of a step: that of one tile of a factor
constexpr int kMostSteps = kMostDepth / kDepth;
// Buffers of the two rings: tiles of factors, and pairs of the tiles that the pass reads and
// writes. They take nearly all shared memory of a multiprocessor, hence one block on each.
constexpr int kFactorStages = 16, kPairStages = 3;
constexpr int kFactorBytes = 64 * kTileRowBytes, kTileBytes = kRows * kTileRowBytes;
constexpr int kSumBytes = kWarps * kTileColumns * 4;
static_assert(kRows == kSummedRows && kTileColumns == kPartColumns);
// Registers of threads of the producer's warpgroup, and of consumers, which hold the left factor
// (128 at the largest depth) and the sum (32). A multiprocessor has 65536: 128 * 40 + 256 * 232 are
// less.
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

// Addresses in shared memory. Tiles come first: 128-byte swizzling needs them at multiples of 1024
// bytes, which all of their sizes are.
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

// A thread's position in a ring of kStages buffers, each with a barrier that it is full and one
// that it is empty. `parity` is that of the phase in which the current buffer is filled. The wait
// for an empty buffer has the other parity: a new barrier counts as past its odd phase, so that the
// first round of the producer waits for nothing.
template <int kStages>
struct RingPosition {
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

struct Block {
  int first_row, first_tile, end_tile;
};

// The producer: issues the copies of all that a block reads, in the order in which consumers need
// it. In another order a full ring could hold what is needed later while consumers wait for what
// does not fit any more: a deadlock.
template <ProductPass kPass>
__device__ void load_block(const Maps& maps, const Shape& shape, const Layout& at,
                           const Block& block) {
  RingPosition<kFactorStages> factor{at.factors_full, at.factors_empty};
  RingPosition<kPairStages> pair{at.pairs_full, at.pairs_empty};
  const auto load_factor = [&](const CUtensorMap& map, int column, int row) {
    factor.wait_until_empty();
    factor.expect(kFactorBytes);
    load_tile(at.factors + factor.stage * kFactorBytes, map, column, row,
              factor.full + 8 * factor.stage);
    factor.next();
  };
  const auto load_pairs = [&](int tile) {
    constexpr int kNumRead = kReadsPairs<kPass> ? 2 : 1;
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
  // A pair's buffer is free once the results that were in it are copied out, which consumers wait
  // for only after more products: with one pair for each tile those of the tile before, with
  // several those of the tile itself. The right factor of these products must be issued before the
  // pair, or producer and consumers would wait for each other for ever.
  constexpr bool kHasOnePair = kPass != ProductPass::kInputBackward;
  if (kHasOnePair) load_pairs(block.first_tile);
  for (int tile = block.first_tile; tile < block.end_tile; ++tile) {
    load_right(tile);
    const int next = kHasOnePair ? tile + 1 : tile - 1;
    if (next >= block.first_tile && next < block.end_tile) load_pairs(next);
  }
  if (!kHasOnePair) load_pairs(block.end_tile - 1);
}

// The consumers: multiply, and apply the pass to each tile of the product.
template <class Value, ProductPass kPass>
__device__ void compute_block(const Maps& maps, const Shape& shape, const Layout& at,
                              const Block& block, const Value* bias, float* sums) {
  const int warp = threadIdx.x / 32, lane_of_warp = threadIdx.x % 32;
  const Lane lane{warp / 4, warp % 4 * 16 + lane_of_warp / 4, lane_of_warp % 4};
  RingPosition<kFactorStages> factor{at.factors_full, at.factors_empty};
  RingPosition<kPairStages> pair{at.pairs_full, at.pairs_empty};

  uint32_t left[kMostSteps][kDepth / 16][4];
#pragma unroll
  for (int step = 0; step < kMostSteps; ++step) {
    if (step >= shape.num_steps) break;
#pragma unroll
    for (int group = 0; group < kGroups; ++group, factor.next()) {
      // Each warp waits for the other warpgroup's tiles too: one that skipped a phase could pass
      // the wait for the next one at once, since barriers tell phases by parity alone.
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
      // All lanes have read before one of them gives the buffer back to the producer.
      __syncwarp();
      if (lane_of_warp == 0) factor.release(factor.stage);
    }
  }

  for (int tile = block.first_tile; tile < block.end_tile; ++tile) {
    const int column = tile * kTileColumns;
    uint32_t bias_pairs[8];
    if constexpr (kIsForward<kPass>) {
#pragma unroll
      for (int octet = 0; octet < 8; ++octet) {
        const int of_pair = column + 8 * octet + 2 * lane.pair;
        const bool is_inside = of_pair < shape.num_columns;
        bias_pairs[octet] = is_inside ? *reinterpret_cast<const uint32_t*>(bias + of_pair) : 0;
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
      // Products read their tiles asynchronously. Those of the step before are waited for, and
      // their buffer given back, while those of this step run.
      if (step > 0) {
        wait_for_products<1>();
        if (lane_of_warp == 0) factor.release(previous);
      }
      previous = factor.stage;
      factor.next();
    }
    wait_for_sum(sum);
    if (lane_of_warp == 0) factor.release(previous);
    // The results of the tile before had the time of the products to be copied out. Only now are
    // they waited for, and the pair's buffer given back.
    if (Lane::is_first() && tile > block.first_tile) {
      wait_for_stores();
      pair.release(pair.before());
    }

    if constexpr (kPass == ProductPass::kInputBackward) {
      for (int layer = 0; layer < shape.num_pairs; ++layer) {
        if (layer > 0) {
          // All threads of the group have read the layer before when its buffer is given back.
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
        if constexpr (kPass == ProductPass::kBackward) {
          cross_backward<Value>(lane, sum, first, first + kTileBytes, column_sums);
        } else {
          rectified_backward<Value>(lane, sum, first, column_sums);
        }
        put_sums(lane, column_sums, at.sums, sums + column, shape.num_columns - column,
                 tile == block.first_tile, tile + 1 == block.end_tile);
      }
      pair.next();
    }
    // Every thread fences its own stores, then all wait, then one thread issues the copy.
    show_writes();
    sync_threads(1 + lane.group, kGroupThreads);
    if (Lane::is_first()) {
      const int row = block.first_row + lane.group * kGroupRows;
      const uint32_t source =
          at.pairs + pair.before() * 2 * kTileBytes + lane.group * kGroupRows * kTileRowBytes;
      if (row < shape.num_rows) {
        if constexpr (kPass == ProductPass::kInputBackward) {
          int part = shape.num_parts - 1;
          while (shape.first_tiles[part] > tile) --part;
          const int of_part = (tile - shape.first_tiles[part]) * kTileColumns;
          store_tile(maps.written[part], of_part, row, source);
        } else {
          store_tile(maps.written[0], column, row, source);
          if constexpr (kWritesPairs<kPass>) {
            store_tile(maps.written[1], column, row, source + kTileBytes);
          }
        }
      }
      commit_stores();
    }
  }
  // Shared memory must stay allocated until the last copies have read it.
  if (Lane::is_first()) wait_for_stores();
}

template <class Value, ProductPass kPass>
__global__ void __launch_bounds__(kThreads, 1)
    product_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Shape shape,
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
  // setmaxnreg is executed by whole warpgroups: the producer's gives registers back, which the
  // consumers' wait for.
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

// The number of blocks that share the columns of 128 rows, chosen so that the last block ends
// earliest. More blocks fill the last round of multiprocessors better, but each loads the left
// factor again.
int count_splits(int row_blocks, int num_tiles, int num_multiprocessors) {
  // The time of a block before its first tile (barriers, left factor), in tiles; approximate.
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

template <class Value, ProductPass kPass>
cudaError_t launch(const ProductTiles& tiles, const Maps& maps, const Shape& shape, int num_blocks,
                   cudaStream_t stream) {
  const auto kernel = product_kernel<Value, kPass>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout::kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<num_blocks, kThreads, Layout::kBytes, stream>>>(
      maps, shape, static_cast<const Value*>(tiles.bias), tiles.sums);
  return cudaGetLastError();
}

template <class Value>
cudaError_t launch_pass(const ProductTiles& tiles, const Maps& maps, const Shape& shape,
                        int num_blocks, cudaStream_t stream) {
  switch (tiles.pass) {
    case ProductPass::kFirstForward:
      return launch<Value, ProductPass::kFirstForward>(tiles, maps, shape, num_blocks, stream);
    case ProductPass::kForward:
      return launch<Value, ProductPass::kForward>(tiles, maps, shape, num_blocks, stream);
    case ProductPass::kBackward:
      return launch<Value, ProductPass::kBackward>(tiles, maps, shape, num_blocks, stream);
    case ProductPass::kInputBackward:
      return launch<Value, ProductPass::kInputBackward>(tiles, maps, shape, num_blocks, stream);
    default:
      return launch<Value, ProductPass::kRectified>(tiles, maps, shape, num_blocks, stream);
  }
}

}  // namespace

const char* launch_product(const ProductTiles& tiles, int device, void* stream) {
  static const Encode encode = find_encode();
  if (encode == nullptr) return "the driver has no cuTensorMapEncodeTiled";
  // The library links a CUDA runtime of its own, whose current device may not be torch's.
  int current = device, num_multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess && current != device) error = cudaSetDevice(device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return cudaGetErrorString(error);

  const bool is_forward =
      tiles.pass == ProductPass::kFirstForward || tiles.pass == ProductPass::kForward;
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
