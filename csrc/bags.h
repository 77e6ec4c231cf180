// How ids are grouped into bags, from an operation's arguments.

#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "row_kernels.h"
#include "tensors.h"

namespace torchembed {

// The gradient map stores the bag of each id as int32, so a larger number would wrap around to
// another bag's gradient.
constexpr int64_t kMostBags = INT32_MAX;

// num_features * batch_size, checked: the arguments may come from torch.ops, where nothing has been
// checked before, and a product that wrapped around would pass for a small number of bags.
inline int64_t checked_num_bags(int64_t num_features, int64_t batch_size) {
  STD_TORCH_CHECK(num_features >= 0, "num_features must not be negative, got ", num_features);
  STD_TORCH_CHECK(batch_size >= 0, "batch_size must not be negative, got ", batch_size);
  int64_t num_bags = 0;
  STD_TORCH_CHECK(
      !__builtin_mul_overflow(num_features, batch_size, &num_bags) && num_bags <= kMostBags,
      "num_features * batch_size must be less than 2**31, got ", num_features, " * ", batch_size,
      "; split the batch");
  return num_bags;
}

// The bags of num_ids ids. Ids past the last bag are padding. It keeps pointers into its arguments,
// which must outlive it.
class BagLayout {
 public:
  BagLayout(const std::optional<Tensor>& offsets, const std::vector<int64_t>& hotness,
            int64_t num_features, int64_t batch_size, int64_t num_ids)
      : num_bags_(checked_num_bags(num_features, batch_size)) {
    if (offsets) {
      bags_.offsets = id_array("offsets", *offsets, num_bags_ + 1);
      check_offsets(num_ids);
    } else {
      check_hotness(hotness, num_features, batch_size, num_ids);
    }
    // Without samples no feature has an id, however many features there are said to be.
    feature_begins_.resize(batch_size == 0 ? 1 : num_features + 1);
    for (size_t feature = 0; feature + 1 < feature_begins_.size(); ++feature) {
      feature_begins_[feature + 1] = offsets
                                         ? bags_.offsets[(feature + 1) * batch_size]
                                         : feature_begins_[feature] + hotness[feature] * batch_size;
    }
    bags_.num_features = num_features;
    bags_.batch_size = batch_size;
    bags_.hotness = hotness.data();
    bags_.feature_begins = feature_begins_.data();
  }
  BagLayout(const BagLayout&) = delete;
  BagLayout& operator=(const BagLayout&) = delete;

  const Bags& bags() const { return bags_; }
  int64_t num_bags() const { return num_bags_; }

  // The ids that are in bags.
  int64_t num_bag_ids() const { return feature_begins_.back(); }

  // Position of the first id of each feature, and at last num_bag_ids(); without samples that
  // alone.
  const std::vector<int64_t>& feature_begins() const { return feature_begins_; }

  // Position of the first id of a feature-major bag; of bag num_bags() it is num_bag_ids().
  int64_t begin(int64_t bag) const {
    if (bag == num_bags()) return num_bag_ids();
    return bags_.begin(bag / bags_.batch_size, bag % bags_.batch_size);
  }

 private:
  void check_offsets(int64_t num_ids) const {
    int64_t last = 0;
    bool in_order = bags_.offsets[0] == 0;
    for (int64_t bag = 0; bag <= num_bags_; ++bag) {
      const int64_t offset = bags_.offsets[bag];
      in_order &= offset >= last;
      last = offset;
    }
    STD_TORCH_CHECK(in_order, "offsets must start at 0 and not decrease");
    STD_TORCH_CHECK(last <= num_ids, "offsets must end at the number of ids, ", num_ids,
                    ", or before, got ", last);
  }

  // Each feature's ids are compared with those that are left by a division: count * batch_size and
  // the sum over features may overflow, and offsets computed from them would be out of bounds.
  static void check_hotness(const std::vector<int64_t>& hotness, int64_t num_features,
                            int64_t batch_size, int64_t num_ids) {
    STD_TORCH_CHECK((int64_t)hotness.size() == num_features, "hotness must hold ", num_features,
                    " counts, got ", hotness.size());
    int64_t num_left = num_ids;
    bool fits = true;
    for (const int64_t count : hotness) {
      STD_TORCH_CHECK(count >= 0, "hotness must hold counts >= 0, got ", count);
      if (batch_size == 0) continue;
      fits = fits && count <= num_left / batch_size;
      if (fits) num_left -= count * batch_size;
    }
    STD_TORCH_CHECK(fits && num_left == 0, "the bags must hold ", num_ids,
                    " ids in all; give as many as sum(hotness) * batch_size");
  }

  const int64_t num_bags_;
  std::vector<int64_t> feature_begins_;
  Bags bags_{};
};

}  // namespace torchembed
