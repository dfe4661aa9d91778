// The exact top k sums of two lists of scores, for each query and head of a product-key memory (1907.05242, 3.1).
//
// Scores become integers of the same order. Bisection finds the k-th largest integer, by counting without branches that
// depend on a score. The k largest of each half are sorted by counting larger ones. Only pairs with ranks i, j >= 1
// and i * j <= k can be in the top k. Of equal scores, lower indices are selected; of equal sums, lower slots.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif

template <class T> struct Order;
template <> struct Order<float> {
  typedef int32_t Key;  // a score as an integer of the same order
  typedef uint32_t Unsigned;
  typedef int32_t Keys __attribute__((vector_size(BYTES), aligned(4), may_alias));
};
template <> struct Order<double> {
  typedef int64_t Key;
  typedef uint64_t Unsigned;
  typedef int64_t Keys __attribute__((vector_size(BYTES), aligned(8), may_alias));
};

// Map scores to integers of the same order; both zeros are equal, and NaN is the largest.
template <class T> typename Order<T>::Key ordered(T x) {
  if (x != x) return std::numeric_limits<typename Order<T>::Key>::max();
  x += 0;  // -0 becomes 0
  typename Order<T>::Key bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits < 0 ? bits ^ std::numeric_limits<typename Order<T>::Key>::max() : bits;
}

template <class T> struct Finder {
  using Key = typename Order<T>::Key;
  using Unsigned = typename Order<T>::Unsigned;
  using Keys = typename Order<T>::Keys;
  static constexpr int64_t LANES = BYTES / sizeof(T);
  std::vector<Key> keys, selected;
  std::vector<int64_t> indices, sorted, tied;

  int64_t count_at_least(const std::vector<Key>& among, Key bound, int64_t size) const {
    Keys count = {};
    for (int64_t i = 0; i < size; i += LANES) count -= *(const Keys*)&among[i] >= bound;
    int64_t sum = 0;
    for (int64_t lane = 0; lane < LANES; ++lane) sum += count[lane];
    return sum;
  }

  // Set ``indices`` to the ascending indices of the k largest of ``size`` scores, and ``selected`` to their keys.
  // Of scores equal to the k-th largest, those with the lowest ``priority`` are selected.
  void find(const T* scores, const int64_t* priority, int64_t size, int64_t k) {
    const int64_t padded_size = (size + LANES - 1) / LANES * LANES;  // keys are padded with the lowest integer
    keys.assign(padded_size, std::numeric_limits<Key>::min());
    for (int64_t i = 0; i < size; ++i) keys[i] = ordered(scores[i]);
    Key low = *std::min_element(keys.begin(), keys.begin() + size), high = *std::max_element(keys.begin(), keys.begin() + size);
    int64_t count = size;  // number of keys >= low; at least k
    while (count > k && low < high) {
      const Key middle = Key(Unsigned(low) + (Unsigned(high) - Unsigned(low)) / 2 + 1);
      const int64_t upper_count = count_at_least(keys, middle, padded_size);
      if (upper_count >= k)
        low = middle, count = upper_count;
      else
        high = middle - 1;
    }
    indices.resize(size + 1), selected.resize(padded_size + LANES);
    if (count > k) {
      tied.clear();
      for (int64_t i = 0; i < size; ++i)
        if (keys[i] == low) tied.push_back(i);
      const auto spare = tied.end() - (count - k);
      std::nth_element(tied.begin(), spare, tied.end(), [&](int64_t a, int64_t b) { return priority[a] < priority[b]; });
      for (auto i = spare; i != tied.end(); ++i) keys[*i] = std::numeric_limits<Key>::min();
    }
    int64_t n_selected = 0;
    for (int64_t i = 0; i < size; ++i) {
      indices[n_selected] = i, selected[n_selected] = keys[i];
      n_selected += keys[i] >= low;
    }
  }

  // Set ``sorted`` to the ``indices`` of ``find``, in descending order of scores.
  void sort(int64_t k) {
    const int64_t size = (k + LANES - 1) / LANES * LANES;
    std::fill(selected.begin() + k, selected.begin() + size, std::numeric_limits<Key>::min());
    sorted.assign(k, 0);
    for (int64_t i = 0; i < k; ++i) {
      int64_t rank = selected[i] == std::numeric_limits<Key>::max() ? 0 : count_at_least(selected, selected[i] + 1, size);
      for (int64_t j = 0; j < i; ++j) rank += selected[j] == selected[i];
      sorted[rank] = indices[i];
    }
  }
};

template <class T>
void search(const T* scores, int64_t* slots, T* sums, int64_t heads, int64_t queries, int64_t size, int64_t k, int threads) {
  const int64_t ranks = std::min(k, size);
  std::vector<int64_t> first, second;  // ranks of the pairs that can be in the top k
  for (int64_t i = 0; i < ranks; ++i)
    for (int64_t j = 0; j < ranks && (i + 1) * (j + 1) <= k; ++j) first.push_back(i), second.push_back(j);
  const int64_t pairs = first.size();
  std::vector<int64_t> priority(size);
  std::iota(priority.begin(), priority.end(), 0);
#pragma omp parallel num_threads(threads)
  {
    Finder<T> rows, columns, top;
    std::vector<T> pair_sums(pairs);
    std::vector<int64_t> pair_slots(pairs);
#pragma omp for
    for (int64_t n = 0; n < queries; ++n)
      for (int64_t h = 0; h < heads; ++h) {
        const T *half0 = scores + (2 * h * queries + n) * size, *half1 = half0 + queries * size;
        rows.find(half0, priority.data(), size, ranks), rows.sort(ranks);
        columns.find(half1, priority.data(), size, ranks), columns.sort(ranks);
        for (int64_t p = 0; p < pairs; ++p) {
          const int64_t row = rows.sorted[first[p]], column = columns.sorted[second[p]];
          pair_sums[p] = half0[row] + half1[column], pair_slots[p] = row * size + column;
        }
        top.find(pair_sums.data(), pair_slots.data(), pairs, k);
        for (int64_t i = 0; i < k; ++i) {
          const int64_t p = top.indices[i], at = (n * heads + h) * k + i;
          slots[at] = pair_slots[p], sums[at] = pair_sums[p];
        }
      }
  }
}

}  // namespace

// scores [2 H, n, C], the halves of a head one after the other; slots and sums [n, H, k].
extern "C" {
void search_float(
    const float* scores, int64_t* slots, float* sums, int64_t heads, int64_t queries, int64_t size, int64_t k, int threads) {
  search(scores, slots, sums, heads, queries, size, k, threads);
}
void search_double(
    const double* scores, int64_t* slots, double* sums, int64_t heads, int64_t queries, int64_t size, int64_t k,
    int threads) {
  search(scores, slots, sums, heads, queries, size, k, threads);
}
}
