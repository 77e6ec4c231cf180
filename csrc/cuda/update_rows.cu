// Sums the gradients of each run and updates its row; rows are float32.
//
// What it must move is two or four rows a run, scattered over the memory, so it is a matter of
// having enough of them on the way. A warp takes blocks of kRuns runs. While it updates one, rows,
// states and first gradients of the next are on their way to shared memory, which takes no
// registers; and for those that follow, what tells where these lie: one link of the chain
// (bounds of the run, positions, gradient rows) for each block ahead.
//
// Eight lanes share a run, so that a warp updates four at once.
//
// Byte floor, for L occurrences of U rows: position and gradient row index of each occurrence, the
// gradient rows that the batch has (each read once, as far as the cache reaches), and
// 2 * U * D * 4 * (1 + states) for rows and their state, read and written.

#include <cuda_runtime.h>

#include "row_elements.cuh"
#include "update_rows.h"

namespace torchembed {
namespace {

constexpr int kSgd = 0, kAdagrad = 1, kRowwiseAdagrad = 2;  // OptimizerKind
// Rows of a sum that are on their way together.
template <class Value>
constexpr int kUnroll = sizeof(Value) == 4 ? 2 : 4;
constexpr int kMaxWarps = 12;

constexpr int kLanesOfRun = 8;
constexpr int kRunsOfStep = 32 / kLanesOfRun;
constexpr int kRuns = 16;
constexpr int kSteps = kRuns / kRunsOfStep;
// Of a run's occurrences so many are looked up ahead, by a lane each.
constexpr int kAhead = 32 / kRuns;
// Of a row a lane takes kParts vectors of 4 elements, which lie this far apart.
constexpr int kPartStride = kLanesOfRun * 4;

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

template <int kParts>
__device__ void add(Elements<kParts>& total, const Elements<kParts>& other) {
  for_each_element<kParts>([&](int part, int i) { total.at[part][i] += other.at[part][i]; });
}

// A lane's elements as they lie in memory.
template <class Value, int kParts>
struct Packed {
  Four<Value> at[kParts];

  // Those of a row of `dim` elements, from the lane's own first one on; zeros past the row's end.
  __device__ void load(const Value* from, int column, int dim) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      at[part] = Four<Value>{};
      if (column + part * kPartStride < dim) {
        at[part] = *reinterpret_cast<const Four<Value>*>(from + part * kPartStride);
      }
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

template <int kParts, class Value>
__device__ Elements<kParts> load_elements(const Value* from, int column, int dim) {
  Packed<Value, kParts> packed;
  packed.load(from, column, dim);
  return packed.elements();
}

__device__ uint64_t l2_policy(bool evicts_first) {
  uint64_t policy;
  if (evicts_first) {
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  } else {
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  }
  return policy;
}

// Begins to copy 16 bytes to shared memory.
__device__ void copy_async(uint32_t to, const void* from, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "l"(policy)
               : "memory");
}

__device__ void end_step_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until no more than `kPending` steps of copies are on their way.
template <int kPending>
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
  __syncwarp();
}

__device__ void store_four(float* to, const float (&four)[4], uint64_t policy) {
  asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(
                   __cvta_generic_to_global(to)),
               "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3]), "l"(policy)
               : "memory");
}

// A run as one of its kAhead lanes knows it: all of it, and one of its occurrences.
struct Run {
  int row = 0;
  int start = 0;
  int end = 0;  // equal to `start` past the last run
  int position = 0;
  int gradient_row = 0;
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
    if (ahead < rest()) position = update.order[end - rest() + ahead];
    if (kOptimizer == kRowwiseAdagrad && start < end) row_state = update.state[row];
  }

  __device__ void find_gradient(const RowUpdate& update) {
    if (static_cast<int>(threadIdx.x % kAhead) < rest()) {
      gradient_row = position;
      if (update.gradient_rows != nullptr) {
        gradient_row = index_at(update.gradient_rows, update.gradient_rows_are_wide, position);
      }
      if (update.scales != nullptr) scale = update.scales[position];
    }
  }
};

// Shared memory for what a step takes of global memory.
template <class Grad, int kOptimizer, int kParts>
struct Slot {
  static constexpr int kColumns = kParts * kPartStride;
  static constexpr int kStates = kOptimizer == kAdagrad ? 1 : 0;
  // Half a row of 16-bit numbers more, so that two runs' lie in different banks.
  static constexpr int kGradBytes =
      kColumns * static_cast<int>(sizeof(Grad)) + (sizeof(Grad) == 2 ? 64 : 0);
  static constexpr int kRunBytes = kColumns * 4 * (1 + kStates) + kGradBytes;
  static constexpr int kBytes = kRunBytes * kRunsOfStep;

  char* memory;
  int group;

  __device__ float* weight() const {
    return reinterpret_cast<float*>(memory + group * kColumns * 4);
  }
  __device__ float* state() const { return weight() + kRunsOfStep * kColumns; }
  __device__ Grad* grad() const {
    return reinterpret_cast<Grad*>(memory + kRunsOfStep * kColumns * 4 * (1 + kStates) +
                                   group * kGradBytes);
  }

  // Begins to copy what step `step` of a block needs.
  __device__ void fill(const RowUpdate& update, const Run& run, int step, uint64_t row_policy,
                       uint64_t grad_policy) const {
    const int lane = threadIdx.x % kLanesOfRun;
    const int source = (step * kRunsOfStep + group) * kAhead;
    const int row = __shfl_sync(kAllLanes, run.row, source);
    const int length = __shfl_sync(kAllLanes, run.end - run.start, source);
    const int gradient_row = __shfl_sync(kAllLanes, run.gradient_row, source);
    if (length > 0) {
      const int64_t first = int64_t{row} * update.dim;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int column = part * kPartStride + lane * 4;
        if (column < update.dim) {
          copy_async(shared_address(weight() + column), update.weight + first + column, row_policy);
          if (kStates > 0) {
            copy_async(shared_address(state() + column), update.state + first + column, row_policy);
          }
        }
      }
      if (length % kChunk != 0) {
        constexpr int kVector = 16 / sizeof(Grad);
        const Grad* const from =
            static_cast<const Grad*>(update.grad) + int64_t{gradient_row} * update.dim;
#pragma unroll
        for (int first_of_part = 0; first_of_part < kColumns;
             first_of_part += kLanesOfRun * kVector) {
          const int column = first_of_part + lane * kVector;
          if (column < update.dim) {
            copy_async(shared_address(grad() + column), from + column, grad_policy);
          }
        }
      }
    }
    end_step_of_copies();
  }

  static __device__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
  }
};

// Adds `count` rows that lie one after the other; `rows` is the lane's first element of the first.
template <int kParts>
__device__ void add_sums(Elements<kParts>& total, const float* rows, int count, int column,
                         int dim) {
#pragma unroll 1
  for (int first = 0; first < count; first += kUnroll<float>) {
    Packed<float, kParts> found[kUnroll<float>];
#pragma unroll
    for (int i = 0; i < kUnroll<float>; ++i) {
      if (first + i < count) found[i].load(rows + int64_t{first + i} * dim, column, dim);
    }
#pragma unroll
    for (int i = 0; i < kUnroll<float>; ++i) {
      if (first + i < count) add(total, found[i].elements());
    }
  }
}

// A divisor of many; quotients are rounded to nearest.
struct Divisor {
  float value;
  float reciprocal;

  __device__ explicit Divisor(float divisor) : value(divisor) { reciprocal = __frcp_rn(divisor); }

  __device__ bool is_middling() const { return value >= 0x1p-60f && value <= 0x1p60f; }

  // Whether divide() is right for a middling divisor: nothing on its way is too small or too large.
  static __device__ bool suits(float dividend) {
    const float size = fabsf(dividend);
    return size == 0.0f || (size >= 0x1p-40f && size <= 0x1p40f);
  }

  __device__ float divide(float dividend) const {
    float quotient = __fmul_rn(dividend, reciprocal);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float left = __fmaf_rn(-quotient, value, dividend);
      quotient = __fmaf_rn(left, reciprocal, quotient);
    }
    return dividend == 0.0f ? dividend : quotient;
  }
};

// The sum of squares over a run's lanes, each with the same bits.
template <int kParts>
__device__ float sum_squares(const Elements<kParts>& gradient) {
  float sums[kParts];
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const float (&of_part)[4] = gradient.at[part];
    sums[part] = __fmul_rn(of_part[0], of_part[0]);
#pragma unroll
    for (int i = 1; i < 4; ++i) {
      sums[part] = __fadd_rn(sums[part], __fmul_rn(of_part[i], of_part[i]));
    }
  }
#pragma unroll
  for (int apart = kParts / 2; apart > 0; apart /= 2) {
#pragma unroll
    for (int part = 0; part < apart; ++part) {
      sums[part] = __fadd_rn(sums[part], sums[part + apart]);
    }
  }
#pragma unroll
  for (int apart = kLanesOfRun / 2; apart > 0; apart /= 2) {
    sums[0] = __fadd_rn(sums[0], __shfl_xor_sync(kAllLanes, sums[0], apart));
  }
  return sums[0];
}

template <class Grad, int kOptimizer, int kParts>
__global__ void __launch_bounds__(kMaxWarps * 32, 1)
    update_kernel(const RowUpdate update, int policies) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  using RunSlot = Slot<Grad, kOptimizer, kParts>;
  extern __shared__ __align__(128) char shared[];
  const int warp = threadIdx.x / 32, dim = update.dim;
  const int group = threadIdx.x % 32 / kLanesOfRun, lane = threadIdx.x % kLanesOfRun;
  const int column = lane * 4;
  const Grad* const grad = static_cast<const Grad*>(update.grad) + column;
  char* const of_warp = shared + warp * kSteps * RunSlot::kBytes;
  const auto slot_at = [&](int step) { return RunSlot{of_warp + step * RunSlot::kBytes, group}; };
  const uint64_t read_policy = l2_policy(policies & 1), write_policy = l2_policy(policies & 2);
  const uint64_t grad_policy = l2_policy(false);

  if (update.skip != nullptr && *update.skip != 0.0f) return;
  const uint32_t num_runs = *update.num_runs;
  const float lr = *update.lr;
  const float multiplier = update.grad_multiplier == nullptr ? 1.0f : *update.grad_multiplier;

  const uint32_t stride = gridDim.x * (blockDim.x / 32);
  uint32_t block = blockIdx.x * (blockDim.x / 32) + warp;
  Run now, next, later, last;
  now.find_bounds(update, block, num_runs);
  next.find_bounds(update, block + stride, num_runs);
  later.find_bounds(update, block + 2 * stride, num_runs);
  now.find_position<kOptimizer>(update);
  next.find_position<kOptimizer>(update);
  now.find_gradient(update);
#pragma unroll 1
  for (int step = 0; step < kSteps; ++step) {
    slot_at(step).fill(update, now, step, read_policy, grad_policy);
  }
  next.find_gradient(update);

  for (; block * kRuns < num_runs; block += stride) {
    last.find_bounds(update, block + 3 * stride, num_runs);
    later.find_position<kOptimizer>(update);
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
      if (step == kSteps / 2) later.find_gradient(update);
      const int source = (step * kRunsOfStep + group) * kAhead;
      const int start = __shfl_sync(kAllLanes, now.start, source);
      const int end = __shfl_sync(kAllLanes, now.end, source);
      const int length = end - start, rest = length % kChunk;
      if (__all_sync(kAllLanes, length == 0)) return;  // the last run is behind
      const int row = __shfl_sync(kAllLanes, now.row, source);
      const int second_row = __shfl_sync(kAllLanes, now.gradient_row, source + 1);
      const float first_scale = __shfl_sync(kAllLanes, now.scale, source);
      const float second_scale = __shfl_sync(kAllLanes, now.scale, source + 1);
      const float row_state = __shfl_sync(kAllLanes, now.row_state, source);

      Packed<Grad, kParts> second;
      if (rest > 1) second.load(grad + int64_t{second_row} * dim, column, dim);
      wait_for_copies<kSteps - 1>();
      const RunSlot slot = slot_at(step);
      Elements<kParts> total{};
      if (length >= kChunk) {
        const int num_chunks = length / kChunk, num_groups = num_chunks / kChunk;
        const int64_t chunk = start / kChunk, in_groups = num_groups * kChunk;
        add_sums(total, update.group_sums + chunk / kChunk * dim + column, num_groups, column, dim);
        add_sums(total, update.chunk_sums + (chunk + in_groups) * dim + column,
                 num_chunks - static_cast<int>(in_groups), column, dim);
      }
      const bool has_scales = update.scales != nullptr;
      const auto add_scaled = [&](const Elements<kParts>& gradients, float scale) {
        for_each_element<kParts>([&](int part, int i) {
          float gradient = gradients.at[part][i];
          if (has_scales) gradient = __fmul_rn(gradient, scale);
          total.at[part][i] = __fadd_rn(total.at[part][i], gradient);
        });
      };
      if (rest > 0) {
        add_scaled(load_elements<kParts>(slot.grad() + column, column, dim), first_scale);
      }
      if (rest > 1) add_scaled(second.elements(), second_scale);

      const int longest = __reduce_max_sync(kAllLanes, rest);
#pragma unroll 1
      for (int eight = 2; eight < longest; eight += kLanesOfRun) {
        int gradient_row = 0;
        float scale = 1.0f;
        if (eight + lane < rest) {
          const int position = update.order[end - rest + eight + lane];
          gradient_row = position;
          if (update.gradient_rows != nullptr) {
            gradient_row = index_at(update.gradient_rows, update.gradient_rows_are_wide, position);
          }
          if (has_scales) scale = update.scales[position];
        }
#pragma unroll 1
        for (int few = 0; few < kLanesOfRun && eight + few < longest; few += kUnroll<Grad>) {
          Packed<Grad, kParts> found[kUnroll<Grad>];
#pragma unroll
          for (int i = 0; i < kUnroll<Grad>; ++i) {
            const int from = __shfl_sync(kAllLanes, gradient_row, few + i, kLanesOfRun);
            if (eight + few + i < rest) found[i].load(grad + int64_t{from} * dim, column, dim);
          }
#pragma unroll
          for (int i = 0; i < kUnroll<Grad>; ++i) {
            const float factor = __shfl_sync(kAllLanes, scale, few + i, kLanesOfRun);
            if (eight + few + i < rest) add_scaled(found[i].elements(), factor);
          }
        }
      }

      Elements<kParts> old = load_elements<kParts>(slot.weight() + column, column, dim);
      Elements<kParts> state;
      if (kOptimizer == kAdagrad) {
        state = load_elements<kParts>(slot.state() + column, column, dim);
      }
      __syncwarp();
      slot.fill(update, next, step, read_policy, grad_policy);

      for_each_element<kParts>([&](int part, int i) {
        float gradient = total.at[part][i];
        if (update.grad_multiplier != nullptr) gradient = __fmul_rn(gradient, multiplier);
        if (update.max_gradient > 0.0f) {
          // By comparisons, so that NaN stays NaN.
          if (gradient > update.max_gradient) gradient = update.max_gradient;
          if (gradient < -update.max_gradient) gradient = -update.max_gradient;
        }
        if (update.weight_decay != 0.0f) {
          gradient = __fadd_rn(gradient, __fmul_rn(update.weight_decay, old.at[part][i]));
        }
        total.at[part][i] = gradient;
      });

      Elements<kParts> change = total;
      if (kOptimizer == kRowwiseAdagrad) {
        const float mean = __fdiv_rn(sum_squares(total), static_cast<float>(dim));
        const float row_total = __fadd_rn(row_state, mean);
        if (lane == 0 && length > 0) update.state[row] = row_total;
        const Divisor root(__fadd_rn(__fsqrt_rn(row_total), update.eps));
        bool suits = root.is_middling();
        for_each_element<kParts>(
            [&](int part, int i) { suits = suits && Divisor::suits(total.at[part][i]); });
        if (__all_sync(kAllLanes, suits)) {
          for_each_element<kParts>(
              [&](int part, int i) { change.at[part][i] = root.divide(total.at[part][i]); });
        } else {
          for_each_element<kParts>([&](int part, int i) {
            change.at[part][i] = __fdiv_rn(total.at[part][i], root.value);
          });
        }
      } else if (kOptimizer == kAdagrad) {
        for_each_element<kParts>([&](int part, int i) {
          const float gradient = total.at[part][i];
          const float sum = __fadd_rn(state.at[part][i], __fmul_rn(gradient, gradient));
          state.at[part][i] = sum;
          change.at[part][i] = __fdiv_rn(gradient, __fadd_rn(__fsqrt_rn(sum), update.eps));
        });
      }
      for_each_element<kParts>([&](int part, int i) {
        old.at[part][i] = __fsub_rn(old.at[part][i], __fmul_rn(lr, change.at[part][i]));
      });
      const int64_t at = int64_t{row} * dim + column;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (length > 0 && column + part * kPartStride < dim) {
          store_four(update.weight + at + part * kPartStride, old.at[part], write_policy);
          if (kOptimizer == kAdagrad) {
            store_four(update.state + at + part * kPartStride, state.at[part], write_policy);
          }
        }
      }
    }
    now = next;
    next = later;
    later = last;
  }
#endif
}

template <class Grad, int kOptimizer, int kParts>
cudaError_t launch(const RowUpdate& update, cudaStream_t stream, Tuning tuning) {
  constexpr auto kernel = update_kernel<Grad, kOptimizer, kParts>;
  const int shared_bytes = tuning.num_warps * kSteps * Slot<Grad, kOptimizer, kParts>::kBytes;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  kernel<<<tuning.num_blocks, tuning.num_warps * 32, shared_bytes, stream>>>(update,
                                                                             tuning.policies);
  return cudaGetLastError();
}

template <class Grad, int kOptimizer>
cudaError_t launch_parts(const RowUpdate& update, cudaStream_t stream, Tuning tuning) {
  return update.dim <= 64 ? launch<Grad, kOptimizer, 2>(update, stream, tuning)
                          : launch<Grad, kOptimizer, 4>(update, stream, tuning);
}

template <class Grad>
cudaError_t launch_rule(const RowUpdate& update, int64_t optimizer, cudaStream_t stream,
                        Tuning tuning) {
  switch (optimizer) {
    case kSgd:
      return launch_parts<Grad, kSgd>(update, stream, tuning);
    case kAdagrad:
      return launch_parts<Grad, kAdagrad>(update, stream, tuning);
    case kRowwiseAdagrad:
      return launch_parts<Grad, kRowwiseAdagrad>(update, stream, tuning);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

const char* update_rows(const RowUpdate& update, GradType grad_type, int64_t optimizer, int device,
                        void* stream, Tuning tuning) {
  const auto queue = static_cast<cudaStream_t>(stream);
  // The caller has made the device torch's current one. The library has a CUDA runtime of its own.
  int current = device;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess && current != device) error = cudaSetDevice(device);
  if (error == cudaSuccess) {
    launch_sum_chunks(update, grad_type, stream);
    switch (grad_type) {
      case GradType::kFloat32:
        error = launch_rule<float>(update, optimizer, queue, tuning);
        break;
      case GradType::kFloat16:
        error = launch_rule<__half>(update, optimizer, queue, tuning);
        break;
      case GradType::kBFloat16:
        error = launch_rule<__nv_bfloat16>(update, optimizer, queue, tuning);
        break;
    }
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace torchembed
