#include "row_kernels.h"

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdlib>
#include <string>
#include <string_view>

namespace torchembed {

namespace portable {
extern const RowKernels kRowKernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const RowKernels kRowKernels;
}
namespace avx512 {
extern const RowKernels kRowKernels;
}
#endif

namespace {

bool runs_here(const RowKernels& kernels) {
#if defined(__x86_64__)
  if (&kernels == &avx2::kRowKernels) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  }
  if (&kernels == &avx512::kRowKernels) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("f16c");
  }
#endif
  return &kernels == &portable::kRowKernels;
}

const RowKernels& pick_row_kernels() {
  const char* variable = std::getenv("TORCHEMBED_INSTRUCTION_SET");
  const std::string_view wanted = variable ? variable : "";
  std::string names;
  for (const RowKernels* kernels : {
#if defined(__x86_64__)
           &avx512::kRowKernels,
           &avx2::kRowKernels,
#endif
           &portable::kRowKernels,
       }) {
    if (!runs_here(*kernels)) continue;
    if (wanted.empty() || wanted == kernels->instruction_set) return *kernels;
    names += names.empty() ? "" : " or ";
    names += kernels->instruction_set;
  }
  STD_TORCH_CHECK(false, "TORCHEMBED_INSTRUCTION_SET must be ", names, " on this processor, got ",
                  wanted, "; unset it to take the best");
}

std::string instruction_set() { return row_kernels().instruction_set; }

STABLE_TORCH_LIBRARY_FRAGMENT(torchembed_native, library) {
  library.def("instruction_set() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(torchembed_native, CompositeExplicitAutograd, library) {
  library.impl("instruction_set", TORCH_BOX(&instruction_set));
}

}  // namespace

const RowKernels& row_kernels() {
  static const RowKernels& picked = pick_row_kernels();
  return picked;
}

}  // namespace torchembed
