// Instructions of GPUs of compute capability 9.0 for tiles of matrices: copies between global and
// shared memory that a single thread issues (cp.async.bulk.tensor), barriers in shared memory that
// these copies complete (mbarrier), and matrix products of warpgroups of four warps (wgmma).
//
// Tiles hold 16-bit numbers in 64 columns, so rows of 128 bytes. An octet is 8 neighbouring numbers
// of a row, 16 bytes. Octets are swizzled (octet o of row r is stored at o ^ r % 8), so that the
// same octet of eight successive rows lies in different banks: reading down a column would
// otherwise have eight-way bank conflicts.

#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace torchembed {
namespace {

constexpr int kTileColumns = 64, kTileRowBytes = 2 * kTileColumns;
constexpr int kGroupThreads = 128;

__device__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ void init_barrier(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

// Makes initialized barriers visible to the threads that wait at them and to the copy engine, which
// accesses shared memory through another proxy (the async proxy). __syncthreads must follow.
__device__ void show_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Arrives, and makes the barrier's phase end only when num_bytes of copies have completed too. It
// is one operation: between an arrival and a separate expectation the phase could end.
__device__ void expect_bytes(uint32_t barrier, uint32_t num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(num_bytes)
               : "memory");
}

__device__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Waits until the phase of `parity` is over. A barrier tells phases apart by parity alone, so a
// thread must wait for each of them: one that skips a phase may pass the next wait at once.
// try_wait gives up after a time limit of the hardware, hence the loop.
__device__ void wait_for(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Named barriers of whole warps: sync_threads waits, arrive_threads only counts the warp and goes
// on. Barrier 0 is that of __syncthreads.
__device__ void sync_threads(int barrier, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}

__device__ void arrive_threads(int barrier, int num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}

__device__ void load_tile(uint32_t target, const CUtensorMap& map, int column, int row,
                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], [%4];" ::"r"(target),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// Copies a tile that threads have written to shared memory to the matrix. Each of these threads
// must have called show_writes, and a barrier of all of them must lie in between: the copy engine
// does not see plain stores that were not fenced.
__device__ void store_tile(const CUtensorMap& map, int column, int row, uint32_t source) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
      "r"(column), "r"(row), "r"(source)
      : "memory");
}

__device__ void show_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all copies to global memory of this thread have read shared memory, so that it can be
// overwritten. They need not be visible in global memory yet (.read): the end of the kernel sees to
// that.
__device__ void wait_for_stores() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Byte offset in a tile of the pair of numbers at row `row`, columns 8 * octet + 2 * pair and the
// next. It holds for tiles that begin at a multiple of 1024 bytes, since the hardware swizzles by
// address bits.
__device__ uint32_t place_in_tile(uint32_t row, uint32_t octet, uint32_t pair) {
  return row * kTileRowBytes + (octet ^ row % 8) * 16 + pair * 4;
}

__device__ uint32_t load_shared(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ void store_shared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

template <class Value>
__device__ float2 unpacked(uint32_t pair) {
  if constexpr (std::is_same_v<Value, __nv_bfloat16>) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)};
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
}

template <class Value>
__device__ uint32_t packed(float low, float high) {
  if constexpr (std::is_same_v<Value, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// The matrix descriptor by which wgmma finds a tile in shared memory: its address, the distance
// between groups of 8 rows, which follow each other, and the mode of swizzling (1: 128 bytes). The
// leading byte offset means nothing for a tile that is one swizzled row wide, and is 1. Addresses
// have 18 bits, and all distances are in units of 16 bytes.
__device__ uint64_t tile_descriptor(uint32_t address) {
  constexpr uint64_t kGroupStride = 8 * kTileRowBytes, kSwizzle = 1;
  return (address & 0x3FFFF) >> 4 | uint64_t{1} << 16 | kGroupStride >> 4 << 32 | kSwizzle << 62;
}

// wgmma is asynchronous. begin_products orders earlier accesses to its registers before it,
// commit_products makes a group of the products so far, and wait_for_products waits until all but
// the last kNumLeft groups are done. Until then neither the registers of the sum may be read nor
// the tiles be overwritten.
__device__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kNumLeft>
__device__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kNumLeft) : "memory");
}

// Of all, whose sum is read only after that.
__device__ void wait_for_sum(float (&sum)[32]) {
  wait_for_products<0>();
#pragma unroll
  for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}

#define TORCHEMBED_WGMMA(TYPE)                                                                    \
  asm volatile(                                                                                   \
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %37, 0;\n"                                          \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE                                 \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "   \
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, "  \
      "%36, adds, 1, 1, %38;\n}\n"                                                                \
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]),       \
        "+f"(sum[6]), "+f"(sum[7]), "+f"(sum[8]), "+f"(sum[9]), "+f"(sum[10]), "+f"(sum[11]),     \
        "+f"(sum[12]), "+f"(sum[13]), "+f"(sum[14]), "+f"(sum[15]), "+f"(sum[16]), "+f"(sum[17]), \
        "+f"(sum[18]), "+f"(sum[19]), "+f"(sum[20]), "+f"(sum[21]), "+f"(sum[22]), "+f"(sum[23]), \
        "+f"(sum[24]), "+f"(sum[25]), "+f"(sum[26]), "+f"(sum[27]), "+f"(sum[28]), "+f"(sum[29]), \
        "+f"(sum[30]), "+f"(sum[31])                                                              \
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(adds),            \
        "n"(kTransposed))

// sum [64, 64] of a group of warps = left [64, 16] @ right [16, 64], or added to it. A lane holds,
// for each j < 8, the pairs (4 j, 4 j + 1) and (4 j + 2, 4 j + 3) of `sum`: from column 8 j + 2 *
// (lane % 4) on, of rows lane / 4 and lane / 4 + 8 of the warp's 16; and pairs of `left` of these
// rows, columns 2 * (lane % 4) and the same plus 8: first both rows, then both rows. The right
// factor is a tile [64 columns, 64] of which 16 count, or a tile [16, 64 columns] if kTransposed.
template <class Value, int kTransposed>
__device__ void multiply(float (&sum)[32], const uint32_t (&left)[4], uint64_t right, int adds) {
  if constexpr (std::is_same_v<Value, __nv_bfloat16>) {
    TORCHEMBED_WGMMA("bf16");
  } else {
    TORCHEMBED_WGMMA("f16");
  }
}

#undef TORCHEMBED_WGMMA

}  // namespace
}  // namespace torchembed
