// A stable radix sort of a batch's rows, from the lowest digit to the highest, over only the bits
// that rows use.
//
// A pass works on tiles of ids in parallel, in three kernels: the first counts the digits of each
// tile, the second sums the counts of each digit over the tiles before, and the third scatters
// every id to its position. No block waits for another one within a kernel (no decoupled
// look-back), so that the same kernels serve ten thousand ids, where each must be short, and tens
// of millions.
//
// Byte floor of a pass over L ids: each row read twice and written once, each position read (but in
// the first pass) and written once: 20 * L bytes, which mostly stay in the second-level cache.

#include <cuda_runtime.h>

#include "sort_rows.h"

namespace torchembed {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kDigitBits = 9;
constexpr int kNumDigits = 1 << kDigitBits;
static_assert(kNumDigits == kThreads, "each thread owns one digit");
// Blocks on a multiprocessor at a time; the compiler limits registers to what lets so many fit.
constexpr int kBlocks = 2;
// Ids of a thread, and so the size of a tile. Small batches take small tiles, so that there are
// enough of them for all multiprocessors of an H100 or H200; large ones take large tiles, whose
// stores are longer runs of neighbouring addresses.
constexpr int kFewItems = 2;
constexpr int kSomeItems = 7;
constexpr int kManyItems = 14;
constexpr int64_t kSomeIds = int64_t{1} << 17;
constexpr int64_t kManyIds = int64_t{1} << 20;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// The sorting key of a row: as an unsigned number row -1, a padding id, comes first.
template <class Row>
__device__ uint32_t key_of(Row row) {
  return static_cast<uint32_t>(row) + 1u;
}

struct Digit {
  int shift;
  uint32_t mask;

  __device__ int of(uint32_t key) const { return static_cast<int>((key >> shift) & mask); }
};

// The number of ids that are sorted: those before *count, or all.
__device__ int64_t num_sorted(int64_t num_ids, const int64_t* count) {
  return count == nullptr ? num_ids : min(num_ids, *count);
}

// Writes counts[digit * num_tiles + tile], the number of the tile's ids whose row has the digit.
// Counts of one digit are neighbours, since sum_counts sums over tiles.
template <int kItems, class Row>
__global__ void __launch_bounds__(kThreads)
    count_digits(const Row* __restrict__ rows, int64_t most_ids, const int64_t* num_used,
                 int num_tiles, Digit digit, uint32_t* __restrict__ counts) {
  __shared__ uint32_t count[kNumDigits];
  const int64_t num_ids = num_sorted(most_ids, num_used);
  const int thread = threadIdx.x;
  const int64_t first = int64_t{blockIdx.x} * kThreads * kItems;
  uint32_t keys[kItems];
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int64_t index = first + item * kThreads + thread;
    keys[item] = index < num_ids ? key_of(rows[index]) : 0;
  }
  count[thread] = 0;
  __syncthreads();
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    if (first + item * kThreads + thread < num_ids) atomicAdd(&count[digit.of(keys[item])], 1u);
  }
  __syncthreads();
  counts[int64_t{thread} * num_tiles + blockIdx.x] = count[thread];
}

// Replaces each digit's counts by the sums over the tiles before (an exclusive scan, one warp for
// each digit), and writes the sum over all tiles to totals[digit].
__global__ void sum_counts(uint32_t* __restrict__ counts, int num_tiles,
                           uint32_t* __restrict__ totals) {
  const int lane = threadIdx.x % 32;
  const int digit = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  uint32_t* const of_digit = counts + int64_t{digit} * num_tiles;
  uint32_t before = 0;
  for (int first = 0; first < num_tiles; first += 32) {
    const int tile = first + lane;
    const uint32_t count = tile < num_tiles ? of_digit[tile] : 0;
    uint32_t up_to = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t other = __shfl_up_sync(kAllLanes, up_to, step);
      if (lane >= step) up_to += other;
    }
    if (tile < num_tiles) of_digit[tile] = before + up_to - count;
    before += __shfl_sync(kAllLanes, up_to, 31);
  }
  if (lane == 0) totals[digit] = before;
}

// The sum of `value` over the threads before this one. All threads of the block call it.
__device__ uint64_t sum_before(uint64_t value) {
  __shared__ uint64_t warp_sums[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint64_t up_to = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t other = __shfl_up_sync(kAllLanes, up_to, step);
    if (lane >= step) up_to += other;
  }
  if (lane == 31) warp_sums[warp] = up_to;
  __syncthreads();
  uint64_t before = up_to - value;
#pragma unroll
  for (int other = 0; other < kWarps; ++other) before += other < warp ? warp_sums[other] : 0;
  return before;
}

// Shared memory of a block that scatters a tile. A union, since the second use begins when the
// first one is over.
template <int kItems>
union Tile {
  // The number of ids of each digit that a warp has; then the position of the warp's first one in
  // the sorted tile.
  uint32_t of_warp[kWarps][kNumDigits];
  // Then the tile itself in its new order. From there neighbouring threads store ids of one digit
  // to neighbouring addresses, where a scatter from registers would store each to a line of its
  // own.
  struct {
    uint32_t keys[kThreads * kItems];
    int32_t positions[kThreads * kItems];
  } sorted;
};

// Scatters the ids of a tile to their positions. The sort is stable: a warp holds successive ids,
// its ids come before those of the next warp, and it ranks 32 of them at a time in order.
template <int kItems, class Row, bool kFirstPass>
__global__ void __launch_bounds__(kThreads, kBlocks)
    move_by_digit(const Row* __restrict__ rows, const int32_t* __restrict__ positions,
                  int64_t most_ids, const int64_t* num_used, int num_tiles, Digit digit,
                  const uint32_t* __restrict__ counts_before, const uint32_t* __restrict__ totals,
                  int32_t* __restrict__ moved_rows, int32_t* __restrict__ moved_positions) {
  constexpr int kTile = kThreads * kItems;
  extern __shared__ __align__(16) char memory[];
  Tile<kItems>& shared = *reinterpret_cast<Tile<kItems>*>(memory);
  __shared__ uint32_t offset[kNumDigits];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int64_t tile_first = int64_t{blockIdx.x} * kTile;
  const int64_t num_ids = num_sorted(most_ids, num_used);
  if (tile_first >= num_ids) return;
  const int tile_size = static_cast<int>(min(int64_t{kTile}, num_ids - tile_first));
  const uint32_t before = counts_before[int64_t{thread} * num_tiles + blockIdx.x];
  const uint32_t total = totals[thread];

  uint32_t keys[kItems];
  const auto place_of = [&](int item) { return warp * (32 * kItems) + item * 32 + lane; };
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int place = place_of(item);
    // Positions past the end have the highest key and so the last ranks in the tile: they change
    // the rank of no id, and are not stored.
    keys[item] = place < tile_size ? key_of(rows[tile_first + place]) : 0xFFFFFFFFu;
  }
#pragma unroll
  for (int step = 0; step < kNumDigits / 32; ++step) shared.of_warp[warp][step * 32 + lane] = 0;
  __syncwarp();

  // The rank of each id among the warp's ids of its digit. `peers` are the lanes with the same
  // digit, found by one ballot for each bit. One of them adds to the counter of all, so no atomics
  // are needed and the order is fixed; __syncwarp keeps the next round from reading an old count.
  uint32_t rank[kItems];
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const uint32_t mine = digit.of(keys[item]);
    unsigned peers = kAllLanes;
#pragma unroll
    for (int bit = 0; bit < kDigitBits; ++bit) {
      const unsigned have = __ballot_sync(kAllLanes, (mine >> bit) & 1);
      peers &= (mine >> bit) & 1 ? have : ~have;
    }
    const int leader = __ffs(peers) - 1;
    uint32_t earlier = 0;
    if (lane == leader) {
      earlier = shared.of_warp[warp][mine];
      shared.of_warp[warp][mine] = earlier + __popc(peers);
    }
    __syncwarp();
    rank[item] = __shfl_sync(kAllLanes, earlier, leader) + __popc(peers & ((1u << lane) - 1));
  }
  // Loaded only now, so that they take no registers while ids are ranked.
  int32_t from[kItems];
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int place = place_of(item);
    if (kFirstPass) {
      from[item] = static_cast<int32_t>(tile_first + place);
    } else {
      from[item] = place < tile_size ? positions[tile_first + place] : 0;
    }
  }
  __syncthreads();

  uint32_t count = 0;
#pragma unroll
  for (int other = 0; other < kWarps; ++other) count += shared.of_warp[other][thread];
  // Two exclusive scans in one of 64 bits: over all ids of lower digits in the upper half, over the
  // tile's ids in the lower half. Neither half overflows, since there are fewer than 2**31 ids.
  // Modulo 2**32, offset[digit] plus a position in the sorted tile is the position in the output.
  const uint64_t lower = sum_before(static_cast<uint64_t>(total) << 32 | count);
  uint32_t place = static_cast<uint32_t>(lower);
  offset[thread] = static_cast<uint32_t>(lower >> 32) + before - place;
#pragma unroll
  for (int other = 0; other < kWarps; ++other) {
    const uint32_t of_other = shared.of_warp[other][thread];
    shared.of_warp[other][thread] = place;
    place += of_other;
  }
  __syncthreads();
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    rank[item] += shared.of_warp[warp][digit.of(keys[item])];
  }
  // All have read of_warp before `sorted` overwrites it.
  __syncthreads();
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    shared.sorted.keys[rank[item]] = keys[item];
    shared.sorted.positions[rank[item]] = from[item];
  }
  __syncthreads();
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int at = item * kThreads + thread;
    if (at < tile_size) {
      const uint32_t key = shared.sorted.keys[at];
      const int64_t to = static_cast<uint32_t>(offset[digit.of(key)] + at);
      moved_rows[to] = static_cast<int32_t>(key - 1u);
      moved_positions[to] = shared.sorted.positions[at];
    }
  }
}

int tile_ids(int64_t num_ids) {
  return kThreads * (num_ids < kSomeIds ? kFewItems : num_ids < kManyIds ? kSomeItems : kManyItems);
}

int64_t count_tiles(int64_t num_ids) {
  return (num_ids + tile_ids(num_ids) - 1) / tile_ids(num_ids);
}

struct Pairs {
  int32_t* rows;
  int32_t* positions;
};

template <int kItems, class Row, bool kFirstPass>
cudaError_t launch_pass(const Row* rows, const int32_t* positions, int64_t num_ids,
                        const int64_t* num_used, Digit digit, uint32_t* counts, Pairs to,
                        cudaStream_t stream) {
  const int num_tiles = static_cast<int>(count_tiles(num_ids));
  uint32_t* const totals = counts + int64_t{kNumDigits} * num_tiles;
  count_digits<kItems>
      <<<num_tiles, kThreads, 0, stream>>>(rows, num_ids, num_used, num_tiles, digit, counts);
  constexpr int kSumThreads = 128;
  sum_counts<<<kNumDigits * 32 / kSumThreads, kSumThreads, 0, stream>>>(counts, num_tiles, totals);
  constexpr auto move = move_by_digit<kItems, Row, kFirstPass>;
  constexpr int kBytes = sizeof(Tile<kItems>);
  const cudaError_t error =
      cudaFuncSetAttribute(move, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  move<<<num_tiles, kThreads, kBytes, stream>>>(rows, positions, num_ids, num_used, num_tiles,
                                                digit, counts, totals, to.rows, to.positions);
  return cudaGetLastError();
}

template <int kItems, class Row>
cudaError_t launch_passes(const Row* rows, int64_t num_ids, const int64_t* num_used,
                          int64_t num_rows, Pairs sorted, Pairs spare, uint32_t* counts,
                          cudaStream_t stream) {
  int key_bits = 1;  // keys lie in [0, num_rows]
  while (num_rows >> key_bits) ++key_bits;
  // As few passes as possible, then digits of equal width: a narrower last digit would save
  // nothing.
  const int num_passes = (key_bits + kDigitBits - 1) / kDigitBits;
  const int digit_bits = (key_bits + num_passes - 1) / num_passes;
  const auto digit_at = [&](int pass) { return Digit{pass * digit_bits, (1u << digit_bits) - 1u}; };
  // Passes alternate between two buffers so that the last one writes to `sorted`.
  const auto target = [&](int pass) { return (num_passes - pass) % 2 == 1 ? sorted : spare; };
  cudaError_t error = launch_pass<kItems, Row, true>(rows, nullptr, num_ids, num_used, digit_at(0),
                                                     counts, target(0), stream);
  for (int pass = 1; pass < num_passes && error == cudaSuccess; ++pass) {
    const Pairs from = target(pass - 1);
    error = launch_pass<kItems, int32_t, false>(from.rows, from.positions, num_ids, num_used,
                                                digit_at(pass), counts, target(pass), stream);
  }
  return error;
}

}  // namespace

int64_t sort_scratch_size(int64_t num_ids) {
  return 2 * num_ids + kNumDigits * (count_tiles(num_ids) + 1);
}

const char* sort_rows(const void* rows, bool rows_are_wide, int64_t num_ids, const int64_t* count,
                      int64_t num_rows, int32_t* sorted_rows, int32_t* order, int32_t* scratch,
                      int device, void* stream) {
  // The library links a CUDA runtime of its own, whose current device may not be torch's, which the
  // caller has set.
  int current = device;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess && current != device) error = cudaSetDevice(device);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  const Pairs sorted{sorted_rows, order}, spare{scratch, scratch + num_ids};
  uint32_t* const counts = reinterpret_cast<uint32_t*>(scratch + 2 * num_ids);
  const auto launch = [&](const auto* typed_rows) {
    const auto launch_with = [&]<int kItems>() {
      return launch_passes<kItems>(typed_rows, num_ids, count, num_rows, sorted, spare, counts,
                                   static_cast<cudaStream_t>(stream));
    };
    if (num_ids < kSomeIds) return launch_with.template operator()<kFewItems>();
    if (num_ids < kManyIds) return launch_with.template operator()<kSomeItems>();
    return launch_with.template operator()<kManyItems>();
  };
  error = rows_are_wide ? launch(static_cast<const int64_t*>(rows))
                        : launch(static_cast<const int32_t*>(rows));
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace torchembed
