// The interface between the operations on hash tables on a GPU and their kernels.

#pragma once

#include <cstdint>

namespace torchembed {

// Memory of hash tables on a GPU, as torchembed/ops/hash_table/layout.py lays it out.
struct HashMemory {
  uint8_t* digests;  // aligned to 16 bytes
  int64_t* keys;
  int64_t* touched;
  int64_t* scores;  // null under LRU
  const int64_t* geometry;
  int64_t* counters;
  int num_tables;
};

// The arguments of insert_keys.py's kernel of the same name.
struct BinnedInsertion {
  HashMemory held;
  const int64_t* bin_keys;
  const int32_t* bin_positions;
  const int32_t* bin_ends;
  const int64_t* scores_in;  // null but for scores of the caller
  const int64_t* epoch;
  const int64_t* epoch_number;  // null but for pairs of epoch and count
  const int64_t* released;
  int64_t* slots;
  int32_t* is_inserted;
  int64_t* new_keys;
  int32_t* new_tables;
  int64_t* new_slots;
  int8_t* is_evicted;
  int64_t* evicted_keys;
  int64_t* evicted_scores;
  int64_t* evicted_touched;
  int policy;
  int bins_log2;
};

// The arguments of touch_slots.py's first kernel.
struct SlotUse {
  const int64_t* slots;
  const int32_t* tables;
  const int64_t* epoch;
  const bool* is_trained;  // null where all batches are
  int64_t* touched;
  int64_t* scores;  // counts of uses, under LFU alone; else null
  int64_t* counters;
  int64_t num_ids;
};

// All launch on `stream` of `device`, which is the caller's current one, and return the runtime's
// message where that failed, else nullptr.

// Writes the slot of each of `num_ids` keys, -1 where its table has none for it, to `slots`.
const char* find_slots(const HashMemory& held, const int64_t* keys, const int32_t* tables,
                       int64_t num_ids, int64_t* slots, int device, void* stream);

// Notes the use of slots, under LRU and LFU.
const char* touch_slots(const SlotUse& use, int device, void* stream);

// Inserts binned keys, by about as many warps as there may be blocks to insert into.
const char* insert_binned_keys(const BinnedInsertion& insertion, int64_t num_blocks, int device,
                               void* stream);

}  // namespace torchembed
