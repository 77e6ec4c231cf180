// How ids are grouped into bags, from an operation's arguments.

#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "row_kernels.h"
#include "tensors.h"

namespace torchembed {

// The bags of num_ids ids. Ids past the last bag are spare. The arguments outlive it.
class BagLayout {
 public:
  BagLayout(const std::optional<Tensor>& offsets, const std::vector<int64_t>& hotness,
            int64_t num_features, int64_t batch_size, int64_t num_ids)
      : feature_begins_(num_features + 1) {
    bags_ = {num_features, batch_size, IdArray(), hotness.data(), feature_begins_.data()};
    if (offsets) {
      bags_.offsets = id_array("offsets", *offsets, num_bags() + 1);
      check_offsets(num_ids);
    } else {
      STD_TORCH_CHECK((int64_t)hotness.size() == num_features, "hotness must hold ", num_features,
                      " counts, got ", hotness.size());
    }
    for (int64_t feature = 0; feature < num_features; ++feature) {
      feature_begins_[feature + 1] = offsets
                                         ? bags_.offsets[(feature + 1) * batch_size]
                                         : feature_begins_[feature] + hotness[feature] * batch_size;
    }
    STD_TORCH_CHECK(offsets || num_bag_ids() == num_ids, "the bags must hold ", num_ids,
                    " ids in all, got ", num_bag_ids());
  }
  BagLayout(const BagLayout&) = delete;
  BagLayout& operator=(const BagLayout&) = delete;

  const Bags& bags() const { return bags_; }
  int64_t num_bags() const { return bags_.num_features * bags_.batch_size; }

  // The ids that are in bags.
  int64_t num_bag_ids() const { return feature_begins_.back(); }

  // Position of the first id of each feature, and at last num_bag_ids().
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
    for (int64_t bag = 0; bag <= num_bags(); ++bag) {
      const int64_t offset = bags_.offsets[bag];
      in_order &= offset >= last;
      last = offset;
    }
    STD_TORCH_CHECK(in_order, "offsets must start at 0 and not decrease");
    STD_TORCH_CHECK(last <= num_ids, "offsets must end at the number of ids, ", num_ids,
                    ", or before, got ", last);
  }

  std::vector<int64_t> feature_begins_;
  Bags bags_;
};

}  // namespace torchembed
