// Sums the gradients of each run and updates its row; rows are float32.
//
// What it must move is two or four rows a run, scattered over the memory, so it is a matter of
// having enough of them on the way. Each warp keeps kSlots runs ahead: the copy engine brings their
// rows, states and first gradients to shared memory, which takes no registers and no waiting, while
// the warp updates the run whose turn it is. Where the runs after those lie is read before that.
//
// Byte floor, for L occurrences of U rows: the gradient row index of each occurrence, the gradient
// rows that the batch has (each read once, as far as the cache reaches), and
// 2 * U * D * 4 * (1 + states) for rows and their state, read and written.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "update_rows.h"

#pragma nv_diag_suppress 177  // on GPUs before Hopper nothing here is used

namespace torchembed {
namespace {

constexpr int kSgd = 0, kAdagrad = 1, kRowwiseAdagrad = 2;  // OptimizerKind
constexpr int kWarps = 8;
constexpr int kSlots = 8;
constexpr int kChunk = 32;  // run_sums.py
constexpr int kUnroll = 4;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

__device__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Shared memory that the copy engine fills, and knows to be full, once for each phase.
struct Arrival {
  uint64_t* barrier;

  __device__ void init() const {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)));
  }

  __device__ void expect(uint32_t num_bytes) const {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
        "r"(num_bytes)
        : "memory");
  }

  // Begins to copy `num_bytes`, a multiple of 16, between addresses that are multiples of 16.
  __device__ void copy(void* to, const void* from, uint32_t num_bytes, uint64_t policy) const {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
        "l"(__cvta_generic_to_global(from)), "r"(num_bytes), "r"(shared_address(barrier)),
        "l"(policy)
        : "memory");
  }

  __device__ void wait(uint32_t phase) const {
    asm volatile(
        "{\n"
        ".reg .pred arrived;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 arrived, [%0], %1;\n"
        "@!arrived bra again;\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(phase)
        : "memory");
  }
};

__device__ uint64_t evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ uint64_t evict_normally() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Four elements of a row.
struct Four {
  float at[4];

  __device__ void add(const Four& other) {
#pragma unroll
    for (int i = 0; i < 4; ++i) at[i] += other.at[i];
  }
  __device__ void scale(float factor) {
#pragma unroll
    for (int i = 0; i < 4; ++i) at[i] *= factor;
  }
};

__device__ Four load_four(const float* from) {
  const float4 found = *reinterpret_cast<const float4*>(from);
  return {found.x, found.y, found.z, found.w};
}

__device__ Four load_four(const __nv_bfloat16* from) {
  const uint2 found = *reinterpret_cast<const uint2*>(from);
  return {__uint_as_float(found.x << 16), __uint_as_float(found.x & 0xFFFF0000u),
          __uint_as_float(found.y << 16), __uint_as_float(found.y & 0xFFFF0000u)};
}

__device__ Four load_four(const __half* from) {
  const uint2 found = *reinterpret_cast<const uint2*>(from);
  const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&found.x));
  const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&found.y));
  return {low.x, low.y, high.x, high.y};
}

// Evicted first: no run comes back to its row.
__device__ void store_four(float* to, const Four& four) {
  __stcs(reinterpret_cast<float4*>(to),
         make_float4(four.at[0], four.at[1], four.at[2], four.at[3]));
}

__device__ int64_t index_at(const void* indices, bool wide, int64_t at) {
  return wide ? static_cast<const int64_t*>(indices)[at] : static_cast<const int32_t*>(indices)[at];
}

// A run as its lane knows it; length 0 past the last one.
struct Run {
  int64_t row = 0;
  int start = 0;
  int length = 0;
  int64_t gradient_row = 0;  // of the first occurrence after the chunks
  float scale = 1.0f;
  float row_state = 0.0f;
};

__device__ Run find_run(const RowUpdate& update, int64_t run, int num_runs) {
  Run found;
  if (run < num_runs) {
    found.row = index_at(update.unique_rows, update.rows_are_wide, run);
    found.start = update.starts[run];
    found.length = update.starts[run + 1] - found.start;
  }
  return found;
}

template <int kOptimizer>
__device__ void find_gradient(const RowUpdate& update, Run& run) {
  const int rest = run.length % kChunk;
  if (rest > 0) {
    const int64_t first = run.start + (run.length - rest);
    run.gradient_row = index_at(update.gradient_rows, update.gradient_rows_are_wide, first);
    if (update.scales != nullptr) run.scale = update.scales[first];
  }
  if (kOptimizer == kRowwiseAdagrad && run.length > 0) run.row_state = update.state[run.row];
}

template <class Grad, int kOptimizer, int kParts>
struct Slot {
  // As bytes, so that a slot holds rows of any length up to 128 * kParts elements.
  char* memory;
  int dim;

  static __device__ int size(int dim) {
    return dim * (4 + (kOptimizer == kAdagrad ? 4 : 0) + static_cast<int>(sizeof(Grad)));
  }
  __device__ float* weight() const { return reinterpret_cast<float*>(memory); }
  __device__ float* state() const { return weight() + dim; }
  __device__ Grad* grad() const {
    return reinterpret_cast<Grad*>(weight() + (kOptimizer == kAdagrad ? 2 : 1) * dim);
  }

  __device__ void fill(const RowUpdate& update, const Run& run, Arrival arrival) const {
    const uint64_t once = evict_first(), often = evict_normally();
    const uint32_t row_bytes = dim * 4, grad_bytes = dim * sizeof(Grad);
    const bool has_rest = run.length % kChunk != 0;
    arrival.expect(row_bytes * (kOptimizer == kAdagrad ? 2 : 1) + (has_rest ? grad_bytes : 0));
    arrival.copy(weight(), update.weight + run.row * dim, row_bytes, once);
    if (kOptimizer == kAdagrad) {
      arrival.copy(state(), update.state + run.row * dim, row_bytes, once);
    }
    if (has_rest) {
      const Grad* const from = static_cast<const Grad*>(update.grad) + run.gradient_row * dim;
      arrival.copy(grad(), from, grad_bytes, often);
    }
  }
};

// Adds `count` rows that lie one after the other.
template <int kParts>
__device__ void add_rows(Four (&total)[kParts], const float* rows, int64_t count, int dim,
                         int column) {
  for (int64_t first = 0; first < count; first += kUnroll) {
    Four four[kUnroll][kParts];
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const bool inside = first + step < count && column + part * 128 < dim;
        four[step][part] =
            inside ? load_four(rows + (first + step) * dim + column + part * 128) : Four{};
      }
    }
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) {
      if (first + step < count) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) total[part].add(four[step][part]);
      }
    }
  }
}

// Adds the gradients of `count` < kChunk sorted positions from `start` on. All lanes call it.
template <class Grad, int kParts>
__device__ void add_occurrences(Four (&total)[kParts], const RowUpdate& update, int64_t start,
                                int count, int column) {
  const int lane = threadIdx.x % 32, dim = update.dim;
  int64_t gradient_row = 0;
  float scale = 1.0f;
  if (lane < count) {
    gradient_row = index_at(update.gradient_rows, update.gradient_rows_are_wide, start + lane);
    if (update.scales != nullptr) scale = update.scales[start + lane];
  }
  for (int first = 0; first < count; first += kUnroll) {
    Four four[kUnroll][kParts];
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) {
      const int64_t row = __shfl_sync(kAllLanes, gradient_row, (first + step) % 32);
      const Grad* const from = static_cast<const Grad*>(update.grad) + row * dim + column;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const bool inside = first + step < count && column + part * 128 < dim;
        four[step][part] = inside ? load_four(from + part * 128) : Four{};
      }
    }
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) {
      const float factor = __shfl_sync(kAllLanes, scale, (first + step) % 32);
      if (first + step < count) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          if (update.scales != nullptr) four[step][part].scale(factor);
          total[part].add(four[step][part]);
        }
      }
    }
  }
}

template <class Grad, int kOptimizer, int kParts, int kMinBlocks>
__global__ void __launch_bounds__(kWarps * 32, kMinBlocks) update_kernel(const RowUpdate update) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  using RunSlot = Slot<Grad, kOptimizer, kParts>;
  extern __shared__ __align__(128) char shared[];
  __shared__ uint64_t barriers[kWarps][kSlots];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, dim = update.dim;
  const int column = lane * 4;
  const int slot_size = RunSlot::size(dim);
  char* const of_warp = shared + warp * kSlots * slot_size;
  const auto slot_at = [&](int slot) { return RunSlot{of_warp + slot * slot_size, dim}; };
  const auto arrival_at = [&](int slot) { return Arrival{&barriers[warp][slot]}; };

  if (lane < kSlots) {
    arrival_at(lane).init();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncwarp();
  const bool skips = update.skip != nullptr && *update.skip != 0.0f;
  const int num_runs = skips ? 0 : *update.num_runs;
  const float lr = *update.lr;
  const float multiplier = update.grad_multiplier == nullptr ? 1.0f : *update.grad_multiplier;

  // Lane k has the k-th run of a block of kSlots.
  const auto find_block = [&](int64_t block) {
    return find_run(update, lane < kSlots ? block * kSlots + lane : num_runs, num_runs);
  };
  const int64_t stride = int64_t{gridDim.x} * kWarps;
  int64_t block = int64_t{blockIdx.x} * kWarps + warp;
  Run run = find_block(block), next = find_block(block + stride);
  find_gradient<kOptimizer>(update, run);
  if (run.length > 0) slot_at(lane).fill(update, run, arrival_at(lane));
  find_gradient<kOptimizer>(update, next);

  for (uint32_t phase = 0; block * kSlots < num_runs; block += stride, phase ^= 1) {
    Run later = find_block(block + 2 * stride);
    for (int slot = 0; slot < kSlots; ++slot) {
      const int length = __shfl_sync(kAllLanes, run.length, slot);
      if (length == 0) break;
      if (slot == kSlots / 2) find_gradient<kOptimizer>(update, later);
      const RunSlot mine = slot_at(slot);
      const int rest = length % kChunk;
      arrival_at(slot).wait(phase);
      Four old[kParts], state[kParts], first[kParts];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int at = column + part * 128;
        const bool inside = at < dim;
        old[part] = inside ? load_four(mine.weight() + at) : Four{};
        if (kOptimizer == kAdagrad) state[part] = inside ? load_four(mine.state() + at) : Four{};
        first[part] = inside && rest > 0 ? load_four(mine.grad() + at) : Four{};
      }
      __syncwarp();
      if (lane == slot && next.length > 0) mine.fill(update, next, arrival_at(slot));

      const int64_t row = __shfl_sync(kAllLanes, run.row, slot);
      const int64_t start = __shfl_sync(kAllLanes, run.start, slot);
      const float scale = __shfl_sync(kAllLanes, run.scale, slot);
      Four total[kParts] = {};
      if (length >= kChunk) {
        const int64_t num_chunks = length / kChunk, num_groups = num_chunks / kChunk;
        const int64_t chunk = start / kChunk, group = chunk / kChunk;
        add_rows(total, update.group_sums + group * dim, num_groups, dim, column);
        const int64_t in_groups = num_groups * kChunk;
        add_rows(total, update.chunk_sums + (chunk + in_groups) * dim, num_chunks - in_groups, dim,
                 column);
      }
      if (rest > 0) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          if (update.scales != nullptr) first[part].scale(scale);
          total[part].add(first[part]);
        }
      }
      if (rest > 1) {
        add_occurrences<Grad>(total, update, start + (length - rest) + 1, rest - 1, column);
      }

      float squares = 0.0f;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float gradient = total[part].at[i];
          if (update.grad_multiplier != nullptr) gradient *= multiplier;
          if (update.max_gradient > 0.0f) {
            // By comparisons, so that NaN stays NaN.
            if (gradient > update.max_gradient) gradient = update.max_gradient;
            if (gradient < -update.max_gradient) gradient = -update.max_gradient;
          }
          if (update.weight_decay != 0.0f) gradient += update.weight_decay * old[part].at[i];
          total[part].at[i] = gradient;
          squares += gradient * gradient;
        }
      }
      float root = 0.0f;
      if (kOptimizer == kRowwiseAdagrad) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
          squares += __shfl_xor_sync(kAllLanes, squares, step);
        }
        const float before = __shfl_sync(kAllLanes, run.row_state, slot);
        const float row_total = before + squares / static_cast<float>(dim);
        if (lane == 0) update.state[row] = row_total;
        root = sqrtf(row_total) + update.eps;
      }
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float gradient = total[part].at[i];
          float change = gradient;
          if (kOptimizer == kAdagrad) {
            state[part].at[i] += gradient * gradient;
            change = gradient / (sqrtf(state[part].at[i]) + update.eps);
          } else if (kOptimizer == kRowwiseAdagrad) {
            change = gradient / root;
          }
          old[part].at[i] -= lr * change;
        }
        const int at = column + part * 128;
        if (at < dim) {
          store_four(update.weight + row * dim + at, old[part]);
          if (kOptimizer == kAdagrad) store_four(update.state + row * dim + at, state[part]);
        }
      }
    }
    run = next;
    next = later;
  }
#endif
}

template <class Grad, int kOptimizer, int kParts>
cudaError_t launch(const RowUpdate& update, int device, cudaStream_t stream) {
  // As many as shared memory has room for where a row has 128 columns.
  constexpr int kMinBlocks = kParts > 1 ? 1 : kOptimizer == kAdagrad ? 2 : 3;
  constexpr auto kernel = update_kernel<Grad, kOptimizer, kParts, kMinBlocks>;
  const int shared_bytes = kWarps * kSlots * update.dim *
                           (4 + (kOptimizer == kAdagrad ? 4 : 0) + static_cast<int>(sizeof(Grad)));
  int blocks_per_sm = 0, num_sms = 0;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_per_sm, kernel, kWarps * 32,
                                                          shared_bytes);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return error;
  constexpr int64_t kRunsPerBlock = kWarps * kSlots;
  const int64_t most = (update.num_ids + kRunsPerBlock - 1) / kRunsPerBlock;
  const int64_t fitting = int64_t{blocks_per_sm} * num_sms;
  kernel<<<static_cast<int>(most < fitting ? most : fitting), kWarps * 32, shared_bytes, stream>>>(
      update);
  return cudaGetLastError();
}

template <class Grad, int kOptimizer>
cudaError_t launch_parts(const RowUpdate& update, int device, cudaStream_t stream) {
  return update.dim <= 128 ? launch<Grad, kOptimizer, 1>(update, device, stream)
                           : launch<Grad, kOptimizer, kMaxUpdateDim / 128>(update, device, stream);
}

template <class Grad>
cudaError_t launch_rule(const RowUpdate& update, int64_t optimizer, int device,
                        cudaStream_t stream) {
  switch (optimizer) {
    case kSgd:
      return launch_parts<Grad, kSgd>(update, device, stream);
    case kAdagrad:
      return launch_parts<Grad, kAdagrad>(update, device, stream);
    case kRowwiseAdagrad:
      return launch_parts<Grad, kRowwiseAdagrad>(update, device, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

const char* update_rows(const RowUpdate& update, GradType grad_type, int64_t optimizer, int device,
                        void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  int caller_device = device;
  cudaError_t error = cudaGetDevice(&caller_device);
  if (error == cudaSuccess && caller_device != device) error = cudaSetDevice(device);
  if (error == cudaSuccess) {
    switch (grad_type) {
      case GradType::kFloat32:
        error = launch_rule<float>(update, optimizer, device, queue);
        break;
      case GradType::kFloat16:
        error = launch_rule<__half>(update, optimizer, device, queue);
        break;
      case GradType::kBFloat16:
        error = launch_rule<__nv_bfloat16>(update, optimizer, device, queue);
        break;
    }
  }
  if (caller_device != device) cudaSetDevice(caller_device);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace torchembed
