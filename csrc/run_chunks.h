// Chunks of runs: what finding runs and updating rows agree on.

#pragma once

namespace torchembed {

// Occurrences of a chunk of a run, and chunks of a group: run_sums.py says what these are. Equal to
// RUN_CHUNK in core/types.py.
constexpr int kRunChunk = 32;

}  // namespace torchembed
