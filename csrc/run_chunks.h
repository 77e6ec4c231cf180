// The size of chunks of runs, on which the kernels that find runs and those that sum them agree.

#pragma once

namespace torchembed {

// Occurrences in a chunk of a run, and chunks in a group; run_sums.py describes both. Equal to
// RUN_CHUNK in core/types.py.
constexpr int kRunChunk = 32;

}  // namespace torchembed
