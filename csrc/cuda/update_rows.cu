// Sums the gradients of each run and updates its row by row-wise Adagrad; rows are float32.
//
// What it must move is two rows and two numbers a run, scattered over the memory, so it is a matter
// of having enough of them on the way, near to each other, and of few instructions for each. A warp
// takes blocks of kRuns runs. While it updates one, rows and first gradients of the next are on
// their way to shared memory, which takes no registers; and for those that follow, what tells where
// these lie: one link of the chain (bounds of the run, positions, gradient rows) for each block
// ahead.
//
// Byte floor, for L occurrences of U rows: position and gradient row index of each occurrence, the
// gradient rows that the batch has (each read once, as far as the cache reaches), and
// 2 * U * (D + 1) * 4 for rows and their state, read and written.

#include <cuda_runtime.h>

#include "row_elements.cuh"
#include "update_rows.h"

namespace torchembed {
namespace {

constexpr int kChunk = 32;  // run_sums.py
// As many as there are registers for. A kernel that spills is slower by half: shared memory leaves
// little of the cache.
constexpr int kWarps = 12;
constexpr int kRuns = 8;
// Of a run's occurrences so many are looked up ahead, by a lane each.
constexpr int kAhead = 32 / kRuns;
// Of them so many gradients are read with the first one; fewer where more would fill the registers.
template <class Grad>
constexpr int kEarly = sizeof(Grad) == 4 ? 1 : kAhead - 1;
constexpr int kRunsOfStep = 32 / kLanes;
constexpr int kSteps = kRuns / kRunsOfStep;

__device__ int index_at(const void* indices, bool wide, uint32_t at) {
  return wide ? static_cast<int>(static_cast<const int64_t*>(indices)[at])
              : static_cast<const int32_t*>(indices)[at];
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

  __device__ void find_position(const RowUpdate& update) {
    const int ahead = threadIdx.x % kAhead;
    if (ahead < rest()) gradient_row = update.order[end - rest() + ahead];
    if (start < end) row_state = update.state[row];
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

// Shared memory for what a step takes of global memory.
template <class Grad>
struct Slot {
  // Half of the banks' width more, so that two runs' 16-bit gradients lie in different banks.
  static constexpr int kGradBytes =
      kDim * static_cast<int>(sizeof(Grad)) + (sizeof(Grad) == 2 ? 64 : 0);
  static constexpr int kBytes = (kDim * 4 + kGradBytes) * kRunsOfStep;

  char* memory;

  __device__ float* weight() const {
    return reinterpret_cast<float*>(memory) + group_of_thread() * kDim;
  }
  __device__ Grad* grad() const {
    return reinterpret_cast<Grad*>(memory + kRunsOfStep * kDim * 4 +
                                   group_of_thread() * kGradBytes);
  }

  // Begins to copy what step `step` of a block needs.
  __device__ void fill(const RowUpdate& update, const Run& run, int step) const {
    const int source = (step * kRunsOfStep + group_of_thread()) * kAhead;
    const int row = __shfl_sync(kAllLanes, run.row, source);
    const int length = __shfl_sync(kAllLanes, run.end - run.start, source);
    const int gradient_row = __shfl_sync(kAllLanes, run.gradient_row, source);
    if (length > 0) {
      const int column = lane_of_row() * 4;
      const int64_t first = int64_t{row} * kDim + column;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int at = part * kStride;
        copy_async(weight() + column + at, update.weight + first + at);
      }
    }
    if (length % kChunk != 0) {
      constexpr int kVector = 16 / sizeof(Grad);
      const int column = lane_of_row() * kVector;
      const Grad* const from =
          static_cast<const Grad*>(update.grad) + int64_t{gradient_row} * kDim + column;
#pragma unroll
      for (int at = 0; at < kDim; at += kLanes * kVector) {
        copy_async(grad() + column + at, from + at);
      }
    }
    end_step_of_copies();
  }
};

// Adds `count` rows that lie one after the other; `rows` is the lane's own element of the first.
__device__ void add_sums(Elements& total, const float* rows, int count) {
  constexpr int kUnroll = 2;
#pragma unroll 1
  for (int first = 0; first < count; first += kUnroll) {
    Packed<float> found[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i < count) found[i].load(rows + int64_t{first + i} * kDim);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i >= count) break;
      const auto sum = found[i].elements();
      for_each_element([&](int part, int j) { total.at[part][j] += sum.at[part][j]; });
    }
  }
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

template <class Grad>
__global__ void __launch_bounds__(kWarps * 32, 1) update_kernel(const RowUpdate update) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  using RunSlot = Slot<Grad>;
  extern __shared__ __align__(128) char shared[];
  char* const of_warp = shared + threadIdx.x / 32 * (kSteps * RunSlot::kBytes);
  const int column = lane_of_row() * 4;
  const Grad* const grad = static_cast<const Grad*>(update.grad) + column;

  if (update.skip != nullptr && *update.skip != 0.0f) return;
  const uint32_t num_runs = *update.num_runs;
  const float lr = *update.lr;
  const bool has_scales = update.scales != nullptr;
  const bool has_options = update.grad_multiplier != nullptr || update.max_gradient > 0.0f ||
                           update.weight_decay != 0.0f;

  const uint32_t stride = gridDim.x * kWarps;
  uint32_t block = blockIdx.x * kWarps + threadIdx.x / 32;
  Run now, next, later, last;
  now.find_bounds(update, block, num_runs);
  next.find_bounds(update, block + stride, num_runs);
  later.find_bounds(update, block + 2 * stride, num_runs);
  now.find_position(update);
  next.find_position(update);
  now.find_gradient(update);
#pragma unroll 1
  for (int step = 0; step < kSteps; ++step) {
    RunSlot{of_warp + step * RunSlot::kBytes}.fill(update, now, step);
  }
  next.find_gradient(update);

  for (; block * kRuns < num_runs; block += stride) {
    last.find_bounds(update, block + 3 * stride, num_runs);
    later.find_position(update);
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
      if (step == kSteps / 2) later.find_gradient(update);
      const int source = (step * kRunsOfStep + group_of_thread()) * kAhead;
      const int start = __shfl_sync(kAllLanes, now.start, source);
      const int end = __shfl_sync(kAllLanes, now.end, source);
      const int length = end - start, rest = length % kChunk;
      const int longest = __reduce_max_sync(kAllLanes, rest);

      Elements total{};
      const auto add_scaled = [&](Elements gradient, float scale) {
        if (has_scales) {
          for_each_element([&](int part, int i) { gradient.at[part][i] *= scale; });
        }
        for_each_element([&](int part, int i) { total.at[part][i] += gradient.at[part][i]; });
      };
      Packed<Grad> early[kEarly<Grad>];
      if (longest > 1) {
#pragma unroll
        for (int i = 1; i <= kEarly<Grad>; ++i) {
          const int64_t from = __shfl_sync(kAllLanes, now.gradient_row, source + i);
          if (i < rest) early[i - 1].load(grad + from * kDim);
        }
      }
      if (length >= kChunk) {
        const int num_chunks = length / kChunk, num_groups = num_chunks / kChunk;
        const int64_t chunk = start / kChunk, in_groups = int64_t{num_groups} * kChunk;
        add_sums(total, update.group_sums + chunk / kChunk * kDim + column, num_groups);
        add_sums(total, update.chunk_sums + (chunk + in_groups) * kDim + column,
                 num_chunks % kChunk);
      }
      wait_for_copies<kSteps - 1>();
      const RunSlot slot{of_warp + step * RunSlot::kBytes};
      const float first_scale = __shfl_sync(kAllLanes, now.scale, source);
      if (rest > 0) add_scaled(load_elements(slot.grad() + column), first_scale);
      if (longest > 1) {
#pragma unroll
        for (int i = 1; i <= kEarly<Grad>; ++i) {
          const float scale = __shfl_sync(kAllLanes, now.scale, source + i);
          if (i < rest) add_scaled(early[i - 1].elements(), scale);
        }
      }
#pragma unroll 1
      for (int first = kEarly<Grad> + 1; first < longest; first += kLanes) {
        int gradient_row = 0;
        float scale = 1.0f;
        if (first + lane_of_row() < rest) {
          const int position = update.order[end - rest + first + lane_of_row()];
          gradient_row = position;
          if (update.gradient_rows != nullptr) {
            gradient_row = index_at(update.gradient_rows, update.gradient_rows_are_wide, position);
          }
          if (has_scales) scale = update.scales[position];
        }
        constexpr int kUnroll = sizeof(Grad) == 4 ? 2 : 4;
#pragma unroll 1
        for (int few = 0; few < kLanes && first + few < longest; few += kUnroll) {
          Packed<Grad> found[kUnroll];
#pragma unroll
          for (int i = 0; i < kUnroll; ++i) {
            const int64_t from = __shfl_sync(kAllLanes, gradient_row, few + i, kLanes);
            if (first + few + i < rest) found[i].load(grad + from * kDim);
          }
#pragma unroll
          for (int i = 0; i < kUnroll; ++i) {
            const float factor = __shfl_sync(kAllLanes, scale, few + i, kLanes);
            if (first + few + i < rest) add_scaled(found[i].elements(), factor);
          }
        }
      }

      Elements old = load_elements(slot.weight() + column);
      __syncwarp();
      slot.fill(update, next, step);

      if (has_options) {
        const float multiplier = update.grad_multiplier == nullptr ? 1.0f : *update.grad_multiplier;
        const float most = update.max_gradient > 0.0f ? update.max_gradient : INFINITY;
        for_each_element([&](int part, int i) {
          float gradient = total.at[part][i] * multiplier;
          // By comparisons, so that NaN stays NaN.
          if (gradient > most) gradient = most;
          if (gradient < -most) gradient = -most;
          if (update.weight_decay != 0.0f) gradient += update.weight_decay * old.at[part][i];
          total.at[part][i] = gradient;
        });
      }
      const int row = __shfl_sync(kAllLanes, now.row, source);
      const float before = __shfl_sync(kAllLanes, now.row_state, source);
      const float row_total = before + __fdiv_rn(sum_squares(total), float{kDim});
      if (lane_of_row() == 0 && length > 0) update.state[row] = row_total;
      const float root = __fsqrt_rn(row_total) + update.eps;
      Elements change;
      if (__all_sync(kAllLanes, Divisor::suits(root))) {
        const Divisor divisor{root, __frcp_rn(root)};
        for_each_element(
            [&](int part, int i) { change.at[part][i] = divisor.divide(total.at[part][i]); });
      } else {
        for_each_element(
            [&](int part, int i) { change.at[part][i] = __fdiv_rn(total.at[part][i], root); });
      }
      for_each_element([&](int part, int i) { old.at[part][i] -= lr * change.at[part][i]; });
      if (length > 0) {
        const int64_t at = int64_t{row} * kDim + column;
        store_elements(update.weight + at, old);
      }
    }
    now = next;
    next = later;
    later = last;
  }
#endif
}

template <class Grad>
cudaError_t launch(const RowUpdate& update, cudaStream_t stream) {
  constexpr auto kernel = update_kernel<Grad>;
  constexpr int kBytes = kWarps * kSteps * Slot<Grad>::kBytes;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<update.num_blocks, kWarps * 32, kBytes, stream>>>(update);
  return cudaGetLastError();
}

}  // namespace

const char* update_rows(const RowUpdate& update, GradType grad_type, int device, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  // The caller has made the device torch's current one. The library has a CUDA runtime of its own.
  int current = device;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess && current != device) error = cudaSetDevice(device);
  if (error == cudaSuccess) {
    switch (grad_type) {
      case GradType::kFloat32:
        error = launch<float>(update, queue);
        break;
      case GradType::kFloat16:
        error = launch<__half>(update, queue);
        break;
      case GradType::kBFloat16:
        error = launch<__nv_bfloat16>(update, queue);
        break;
    }
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace torchembed
