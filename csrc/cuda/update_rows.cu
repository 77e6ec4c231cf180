// Sums the gradients of each run and updates its row; rows are float32.
//
// What it must move is two or four rows a run, scattered over the memory, so it is a matter of
// having enough of them on the way, and of few instructions for each. A warp takes blocks of kRuns
// runs. While it updates one, rows, states and first gradients of the next are on their way to
// shared memory, which takes no registers; and for those that follow, what tells where these lie:
// one link of the chain (bounds of the run, positions, gradient rows) for each block ahead.
//
// Byte floor, for L occurrences of U rows: position and gradient row index of each occurrence, the
// gradient rows that the batch has (each read once, as far as the cache reaches), and
// 2 * U * D * 4 * (1 + states) for rows and their state, read and written.

#include <cuda_runtime.h>

#include "row_elements.cuh"
#include "update_rows.h"

#pragma nv_diag_suppress 177  // on GPUs before Ampere nothing here is used

namespace torchembed {
namespace {

constexpr int kSgd = 0, kAdagrad = 1, kRowwiseAdagrad = 2;  // OptimizerKind
constexpr int kMaxWarps = 20;
constexpr int kRuns = 8;
// Of a run's occurrences so many are looked up ahead, by a lane each.
constexpr int kAhead = 32 / kRuns;
// Where warps begin: so that what takes long comes at different times, also where rows with many
// occurrences follow on each other.
constexpr uint32_t kPhases = 8;

// How a warp shares the runs of a step.
template <int kDim>
struct Shape {
  static constexpr int kLanes = kDim < 64 ? kDim / 4 : 16;  // of a run
  static constexpr int kRunsOfStep = 32 / kLanes;
  static constexpr int kSteps = kRuns / kRunsOfStep;
  // Of a row a lane takes kParts vectors of 4 elements, which lie kStride elements apart.
  static constexpr int kStride = kLanes * 4;
  static constexpr int kParts = kDim / kStride;

  static __device__ int group() { return threadIdx.x % 32 / kLanes; }
  static __device__ int lane() { return threadIdx.x % kLanes; }
};

template <int kParts>
struct Elements {
  float at[kParts][4];
};

template <int kParts, class Function>
__device__ void for_each_element(const Function& function) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < 4; ++i) function(part, i);
  }
}

// A lane's elements of a row as they lie in memory.
template <class Value, int kDim>
struct Packed {
  static constexpr int kParts = Shape<kDim>::kParts;
  Four<Value> at[kParts];

  // `row` is the lane's own first element of it.
  __device__ void load(const Value* row) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      at[part] = *reinterpret_cast<const Four<Value>*>(row + part * Shape<kDim>::kStride);
    }
  }

  __device__ Elements<kParts> elements() const {
    Elements<kParts> found;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      unpack(found.at[part], at[part], static_cast<const Value*>(nullptr));
    }
    return found;
  }
};

template <int kDim, class Value>
__device__ Elements<Shape<kDim>::kParts> load_elements(const Value* row) {
  Packed<Value, kDim> packed;
  packed.load(row);
  return packed.elements();
}

template <int kDim>
__device__ void store_elements(float* row, const Elements<Shape<kDim>::kParts>& elements) {
#pragma unroll
  for (int part = 0; part < Shape<kDim>::kParts; ++part) {
    const float (&four)[4] = elements.at[part];
    *reinterpret_cast<float4*>(row + part * Shape<kDim>::kStride) =
        make_float4(four[0], four[1], four[2], four[3]);
  }
}

// Begins to copy 16 bytes to shared memory.
__device__ void copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}

__device__ void end_step_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until no more than `kPending` steps of copies are on their way.
template <int kPending>
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
  __syncwarp();
}

// A run as one of its kAhead lanes knows it: all of it, and one of its occurrences.
struct Run {
  int row = 0;
  int start = 0;
  int end = 0;           // equal to `start` past the last run
  int gradient_row = 0;  // until it is known, the position in the batch
  float scale = 1.0f;
  float row_state = 0.0f;

  // Occurrences after the whole chunks.
  __device__ int rest() const { return (end - start) % kChunk; }

  __device__ void find_bounds(const RowUpdate& update, uint32_t block, uint32_t num_runs) {
    const uint32_t run = block * kRuns + threadIdx.x % 32 / kAhead;
    *this = Run{};
    if (run < num_runs) {
      row = index_at(update.unique_rows, update.rows_are_wide, run);
      start = update.starts[run];
      end = update.starts[run + 1];
    }
  }

  template <int kOptimizer>
  __device__ void find_position(const RowUpdate& update) {
    const int ahead = threadIdx.x % kAhead;
    if (ahead < rest()) gradient_row = update.order[end - rest() + ahead];
    if (kOptimizer == kRowwiseAdagrad && start < end) row_state = update.state[row];
  }

  __device__ void find_gradient(const RowUpdate& update) {
    if (static_cast<int>(threadIdx.x % kAhead) < rest()) {
      if (update.scales != nullptr) scale = update.scales[gradient_row];
      if (update.gradient_rows != nullptr) {
        gradient_row = index_at(update.gradient_rows, update.gradient_rows_are_wide, gradient_row);
      }
    }
  }
};

// The blocks of a warp: every stride-th one, from somewhere in their middle on, then from the
// first.
struct Blocks {
  uint32_t first;
  uint32_t stride;
  uint32_t count;
  uint32_t offset;

  __device__ Blocks(uint32_t num_runs) {
    const uint32_t warps = blockDim.x / 32, num_blocks = (num_runs + kRuns - 1) / kRuns;
    first = blockIdx.x * warps + threadIdx.x / 32;
    stride = gridDim.x * warps;
    count = num_blocks > first ? (num_blocks - first + stride - 1) / stride : 0;
    offset = count / kPhases * (blockIdx.x % kPhases);
  }

  // The warp's `index`-th block; past its last one, one past all runs.
  __device__ uint32_t at(uint32_t index) const {
    if (index >= count) return 0xFFFFFFFFu / kRuns;
    const uint32_t rotated = index + offset;
    return first + (rotated < count ? rotated : rotated - count) * stride;
  }
};

// Shared memory for what a step takes of global memory.
template <class Grad, int kOptimizer, int kDim>
struct Slot {
  using Of = Shape<kDim>;
  static constexpr int kStates = kOptimizer == kAdagrad ? 1 : 0;
  // Half of the banks' width more, so that two runs' 16-bit gradients lie in different banks.
  static constexpr int kGradBytes =
      kDim * static_cast<int>(sizeof(Grad)) + (sizeof(Grad) == 2 && Of::kLanes < 16 ? 64 : 0);
  static constexpr int kBytes = (kDim * 4 * (1 + kStates) + kGradBytes) * Of::kRunsOfStep;

  char* memory;

  __device__ float* weight() const { return reinterpret_cast<float*>(memory) + Of::group() * kDim; }
  __device__ float* state() const { return weight() + Of::kRunsOfStep * kDim; }
  __device__ Grad* grad() const {
    return reinterpret_cast<Grad*>(memory + Of::kRunsOfStep * kDim * 4 * (1 + kStates) +
                                   Of::group() * kGradBytes);
  }

  // Begins to copy what step `step` of a block needs.
  __device__ void fill(const RowUpdate& update, const Run& run, int step) const {
    const int source = (step * Of::kRunsOfStep + Of::group()) * kAhead;
    const int row = __shfl_sync(kAllLanes, run.row, source);
    const int length = __shfl_sync(kAllLanes, run.end - run.start, source);
    const int gradient_row = __shfl_sync(kAllLanes, run.gradient_row, source);
    if (length > 0) {
      const int column = Of::lane() * 4;
      const int64_t first = int64_t{row} * kDim + column;
#pragma unroll
      for (int part = 0; part < Of::kParts; ++part) {
        const int at = part * Of::kStride;
        copy_async(weight() + column + at, update.weight + first + at);
        if (kStates > 0) copy_async(state() + column + at, update.state + first + at);
      }
    }
    if (length % kChunk != 0) {
      constexpr int kVector = 16 / sizeof(Grad);
      const int column = Of::lane() * kVector;
      const Grad* const from =
          static_cast<const Grad*>(update.grad) + int64_t{gradient_row} * kDim + column;
#pragma unroll
      for (int at = 0; at < kDim; at += Of::kLanes * kVector) {
        if (column + at < kDim) copy_async(grad() + column + at, from + at);
      }
    }
    end_step_of_copies();
  }
};

// Adds `count` rows that lie one after the other; `rows` is the lane's own element of the first.
template <int kDim>
__device__ void add_sums(Elements<Shape<kDim>::kParts>& total, const float* rows, int count) {
  constexpr int kUnroll = 2;
#pragma unroll 1
  for (int first = 0; first < count; first += kUnroll) {
    Packed<float, kDim> found[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i < count) found[i].load(rows + int64_t{first + i} * kDim);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i >= count) break;
      const auto sum = found[i].elements();
      for_each_element<Shape<kDim>::kParts>(
          [&](int part, int j) { total.at[part][j] += sum.at[part][j]; });
    }
  }
}

// The sum of squares over a run's lanes, each with the same bits.
template <int kDim>
__device__ float sum_squares(const Elements<Shape<kDim>::kParts>& gradient) {
  using Of = Shape<kDim>;
  float sums[Of::kParts];
#pragma unroll
  for (int part = 0; part < Of::kParts; ++part) {
    const float (&four)[4] = gradient.at[part];
    sums[part] = four[0] * four[0];
#pragma unroll
    for (int i = 1; i < 4; ++i) sums[part] += four[i] * four[i];
  }
#pragma unroll
  for (int apart = Of::kParts / 2; apart > 0; apart /= 2) {
#pragma unroll
    for (int part = 0; part < apart; ++part) sums[part] += sums[part + apart];
  }
#pragma unroll
  for (int apart = Of::kLanes / 2; apart > 0; apart /= 2) {
    sums[0] += __shfl_xor_sync(kAllLanes, sums[0], apart);
  }
  return sums[0];
}

// Quotients by one divisor, neither tiny nor huge, rounded to nearest (Markstein 1990). None of the
// dividends may be more than 2**60 divisors.
struct Divisor {
  float value;
  float reciprocal;

  static __device__ bool suits(float value) { return value >= 0x1p-60f && value <= 0x1p60f; }

  __device__ float divide(float dividend) const {
    float quotient = dividend * reciprocal;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float left = __fmaf_rn(-quotient, value, dividend);
      quotient = __fmaf_rn(left, reciprocal, quotient);
    }
    return quotient;
  }
};

template <class Grad, int kOptimizer, int kDim>
__global__ void __launch_bounds__(kMaxWarps * 32, 1) update_kernel(const RowUpdate update) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  using Of = Shape<kDim>;
  using RunSlot = Slot<Grad, kOptimizer, kDim>;
  constexpr int kParts = Of::kParts;
  extern __shared__ __align__(128) char shared[];
  char* const of_warp = shared + threadIdx.x / 32 * (Of::kSteps * RunSlot::kBytes);
  const int column = Of::lane() * 4;
  const Grad* const grad = static_cast<const Grad*>(update.grad) + column;

  if (update.skip != nullptr && *update.skip != 0.0f) return;
  const uint32_t num_runs = *update.num_runs;
  const float lr = *update.lr;
  const bool has_scales = update.scales != nullptr;
  const bool has_options = update.grad_multiplier != nullptr || update.max_gradient > 0.0f ||
                           update.weight_decay != 0.0f;

  const Blocks blocks(num_runs);
  Run now, next, later, last;
  now.find_bounds(update, blocks.at(0), num_runs);
  next.find_bounds(update, blocks.at(1), num_runs);
  later.find_bounds(update, blocks.at(2), num_runs);
  now.find_position<kOptimizer>(update);
  next.find_position<kOptimizer>(update);
  now.find_gradient(update);
#pragma unroll 1
  for (int step = 0; step < Of::kSteps; ++step) {
    RunSlot{of_warp + step * RunSlot::kBytes}.fill(update, now, step);
  }
  next.find_gradient(update);

  for (uint32_t block = 0; block < blocks.count; ++block) {
    last.find_bounds(update, blocks.at(block + 3), num_runs);
    later.find_position<kOptimizer>(update);
#pragma unroll 1
    for (int step = 0; step < Of::kSteps; ++step) {
      if (step == Of::kSteps / 2) later.find_gradient(update);
      const int source = (step * Of::kRunsOfStep + Of::group()) * kAhead;
      const int start = __shfl_sync(kAllLanes, now.start, source);
      const int end = __shfl_sync(kAllLanes, now.end, source);
      const int length = end - start, rest = length % kChunk;
      const int longest = __reduce_max_sync(kAllLanes, rest);

      Elements<kParts> total{};
      const auto add_scaled = [&](Elements<kParts> gradient, float scale) {
        if (has_scales) {
          for_each_element<kParts>([&](int part, int i) { gradient.at[part][i] *= scale; });
        }
        for_each_element<kParts>(
            [&](int part, int i) { total.at[part][i] += gradient.at[part][i]; });
      };
      Packed<Grad, kDim> early[kAhead - 1];
      if (longest > 1) {
#pragma unroll
        for (int i = 1; i < kAhead; ++i) {
          const int64_t from = __shfl_sync(kAllLanes, now.gradient_row, source + i);
          if (i < rest) early[i - 1].load(grad + from * kDim);
        }
      }
      if (length >= kChunk) {
        const int num_chunks = length / kChunk, num_groups = num_chunks / kChunk;
        const int64_t chunk = start / kChunk, in_groups = int64_t{num_groups} * kChunk;
        add_sums<kDim>(total, update.group_sums + chunk / kChunk * kDim + column, num_groups);
        add_sums<kDim>(total, update.chunk_sums + (chunk + in_groups) * kDim + column,
                       num_chunks % kChunk);
      }
      wait_for_copies<Of::kSteps - 1>();
      const RunSlot slot{of_warp + step * RunSlot::kBytes};
      const float first_scale = __shfl_sync(kAllLanes, now.scale, source);
      if (rest > 0) add_scaled(load_elements<kDim>(slot.grad() + column), first_scale);
      if (longest > 1) {
#pragma unroll
        for (int i = 1; i < kAhead; ++i) {
          const float scale = __shfl_sync(kAllLanes, now.scale, source + i);
          if (i < rest) add_scaled(early[i - 1].elements(), scale);
        }
      }
#pragma unroll 1
      for (int first = kAhead; first < longest; first += Of::kLanes) {
        int gradient_row = 0;
        float scale = 1.0f;
        if (first + Of::lane() < rest) {
          const int position = update.order[end - rest + first + Of::lane()];
          gradient_row = position;
          if (update.gradient_rows != nullptr) {
            gradient_row = index_at(update.gradient_rows, update.gradient_rows_are_wide, position);
          }
          if (has_scales) scale = update.scales[position];
        }
        constexpr int kUnroll = sizeof(Grad) == 4 ? 2 : 4;
#pragma unroll 1
        for (int few = 0; few < Of::kLanes && first + few < longest; few += kUnroll) {
          Packed<Grad, kDim> found[kUnroll];
#pragma unroll
          for (int i = 0; i < kUnroll; ++i) {
            const int64_t from = __shfl_sync(kAllLanes, gradient_row, few + i, Of::kLanes);
            if (first + few + i < rest) found[i].load(grad + from * kDim);
          }
#pragma unroll
          for (int i = 0; i < kUnroll; ++i) {
            const float factor = __shfl_sync(kAllLanes, scale, few + i, Of::kLanes);
            if (first + few + i < rest) add_scaled(found[i].elements(), factor);
          }
        }
      }

      Elements<kParts> old = load_elements<kDim>(slot.weight() + column);
      Elements<kParts> state;
      if (kOptimizer == kAdagrad) state = load_elements<kDim>(slot.state() + column);
      __syncwarp();
      slot.fill(update, next, step);

      if (has_options) {
        const float multiplier = update.grad_multiplier == nullptr ? 1.0f : *update.grad_multiplier;
        const float most = update.max_gradient > 0.0f ? update.max_gradient : INFINITY;
        for_each_element<kParts>([&](int part, int i) {
          float gradient = total.at[part][i] * multiplier;
          // By comparisons, so that NaN stays NaN.
          if (gradient > most) gradient = most;
          if (gradient < -most) gradient = -most;
          if (update.weight_decay != 0.0f) gradient += update.weight_decay * old.at[part][i];
          total.at[part][i] = gradient;
        });
      }
      const int row = __shfl_sync(kAllLanes, now.row, source);
      Elements<kParts> change = total;
      if (kOptimizer == kRowwiseAdagrad) {
        const float before = __shfl_sync(kAllLanes, now.row_state, source);
        const float row_total = before + __fdiv_rn(sum_squares<kDim>(total), float{kDim});
        if (Of::lane() == 0 && length > 0) update.state[row] = row_total;
        const float root = __fsqrt_rn(row_total) + update.eps;
        if (__all_sync(kAllLanes, Divisor::suits(root))) {
          const Divisor divisor{root, __frcp_rn(root)};
          for_each_element<kParts>(
              [&](int part, int i) { change.at[part][i] = divisor.divide(total.at[part][i]); });
        } else {
          for_each_element<kParts>(
              [&](int part, int i) { change.at[part][i] = __fdiv_rn(total.at[part][i], root); });
        }
      } else if (kOptimizer == kAdagrad) {
        for_each_element<kParts>([&](int part, int i) {
          const float gradient = total.at[part][i];
          const float sum = state.at[part][i] + gradient * gradient;
          state.at[part][i] = sum;
          change.at[part][i] = __fdiv_rn(gradient, __fsqrt_rn(sum) + update.eps);
        });
      }
      for_each_element<kParts>(
          [&](int part, int i) { old.at[part][i] -= lr * change.at[part][i]; });
      if (length > 0) {
        const int64_t at = int64_t{row} * kDim + column;
        store_elements<kDim>(update.weight + at, old);
        if (kOptimizer == kAdagrad) store_elements<kDim>(update.state + at, state);
      }
    }
    now = next;
    next = later;
    later = last;
  }
#endif
}

template <class Grad, int kOptimizer, int kDim>
cudaError_t launch(const RowUpdate& update, cudaStream_t stream) {
  constexpr auto kernel = update_kernel<Grad, kOptimizer, kDim>;
  constexpr int kWarpBytes = Shape<kDim>::kSteps * Slot<Grad, kOptimizer, kDim>::kBytes;
  int device = 0, most_bytes = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&most_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (error != cudaSuccess) return error;
  int num_warps = most_bytes / kWarpBytes < kMaxWarps ? most_bytes / kWarpBytes : kMaxWarps;
  if (update.max_warps > 0 && update.max_warps < num_warps) num_warps = update.max_warps;
  const int shared_bytes = num_warps * kWarpBytes;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  kernel<<<update.num_blocks, num_warps * 32, shared_bytes, stream>>>(update);
  return cudaGetLastError();
}

template <class Grad, int kOptimizer>
cudaError_t launch_dim(const RowUpdate& update, cudaStream_t stream) {
  switch (update.dim) {
    case 32:
      return launch<Grad, kOptimizer, 32>(update, stream);
    case 64:
      return launch<Grad, kOptimizer, 64>(update, stream);
    case 128:
      return launch<Grad, kOptimizer, 128>(update, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

template <class Grad>
cudaError_t launch_rule(const RowUpdate& update, int64_t optimizer, cudaStream_t stream) {
  switch (optimizer) {
    case kSgd:
      return launch_dim<Grad, kSgd>(update, stream);
    case kAdagrad:
      return launch_dim<Grad, kAdagrad>(update, stream);
    case kRowwiseAdagrad:
      return launch_dim<Grad, kRowwiseAdagrad>(update, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

const char* update_rows(const RowUpdate& update, GradType grad_type, int64_t optimizer, int device,
                        void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  // The caller has made the device torch's current one. The library has a CUDA runtime of its own.
  int current = device;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess && current != device) error = cudaSetDevice(device);
  if (error == cudaSuccess) {
    launch_sum_chunks(update, grad_type, stream);
    switch (grad_type) {
      case GradType::kFloat32:
        error = launch_rule<float>(update, optimizer, queue);
        break;
      case GradType::kFloat16:
        error = launch_rule<__half>(update, optimizer, queue);
        break;
      case GradType::kBFloat16:
        error = launch_rule<__nv_bfloat16>(update, optimizer, queue);
        break;
    }
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace torchembed
