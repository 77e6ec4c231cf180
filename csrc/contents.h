// Checks of the contents of tensors. They take a pass over the tensor, so they run only where
// TORCHEMBED_CHECK_OPERATIONS asks for them, as in torchembed/core/environment.py.

#pragma once

#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <string>

#include "row_kernels.h"

namespace torchembed {

inline bool checks_contents() {
  static const bool is_on = [] {
    const char* variable = std::getenv("TORCHEMBED_CHECK_OPERATIONS");
    std::string value = variable ? variable : "";
    std::transform(value.begin(), value.end(), value.begin(),
                   [](unsigned char letter) { return (char)std::tolower(letter); });
    return value != "" && value != "0" && value != "false" && value != "no";
  }();
  return is_on;
}

// Checks that every one of `count` numbers is in [first, end).
template <class Numbers>
void check_in_range(const char* name, const Numbers& numbers, int64_t count, int64_t first,
                    int64_t end, const char* advice) {
  for (int64_t index = 0; index < count; ++index) {
    const int64_t number = numbers[index];
    STD_TORCH_CHECK(number >= first && number < end, name, " must lie in [", first, ", ", end,
                    "), got ", number, " at position ", index, "; ", advice);
  }
}

// Checks that `count` numbers do not decrease, or increase where they must be distinct.
template <class Numbers>
void check_ascending(const char* name, const Numbers& numbers, int64_t count, bool distinct,
                     const char* advice) {
  for (int64_t index = 1; index < count; ++index) {
    const int64_t before = numbers[index - 1], number = numbers[index];
    STD_TORCH_CHECK(distinct ? before < number : before <= number, name,
                    distinct ? " must increase" : " must not decrease", ", got ", number, " after ",
                    before, " at position ", index, "; ", advice);
  }
}

}  // namespace torchembed
