// The top k sums of two lists of scores for each query and head of a product-key memory, exactly (1907.05242, 3.1).
//
// Scores are taken as integers of the same order, in which the k-th best is found by halving an interval and counting,
// without a branch that depends on a score; the k best of a half are sorted by counting who is better; then only pairs of
// ranks i * j <= k can win. Of equal scores the first places are taken, of equal sums the lower slots.

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
  typedef int32_t Key;
  typedef uint32_t Unsigned;
  typedef int32_t Keys __attribute__((vector_size(BYTES), aligned(4), may_alias));
};
template <> struct Order<double> {
  typedef int64_t Key;
  typedef uint64_t Unsigned;
  typedef int64_t Keys __attribute__((vector_size(BYTES), aligned(8), may_alias));
};

// Integers that compare as the numbers do, both zeros alike; NaN is above all.
template <class T> typename Order<T>::Key ordered(T x) {
  if (x != x) return std::numeric_limits<typename Order<T>::Key>::max();
  x += 0;  // of -0 makes 0
  typename Order<T>::Key bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits < 0 ? bits ^ std::numeric_limits<typename Order<T>::Key>::max() : bits;
}

template <class T> struct Finder {
  using Key = typename Order<T>::Key;
  using Unsigned = typename Order<T>::Unsigned;
  using Keys = typename Order<T>::Keys;
  static constexpr int64_t LANES = BYTES / sizeof(T);
  std::vector<Key> keys, chosen;
  std::vector<int64_t> places, sorted, tied;

  int64_t whole = 0;  // of keys, with the lowest behind them

  int64_t at_least(const std::vector<Key>& among, Key bound, int64_t size) const {
    Keys count = {};
    for (int64_t i = 0; i < size; i += LANES) count -= *(const Keys*)&among[i] >= bound;
    int64_t sum = 0;
    for (int64_t lane = 0; lane < LANES; ++lane) sum += count[lane];
    return sum;
  }

  // ``places`` of the k best of ``size`` scores, in the order of the places; ``chosen`` are their keys. Of those that equal the
  // k-th best, the places of lower ``numbers`` are taken.
  void find(const T* scores, const int64_t* numbers, int64_t size, int64_t k) {
    whole = (size + LANES - 1) / LANES * LANES;
    keys.assign(whole, std::numeric_limits<Key>::min());
    for (int64_t i = 0; i < size; ++i) keys[i] = ordered(scores[i]);
    Key low = *std::min_element(keys.begin(), keys.begin() + size), high = *std::max_element(keys.begin(), keys.begin() + size);
    int64_t count = size;  // that are at least low: never fewer than k
    while (count > k && low < high) {
      const Key middle = Key(Unsigned(low) + (Unsigned(high) - Unsigned(low)) / 2 + 1);
      const int64_t found = at_least(keys, middle, whole);
      if (found >= k)
        low = middle, count = found;
      else
        high = middle - 1;
    }
    places.resize(size + 1), chosen.resize(whole + LANES);
    if (count > k) {
      tied.clear();
      for (int64_t i = 0; i < size; ++i)
        if (keys[i] == low) tied.push_back(i);
      const auto spare = tied.end() - (count - k);
      std::nth_element(tied.begin(), spare, tied.end(), [&](int64_t a, int64_t b) { return numbers[a] < numbers[b]; });
      for (auto i = spare; i != tied.end(); ++i) keys[*i] = std::numeric_limits<Key>::min();
    }
    int64_t taken = 0;
    for (int64_t i = 0; i < size; ++i) {
      places[taken] = i, chosen[taken] = keys[i];
      taken += keys[i] >= low;
    }
  }

  // The ``places`` of ``find``, best first.
  void sort(int64_t k) {
    const int64_t size = (k + LANES - 1) / LANES * LANES;
    std::fill(chosen.begin() + k, chosen.begin() + size, std::numeric_limits<Key>::min());
    sorted.assign(k, 0);
    for (int64_t i = 0; i < k; ++i) {
      int64_t rank = chosen[i] == std::numeric_limits<Key>::max() ? 0 : at_least(chosen, chosen[i] + 1, size);
      for (int64_t j = 0; j < i; ++j) rank += chosen[j] == chosen[i];
      sorted[rank] = places[i];
    }
  }
};

template <class T>
void search(const T* scores, int64_t* slots, T* sums, int64_t heads, int64_t queries, int64_t size, int64_t k, int threads) {
  const int64_t ranks = std::min(k, size);
  std::vector<int64_t> first, second;  // ranks of the pairs that can win
  for (int64_t i = 0; i < ranks; ++i)
    for (int64_t j = 0; j < ranks && (i + 1) * (j + 1) <= k; ++j) first.push_back(i), second.push_back(j);
  const int64_t pairs = first.size();
  std::vector<int64_t> places(size);
  std::iota(places.begin(), places.end(), 0);
#pragma omp parallel num_threads(threads)
  {
    Finder<T> rows, columns, winners;
    std::vector<T> added(pairs);
    std::vector<int64_t> pair_slots(pairs);
#pragma omp for
    for (int64_t n = 0; n < queries; ++n)
      for (int64_t h = 0; h < heads; ++h) {
        const T *one = scores + (2 * h * queries + n) * size, *two = one + queries * size;
        rows.find(one, places.data(), size, ranks), rows.sort(ranks);
        columns.find(two, places.data(), size, ranks), columns.sort(ranks);
        for (int64_t p = 0; p < pairs; ++p) {
          const int64_t row = rows.sorted[first[p]], column = columns.sorted[second[p]];
          added[p] = one[row] + two[column], pair_slots[p] = row * size + column;
        }
        winners.find(added.data(), pair_slots.data(), pairs, k);
        for (int64_t i = 0; i < k; ++i) {
          const int64_t p = winners.places[i], at = (n * heads + h) * k + i;
          slots[at] = pair_slots[p], sums[at] = added[p];
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
