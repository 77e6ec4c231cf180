// The operations on hash tables on a GPU.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "hash_counters.h"
#include "hash_kernels.h"

namespace torchembed {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kNumPolicies = 4;

// Checks that `tensor` holds numel elements, contiguously and on the device of `keys`.
void check_memory(const char* name, const Tensor& tensor, const Tensor& keys, int64_t numel) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == keys.get_device_index(), name,
                  " must be on the device of keys; call .to(keys.device)");
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous; call .contiguous()");
  STD_TORCH_CHECK(tensor.numel() == numel, name, " must hold ", numel, " elements, got ",
                  tensor.numel());
}

template <class Value>
const Value* values(const char* name, const Tensor& tensor, const Tensor& keys, int64_t numel) {
  check_memory(name, tensor, keys, numel);
  return tensor.const_data_ptr<Value>();
}

template <class Value>
const Value* values(const char* name, const std::optional<Tensor>& tensor, const Tensor& keys,
                    int64_t numel) {
  return tensor ? values<Value>(name, *tensor, keys, numel) : nullptr;
}

template <class Value>
Value* memory(const char* name, const Tensor& tensor, const Tensor& keys, int64_t numel) {
  check_memory(name, tensor, keys, numel);
  return tensor.mutable_data_ptr<Value>();
}

// The tables' memory that finding keys needs; `num_slots` of all tables.
HashMemory held_memory(const Tensor& digests, const Tensor& slot_keys, const Tensor& geometry,
                       const Tensor& keys, int64_t num_slots) {
  STD_TORCH_CHECK(geometry.dim() == 2 && geometry.size(1) == 4 && geometry.size(0) < 1 << 30,
                  "geometry must have 4 columns and fewer than 2**30 rows");
  HashMemory held{};
  held.num_tables = static_cast<int>(geometry.size(0));
  held.digests = memory<uint8_t>("digests", digests, keys, num_slots);
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(held.digests) % 16 == 0,
                  "digests must begin at a multiple of 16 bytes; call .clone()");
  held.keys = memory<int64_t>("slot_keys", slot_keys, keys, num_slots);
  held.geometry = values<int64_t>("geometry", geometry, keys, geometry.numel());
  return held;
}

// `stream` is as in sort_rows.
Tensor find_slots_on(const Tensor& keys, const Tensor& tables, const Tensor& digests,
                     const Tensor& slot_keys, const Tensor& geometry, int64_t stream) {
  const int64_t num_ids = keys.numel();
  const HashMemory held = held_memory(digests, slot_keys, geometry, keys, digests.numel());
  const Tensor slots = torch::stable::new_empty(keys, {num_ids}, ScalarType::Long);
  if (num_ids == 0) return slots;
  const char* const error = find_slots(held, values<int64_t>("keys", keys, keys, num_ids),
                                       values<int32_t>("tables", tables, keys, num_ids), num_ids,
                                       slots.mutable_data_ptr<int64_t>(), keys.get_device_index(),
                                       reinterpret_cast<void*>(stream));
  STD_TORCH_CHECK(error == nullptr, "finding keys on the GPU failed: ", error);
  return slots;
}

void touch_slots_on(const Tensor& slots, const Tensor& tables, const Tensor& epoch,
                    std::optional<Tensor> is_trained, const Tensor& touched,
                    std::optional<Tensor> scores, const Tensor& counters, int64_t stream) {
  SlotUse use{};
  use.num_ids = slots.numel();
  const int64_t num_slots = touched.numel();
  use.slots = values<int64_t>("slots", slots, slots, use.num_ids);
  use.tables = values<int32_t>("tables", tables, slots, use.num_ids);
  use.epoch = values<int64_t>("epoch", epoch, slots, 1);
  use.is_trained = values<bool>("is_trained", is_trained, slots, 1);
  use.touched = memory<int64_t>("touched", touched, slots, num_slots);
  if (scores) use.scores = memory<int64_t>("scores", *scores, slots, num_slots);
  use.counters = memory<int64_t>("counters", counters, slots, counters.numel());
  if (use.num_ids == 0) return;
  const char* const error =
      touch_slots(use, slots.get_device_index(), reinterpret_cast<void*>(stream));
  STD_TORCH_CHECK(error == nullptr, "noting the use of slots on the GPU failed: ", error);
}

void insert_binned_keys_on(const Tensor& bin_keys, const Tensor& bin_positions,
                           const Tensor& bin_ends, int64_t bins_log2, int64_t policy,
                           const Tensor& epoch, std::optional<Tensor> epoch_number,
                           const Tensor& released, std::optional<Tensor> scores_in,
                           const Tensor& digests, const Tensor& slot_keys, const Tensor& touched,
                           std::optional<Tensor> scores, const Tensor& geometry,
                           const Tensor& counters, const Tensor& slots, const Tensor& is_inserted,
                           const Tensor& new_keys, const Tensor& new_tables,
                           const Tensor& new_slots, const Tensor& is_evicted,
                           const Tensor& evicted_keys, const Tensor& evicted_scores,
                           const Tensor& evicted_touched, int64_t num_blocks, int64_t stream) {
  const Tensor& keys = bin_keys;
  const int64_t num_ids = keys.numel(), num_slots = digests.numel();
  STD_TORCH_CHECK(num_ids < int64_t{1} << 31, "bin_keys must hold fewer than 2**31 keys, got ",
                  num_ids);
  STD_TORCH_CHECK(policy >= 0 && policy < kNumPolicies, "policy must be a value of Policy, got ",
                  policy);
  STD_TORCH_CHECK(bins_log2 >= 0 && bins_log2 < 31, "bins_log2 must lie in [0, 31), got ",
                  bins_log2);
  STD_TORCH_CHECK((policy == 0) == !scores && (policy == 2) == epoch_number.has_value() &&
                      (policy == 3) == scores_in.has_value(),
                  "scores, epoch_number and scores_in must be those of the policy");
  BinnedInsertion insertion{};
  insertion.held = held_memory(digests, slot_keys, geometry, keys, num_slots);
  insertion.held.touched = memory<int64_t>("touched", touched, keys, num_slots);
  if (scores) insertion.held.scores = memory<int64_t>("scores", *scores, keys, num_slots);
  const int64_t num_tables = insertion.held.num_tables;
  insertion.held.counters = memory<int64_t>("counters", counters, keys, num_tables * kNumCounters);
  insertion.bin_keys = values<int64_t>("bin_keys", bin_keys, keys, num_ids);
  insertion.bin_positions = values<int32_t>("bin_positions", bin_positions, keys, num_ids);
  insertion.bin_ends =
      values<int32_t>("bin_ends", bin_ends, keys, std::max<int64_t>(num_tables, 1) << bins_log2);
  insertion.scores_in = values<int64_t>("scores_in", scores_in, keys, num_ids);
  insertion.epoch = values<int64_t>("epoch", epoch, keys, 1);
  insertion.epoch_number = values<int64_t>("epoch_number", epoch_number, keys, 1);
  insertion.released = values<int64_t>("released", released, keys, 1);
  insertion.slots = memory<int64_t>("slots", slots, keys, num_ids);
  insertion.is_inserted = memory<int32_t>("is_inserted", is_inserted, keys, num_ids);
  insertion.new_keys = memory<int64_t>("new_keys", new_keys, keys, num_ids);
  insertion.new_tables = memory<int32_t>("new_tables", new_tables, keys, num_ids);
  insertion.new_slots = memory<int64_t>("new_slots", new_slots, keys, num_ids);
  insertion.is_evicted = memory<int8_t>("is_evicted", is_evicted, keys, num_ids);
  insertion.evicted_keys = memory<int64_t>("evicted_keys", evicted_keys, keys, num_ids);
  insertion.evicted_scores = memory<int64_t>("evicted_scores", evicted_scores, keys, num_ids);
  insertion.evicted_touched = memory<int64_t>("evicted_touched", evicted_touched, keys, num_ids);
  insertion.policy = static_cast<int>(policy);
  insertion.bins_log2 = static_cast<int>(bins_log2);
  if (num_ids == 0) return;
  const char* const error = insert_binned_keys(insertion, num_blocks, keys.get_device_index(),
                                               reinterpret_cast<void*>(stream));
  STD_TORCH_CHECK(error == nullptr, "inserting keys on the GPU failed: ", error);
}

STABLE_TORCH_LIBRARY_FRAGMENT(torchembed_native, library) {
  library.def(
      "find_slots_on_gpu(Tensor keys, Tensor tables, Tensor digests, Tensor slot_keys,"
      " Tensor geometry, int stream) -> Tensor");
  library.def(
      "touch_slots_on_gpu(Tensor slots, Tensor tables, Tensor epoch, Tensor? is_trained,"
      " Tensor(a!) touched, Tensor(b!)? scores, Tensor(c!) counters, int stream) -> ()");
  library.def(
      "insert_binned_keys(Tensor bin_keys, Tensor bin_positions, Tensor bin_ends, int bins_log2,"
      " int policy, Tensor epoch, Tensor? epoch_number, Tensor released, Tensor? scores_in,"
      " Tensor(a!) digests, Tensor(b!) slot_keys, Tensor(c!) touched, Tensor(d!)? scores,"
      " Tensor geometry, Tensor(e!) counters, Tensor(f!) slots, Tensor(g!) is_inserted,"
      " Tensor(h!) new_keys, Tensor(i!) new_tables, Tensor(j!) new_slots, Tensor(k!) is_evicted,"
      " Tensor(l!) evicted_keys, Tensor(m!) evicted_scores, Tensor(n!) evicted_touched,"
      " int num_blocks, int stream) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(torchembed_native, CUDA, library) {
  library.impl("find_slots_on_gpu", TORCH_BOX(&find_slots_on));
  library.impl("touch_slots_on_gpu", TORCH_BOX(&touch_slots_on));
  library.impl("insert_binned_keys", TORCH_BOX(&insert_binned_keys_on));
}

}  // namespace
}  // namespace torchembed
