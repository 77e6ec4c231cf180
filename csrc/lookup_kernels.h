// The kernels of lookups: pooled, unpooled, and the gradient of weights of ids.

#pragma once

#include "row_kernels.h"
#include "row_vectors.h"

namespace torchembed::TORCHEMBED_ISA {

// Pooled vectors whose cache lines are prefetched before they are written.
constexpr int64_t kBagsAhead = 4;

constexpr int64_t kLineBytes = 64;

TORCHEMBED_INLINE bool has_row(const RowMatrix& matrix, int64_t row) {
  return (uint64_t)row < (uint64_t)matrix.num_rows;
}

// Prefetches the cache lines of count elements into the second-level cache: the first-level one has
// too few fill buffers for kRowsAhead rows in flight.
template <class Element>
TORCHEMBED_INLINE void prefetch(const Element* data, int64_t count) {
  for (int64_t index = 0; index < count; index += kLineBytes / (int64_t)sizeof(Element)) {
    __builtin_prefetch(data + index, 0, 2);
  }
}

// Prefetches lines that are about to be written, so that stores do not wait for them to be read.
TORCHEMBED_INLINE void prefetch_for_write(const char* data, int64_t num_bytes) {
  for (int64_t byte = 0; byte < num_bytes; byte += kLineBytes) {
    __builtin_prefetch(data + byte, 1, 3);
  }
}

// Pools columns [column, column + 16 * kVectors) of a part of the bags; their sums stay in
// registers. Arguments are copied to local variables: a store to `out` might alias `op`, so the
// compiler would load them again after each store.
template <class Element, class Id, bool kScaled, int kVectors, class Lanes>
void pool_columns(const PooledLookup& op, const Id* rows, int64_t first_bag, int64_t last_bag,
                  int64_t column, Lanes lanes) {
  const RowMatrix matrix = op.matrix, out = op.out;
  const Element* const data = (const Element*)matrix.data + column;
  const float* const scales = op.scales;
  const Bags bags = op.bags;
  const bool mean = op.mean, stream_out = op.stream_out;
  const int64_t last_id = op.num_ids - 1;
  const int64_t out_bytes = bytes_of(out.type);
  const int64_t out_stride = bags.num_features * out.dim * out_bytes;
  for (int64_t bag = first_bag; bag < last_bag;) {
    const int64_t feature = bag / bags.batch_size;
    int64_t sample = bag % bags.batch_size;
    const int64_t hotness = bags.offsets ? 0 : bags.hotness[feature];
    int64_t begin = bags.begin(feature, sample);
    char* target = (char*)out.data + (feature * out.dim + column) * out_bytes + sample * out_stride;
    for (; sample < bags.batch_size && bag < last_bag; ++sample, ++bag, target += out_stride) {
      if (!stream_out) {
        prefetch_for_write(target + kBagsAhead * out_stride, kVectors * kLanes * out_bytes);
      }
      const int64_t end = bags.offsets ? bags.offsets[bag + 1] : begin + hotness;
      Floats sums[kVectors] = {};
      for (int64_t position = begin; position < end; ++position) {
        const int64_t row = rows[position];
        if (!has_row(matrix, row)) continue;
        const int64_t next =
            rows[position + kRowsAhead < last_id ? position + kRowsAhead : last_id];
        const Element* const source = data + row * matrix.dim;
        // The prefetch of a row that is out of range goes to the row in use, which needs no branch.
        const Element* const ahead = data + (has_row(matrix, next) ? next : row) * matrix.dim;
        for (int vector = 0; vector < kVectors; ++vector) {
          prefetch(ahead + vector * kLanes, kLanes);
          Floats x = load(source + vector * kLanes, lanes);
          if constexpr (kScaled) x = x * scales[position];
          sums[vector] = sums[vector] + x;
        }
      }
      if (mean && end > begin) {
        for (Floats& sum : sums) sum = sum / (float)(end - begin);
      }
      with_element(out.type, [&](auto* element) {
        for (int vector = 0; vector < kVectors; ++vector) {
          auto* const part = (decltype(element))target + vector * kLanes;
          stream_out ? stream(part, sums[vector], lanes) : store(part, sums[vector], lanes);
        }
      });
      begin = end;
    }
  }
}

template <class Element, class Id, bool kScaled>
void pool_bags(const PooledLookup& op, const Id* rows, int64_t first_bag, int64_t last_bag) {
  // A row wider than one block of columns takes several passes over the ids. A few bags at a time,
  // so that the ids and rows are still in cache in the second pass.
  constexpr int64_t kBags = 64;
  for (int64_t first = first_bag; first < last_bag; first += kBags) {
    const int64_t last = first + kBags < last_bag ? first + kBags : last_bag;
    for_each_block(op.matrix.dim, [&](int64_t column, auto count, auto lanes) {
      pool_columns<Element, Id, kScaled, count.value>(op, rows, first, last, column, lanes);
    });
  }
}

void pooled_lookup(const PooledLookup& op, int64_t first_bag, int64_t last_bag) {
  with_element(op.matrix.type, [&](auto* element) {
    using Element = std::remove_pointer_t<decltype(element)>;
    const auto pool = [&](const auto* rows) {
      using Id = std::remove_const_t<std::remove_pointer_t<decltype(rows)>>;
      if (op.scales) {
        pool_bags<Element, Id, true>(op, rows, first_bag, last_bag);
      } else {
        pool_bags<Element, Id, false>(op, rows, first_bag, last_bag);
      }
    };
    op.rows.is_wide() ? pool(op.rows.wide()) : pool(op.rows.narrow());
  });
  if (op.stream_out) end_streaming();
}

template <class Element, class Out>
TORCHEMBED_INLINE void convert_row(const Element* source, Out* target, int64_t dim) {
  for_each_vector(dim, [&](int64_t column, auto lanes) {
    store(target + column, load(source + column, lanes), lanes);
  });
}

template <class Element>
float dot(const Element* row, const float* floats, int64_t dim) {
  Floats sum{};
  for_each_vector(dim, [&](int64_t column, auto lanes) {
    sum = sum + load(row + column, lanes) * load(floats + column, lanes);
  });
  return sum_of_lanes(sum);
}

template <class Element>
void pooled_weights_backward_of(const PooledWeightsBackward& op, int64_t first_bag,
                                int64_t last_bag, float* grad_row) {
  const Element* const data = (const Element*)op.weight.data;
  const int64_t dim = op.weight.dim;
  int64_t feature = first_bag / op.bags.batch_size, sample = first_bag % op.bags.batch_size;
  for (int64_t bag = first_bag; bag < last_bag; ++bag) {
    const int64_t begin = op.bags.begin(feature, sample), end = op.bags.end(feature, sample);
    with_element(op.grad.type, [&](auto* element) {
      const int64_t row = sample * op.bags.num_features + feature;
      convert_row((decltype(element))op.grad.data + row * dim, grad_row, dim);
    });
    const float scale = op.mean ? 1.0f / (float)(end - begin) : 1.0f;
    for (int64_t position = begin; position < end; ++position) {
      if (position + kRowsAhead < op.num_ids) {
        const int64_t next = op.rows[position + kRowsAhead];
        if (has_row(op.weight, next)) prefetch(data + next * dim, dim);
      }
      const int64_t row = op.rows[position];
      op.out[position] =
          has_row(op.weight, row) ? dot(data + row * dim, grad_row, dim) * scale : 0.0f;
    }
    if (++sample == op.bags.batch_size) {
      sample = 0;
      ++feature;
    }
  }
}

void pooled_weights_backward(const PooledWeightsBackward& op, int64_t first_bag, int64_t last_bag,
                             float* scratch) {
  with_element(op.weight.type, [&](auto* element) {
    pooled_weights_backward_of<std::remove_pointer_t<decltype(element)>>(op, first_bag, last_bag,
                                                                         scratch);
  });
}

template <class Element>
void sequence_lookup_of(const SequenceLookup& op, int64_t first_id, int64_t last_id) {
  const Element* const data = (const Element*)op.weight.data;
  const int64_t dim = op.weight.dim;
  const int64_t out_bytes = dim * bytes_of(op.out.type);
  for (int64_t position = first_id; position < last_id; ++position) {
    if (position + kRowsAhead < op.num_ids) {
      const int64_t next = op.rows[position + kRowsAhead];
      if (has_row(op.weight, next)) prefetch(data + next * dim, dim);
    }
    const int64_t row = op.rows[position];
    char* const target = (char*)op.out.data + position * out_bytes;
    if (!has_row(op.weight, row)) {
      std::memset(target, 0, out_bytes);
    } else if (op.weight.type == op.out.type) {
      std::memcpy(target, data + row * dim, out_bytes);
    } else {
      with_element(op.out.type, [&](auto* element) {
        convert_row(data + row * dim, (decltype(element))target, dim);
      });
    }
  }
}

void sequence_lookup(const SequenceLookup& op, int64_t first_id, int64_t last_id) {
  with_element(op.weight.type, [&](auto* element) {
    sequence_lookup_of<std::remove_pointer_t<decltype(element)>>(op, first_id, last_id);
  });
}

}  // namespace torchembed::TORCHEMBED_ISA
