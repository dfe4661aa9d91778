// Attention over a window of the past for CPUs, without a score matrix in memory.
//
//   s_tx = q_t . (k_x + p_x) + b_x + c_x - d_t
//   a_tx = m_x exp(s_tx) / Z_t,  a_tn = exp(r_t . e_n) / Z_t,  Z_t = sum_x m_x exp(s_tx) + sum_n exp(r_t . e_n)
//   y_t  = sum_x a_tx v_x + sum_n a_tn u_n
//
// with p, b and m the vector, bias and soft mask of a distance, c and d the biases of each stream's keys and queries.
// Column x is the x-th visible key of row t, counted from the nearest (window.py). Persistent keys e and values u, with
// their query r, are another part of the softmax. A task is one stream and head. It computes ROWS rows at a time, in
// chunks of the keys that these rows see, so that its cost grows with the window of its head. The softmax is computed
// online (2205.14135, algorithm 1). The backward pass computes scores again and normalises them by the log-sum-exp.
// Keys of the past get a gradient only if the caller passes pointers for it.
//
// Terms of the distance are in tables whose index rises with the keys: column x has index n - 1 - x + PAD, with PAD
// entries on both sides for keys of a chunk that some row does not see.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64, ROWS = 8;  // 2 x ROWS sums in 32 registers
#elif defined(__AVX__)
constexpr int BYTES = 32, ROWS = 4;
#else
constexpr int BYTES = 16, ROWS = 4;
#endif
constexpr long CHUNK = 256;  // most keys of a chunk
constexpr long PAD = 64;  // at least twice ROWS, and at least a vector

template <class T> struct Simd;
template <> struct Simd<float> {
  typedef float Vector __attribute__((vector_size(BYTES)));
  typedef float Unaligned __attribute__((vector_size(BYTES), aligned(4)));
  typedef int32_t Bits __attribute__((vector_size(BYTES)));
  static constexpr float ROUND = 12582912.0f, LOWEST = -87.0f, HIGHEST = 70.0f;  // ROUND: 1.5 * 2^23
  static constexpr float LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
  static constexpr int MANTISSA = 23, DEGREE = 7;
};
template <> struct Simd<double> {
  typedef double Vector __attribute__((vector_size(BYTES)));
  typedef double Unaligned __attribute__((vector_size(BYTES), aligned(8)));
  typedef int64_t Bits __attribute__((vector_size(BYTES)));
  static constexpr double ROUND = 6755399441055744.0, LOWEST = -708.0, HIGHEST = 691.0;  // ROUND: 1.5 * 2^52
  static constexpr double LN2_HIGH = 0.693145751953125, LN2_LOW = 1.42860682030941723212e-6;
  static constexpr int MANTISSA = 52, DEGREE = 13;
};
template <class T> using Vector = typename Simd<T>::Vector;
template <class T> constexpr long LANES = BYTES / sizeof(T);
template <class T> constexpr long GRAIN = LANES<T> > ROWS ? LANES<T> : ROWS;  // chunks have whole vectors and blocks of keys

template <class T> inline Vector<T> load(const T* from) { return *(const typename Simd<T>::Unaligned*)from; }
template <class T> inline void store(T* to, Vector<T> x) { *(typename Simd<T>::Unaligned*)to = x; }

long round_up(long x, long to) { return (x + to - 1) / to * to; }
long round_down(long x, long to) { return x / to * to; }

// exp(x) = 2^n exp(r) with |r| <= ln 2 / 2; 0 below LOWEST, bounded above HIGHEST.
template <class T> inline Vector<T> exponential(Vector<T> x) {
  using S = Simd<T>;
  const typename S::Bits is_zero = x <= S::LOWEST;
  x = x > S::HIGHEST ? x * 0 + S::HIGHEST : x;  // a NaN stays a NaN
  const Vector<T> shifted = x * T(1.44269504088896340736) + S::ROUND;
  const Vector<T> n = shifted - S::ROUND;
  const Vector<T> r = (x - n * S::LN2_HIGH) - n * S::LN2_LOW;
  double factorial = 1;
  for (int k = 2; k <= S::DEGREE; ++k) factorial *= k;
  Vector<T> sum = r * 0 + T(1 / factorial);
#pragma GCC unroll 16
  for (int k = S::DEGREE; k > 0; --k) {
    factorial /= k;
    sum = sum * r + T(1 / factorial);
  }
  return (Vector<T>)(((typename S::Bits)sum + ((typename S::Bits)shifted << S::MANTISSA)) & ~is_zero);
}

template <class T> inline T largest(Vector<T> x) {
  T maximum = x[0];
  for (long i = 1; i < LANES<T>; ++i) maximum = std::max(maximum, T(x[i]));
  return maximum;
}
template <class T> inline T total(Vector<T> x) {
  T sum = x[0];
  for (long i = 1; i < LANES<T>; ++i) sum += x[i];
  return sum;
}

// out[i, v] (+)= sum over k of a[i * row + k * step] * b[k * ldb + v * next], for ROWS rows i and N vectors v
template <class T, int N, bool ADD>
inline void tile(const T* a, long row, long step, const T* b, long ldb, long next, T* out, long ldo, long depth) {
  Vector<T> sum[ROWS][N];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < N; ++v) sum[i][v] = ADD ? load(out + i * ldo + v * LANES<T>) : Vector<T>{};
  for (long k = 0; k < depth; ++k, a += step, b += ldb) {
    Vector<T> right[N];
#pragma GCC unroll 2
    for (int v = 0; v < N; ++v) right[v] = load(b + v * next);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < N; ++v) sum[i][v] += a[i * row] * right[v];
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < N; ++v) store(out + i * ldo + v * LANES<T>, sum[i][v]);
}

struct Strides {
  int64_t stream, head, row;
};

// Rows of one head. The rows of stream b begin at start + b * stream.
struct Rows {
  void* start;
  int64_t stream, row;
};

}  // namespace

// Arguments. Pointers are to float or double with a contiguous last dimension, or null.
struct Call {
  int64_t streams, heads, rows, width, persistent, distances, shift, threads, biases;
  // [B, H, ., K], with the strides below.
  const void *q, *k, *v, *extra_q, *g;
  void *y, *dq, *dk, *dv, *dextra_q;
  Strides q_, k_, v_, extra_q_, g_, y_, dq_, dk_, dv_, dextra_q_;
  // [H]: number of past keys of each head, and rows of past keys and values and of their gradients.
  const int64_t* past;
  const Rows *k_old, *v_old, *dk_old, *dv_old;
  // The tensors below are contiguous. Persistent keys and values [H, N, K], log-sum-exp [B, H, T].
  const void *extra_k, *extra_v;
  void* lse;
  // [H]: visible keys; how many of the nearest have no bias and m = 1; heads from the longest to the shortest.
  const int64_t *columns, *flat, *order;
  // [H, n + 2 PAD]: term added to scores, m, and dm/dz.
  const void *table, *mask, *slope;
  // p [n + 2 PAD, Kp], padded with zeros; and the same in panels.
  const void *vectors, *vector_panels;
  int64_t* flops;  // FLOPs of the executed products are added to it
  // Gradients [H, N, K], [H, N, K], [n, K], [H].
  void *dextra_k, *dextra_v, *dvectors, *dz;
  // c [B, H, biases], for the longest past and the segment, and d [B, H, T].
  const void *key_bias, *query_bias;
  void *dkey_bias, *dquery_bias;
};

namespace {

template <class T> struct At {  // rows of one stream and head
  T* start;
  long row;
  T* operator[](long t) const { return start + t * row; }
};
template <class T> At<T> at(const void* base, const Strides& s, long b, long h) {
  return {(T*)base + b * s.stream + h * s.head, s.row};
}
template <class T> At<T> at(const Rows* heads, long b, long h) {
  return heads ? At<T>{(T*)heads[h].start + b * heads[h].stream, heads[h].row} : At<T>{nullptr, 0};
}

// Memory that is reused by later tasks and calls, because the allocation of pages is slow.
template <class T> struct Buffer {
  std::vector<T> memory;
  T* sized(long size) {
    if ((long)memory.size() < size) memory.resize(size);
    return memory.data();
  }
  T* zeroed(long size) {
    std::fill_n(sized(size), size, T(0));
    return memory.data();
  }
};

// Buffers of one thread. Index 0 is the window and 1 the persistent part; only the calling thread's ``sums`` are used.
template <class T> struct Buffers {
  Buffer<T> k[2], v[2], k_panels[2], v_panels[2], dk[2], dv[2], sums[3], key_bias;
  static Buffers& of_thread() {
    static thread_local Buffers buffers;
    return buffers;
  }
};

// One part of the softmax. Row t sees its keys from max(0, last(t) - columns + 1) to last(t), or all.
template <class T> struct Part {
  long keys = 0, columns = 0, base = 0, flat = 0;  // base: last(0); columns, flat: as in Call, for this head
  bool all = false;                // whether every row sees every key
  T *k, *v, *k_panels, *v_panels;  // [keys, Kp], and in panels
  T *dk = nullptr, *dv = nullptr;  // [keys, Kp]
  long first_gradient = 0;         // first key with a gradient
  const T *table = nullptr, *mask = nullptr, *slope = nullptr;
  const T *key_bias = nullptr, *query_bias = nullptr;  // of keys, padded with zeros, and of all rows
  T *dkey_bias = nullptr, *dquery_bias = nullptr;
  bool vectors = false;

  long last(long t) const { return all ? keys - 1 : base + t; }
  long first(long t) const { return all ? 0 : std::max(0L, last(t) - columns + 1); }
};

// Gradients of tensors that streams, or streams and heads, share. Each task writes a gradient, and these are summed at the
// end in a fixed order, so that the numbers do not depend on which thread runs which task.
template <class T> struct Sums {
  const Call& c;
  const long K, Kp, N;
  std::vector<long> first;  // index of the first row of each head in ``vectors``, one stream after the other
  T *k = nullptr, *v = nullptr, *vectors = nullptr;
  std::vector<T> z;

  Sums(const Call& call, Buffers<T>& buffers)
      : c(call), K(call.width), Kp(round_up(call.width, LANES<T>)), N(round_up(call.persistent, GRAIN<T>)),
        first(call.heads + 1, 0), z(call.streams * call.heads) {
    for (long h = 0; h < c.heads; ++h) first[h + 1] = first[h] + c.streams * (c.columns[h] + 2 * PAD);
    if (c.dextra_k) k = buffers.sums[0].sized(tasks() * N * Kp), v = buffers.sums[1].sized(tasks() * N * Kp);
    if (c.dvectors) vectors = buffers.sums[2].sized(first[c.heads] * Kp);
  }
  long tasks() const { return c.streams * c.heads; }
  T* zeroed(T* start, long rows) const { return std::fill_n(start, rows * Kp, T(0)), start; }
  T* zeroed_k(long task) const { return k ? zeroed(k + task * N * Kp, N) : nullptr; }
  T* zeroed_v(long task) const { return v ? zeroed(v + task * N * Kp, N) : nullptr; }
  T* rows_of(long b, long h) const { return vectors + (first[h] + b * (c.columns[h] + 2 * PAD)) * Kp; }
  T* zeroed_vectors(long b, long h) const { return vectors ? zeroed(rows_of(b, h), c.columns[h] + 2 * PAD) : nullptr; }

  void sum_streams(const T* from, void* to, long row) const {  // row is h * persistent + n
    const long h = row / c.persistent, n = row % c.persistent;
    T* out = (T*)to + row * K;
    std::fill_n(out, K, T(0));
    for (long b = 0; b < c.streams; ++b) accumulate(from + ((b * c.heads + h) * N + n) * Kp, out);
  }
  void sum_heads(long x) const {
    T* out = (T*)c.dvectors + x * K;
    std::fill_n(out, K, T(0));
    for (long h = 0; h < c.heads; ++h)
      for (long b = 0; b < c.streams && x < c.columns[h]; ++b)
        accumulate(rows_of(b, h) + (c.columns[h] - 1 - x + PAD) * Kp, out);
  }
  void accumulate(const T* from, T* to) const {
    for (long i = 0; i < K; ++i) to[i] += from[i];
  }
};

template <class T> struct Worker {
  const Call& c;
  const bool backward;
  Buffers<T>& buffers;
  Sums<T>& sums;
  const long K, Kp, LD = CHUNK + PAD;
  std::vector<T> q, extra_q, g, dq, dextra_q, y, scores, dscores, by_distance;
  T span_gradient = 0;
  T* dvectors = nullptr;
  long first_index = 0;  // in tables, of the farthest column of the head
  int64_t flops = 0;

  Worker(const Call& call, bool is_backward, Buffers<T>& thread_buffers, Sums<T>& shared_sums)
      : c(call), backward(is_backward), buffers(thread_buffers), sums(shared_sums), K(call.width),
        Kp(round_up(call.width, LANES<T>)),
        q(ROWS * Kp), extra_q(ROWS * Kp), g(ROWS * Kp), dq(ROWS * Kp), dextra_q(ROWS * Kp), y(ROWS * Kp),
        scores(ROWS * LD), dscores(ROWS * LD), by_distance(ROWS * (LD + PAD)) {}

  // ROWS rows of a matrix product with b, which is stored by rows or in panels; ``width`` is a multiple of LANES.
  template <bool ADD>
  void product(const T* a, long row, long step, const T* b, long ldb, long next, T* out, long ldo, long width, long depth) {
    constexpr long SIZE = LANES<T>;
    long v = 0;
    for (; v + 2 <= width / SIZE; v += 2)
      tile<T, 2, ADD>(a, row, step, b + v * next, ldb, next, out + v * SIZE, ldo, depth);
    if (v < width / SIZE) tile<T, 1, ADD>(a, row, step, b + v * next, ldb, next, out + v * SIZE, ldo, depth);
    flops += 2 * ROWS * width * depth;
  }
  template <bool ADD> void product(const T* a, long row, long step, const T* b, T* out, long ldo, long depth) {
    product<ADD>(a, row, step, b, Kp, LANES<T>, out, ldo, Kp, depth);
  }
  // Products of [ROWS, K] with keys in panels, from key ``begin`` on, a multiple of LANES.
  void multiply_panels(const std::vector<T>& query, const T* panels, long begin, T* out, long ldo, long width) {
    product<false>(query.data(), Kp, 1, panels + begin * Kp, LANES<T>, Kp * LANES<T>, out, ldo, width, K);
  }

  // Copy rows ``begin`` to ``end``, without the columns from K to Kp.
  void pack(At<T> from, long begin, long end, T* to) const {
    for (long j = begin; j < end; ++j, to += Kp) std::memcpy(to, from[j], K * sizeof(T));
  }
  // Copy rows ``begin`` to ``end`` to panels [.., Kp, LANES], which have LANES keys each, from key ``at`` on.
  void pack_panels(At<T> from, long begin, long end, T* panels, long at) const {
    for (long j = begin; j < end; ++j, ++at) {
      const T* row = from[j];
      T* to = panels + at / LANES<T> * LANES<T> * Kp + at % LANES<T>;
      for (long k = 0; k < K; ++k) to[k * LANES<T>] = row[k];
    }
  }

  // Keys or values ``low`` to ``high``: visit those of the past, then those of the segment.
  template <class F> static void visit_rows(At<T> old, At<T> segment, long past, long low, long high, F&& visit) {
    const long split = std::min(std::max(low, past), high);
    if (low < split) visit(old, low, split, 0);
    visit(segment, split - past, high - past, split - low);
  }

  void pack_part(Part<T>& part, int index, At<T> k_old, At<T> k, At<T> v_old, At<T> v, long past, long low, bool gradients) {
    const long size = round_up(part.keys, GRAIN<T>) * Kp, tail = std::max(0L, size - GRAIN<T> * Kp);
    const long high = low + part.keys;
    const auto panels = [&](Buffer<T>& buffer, At<T> old, At<T> segment) {
      T* to = buffer.sized(size);
      std::fill(to + tail, to + size, T(0));  // the last panels may have fewer keys
      visit_rows(old, segment, past, low, high, [&](At<T> x, long b, long e, long at) { pack_panels(x, b, e, to, at); });
      return to;
    };
    const auto rows = [&](Buffer<T>& buffer, At<T> old, At<T> segment) {
      T* to = buffer.sized(size);
      visit_rows(old, segment, past, low, high, [&](At<T> x, long b, long e, long at) { pack(x, b, e, to + at * Kp); });
      return to;
    };
    part.k_panels = panels(buffers.k_panels[index], k_old, k);
    if (!backward) {
      part.v = rows(buffers.v[index], v_old, v);
      return;
    }
    part.v_panels = panels(buffers.v_panels[index], v_old, v);
    part.k = rows(buffers.k[index], k_old, k);
    if (!gradients) return;
    part.dk = buffers.dk[index].zeroed(size);
    part.dv = buffers.dv[index].zeroed(size);
  }

  // The part of the softmax over visible keys; ``low`` becomes the first of them.
  Part<T> window_part(long b, long h, long& low) {
    Part<T> part;
    const long past = c.past[h], high = past + c.rows - c.shift;
    low = std::max(0L, past - c.shift - c.columns[h] + 1);
    part.keys = std::max(0L, high - low), part.columns = c.columns[h], part.base = past - c.shift - low;
    part.flat = c.flat[h], part.first_gradient = c.dk_old ? 0 : std::max(0L, past - low);
    part.vectors = c.vectors != nullptr;
    const long width = c.distances + 2 * PAD;
    part.table = (const T*)c.table + h * width;
    if (c.mask) part.mask = (const T*)c.mask + h * width;
    if (c.slope) part.slope = (const T*)c.slope + h * width;
    if (c.key_bias) set_biases(part, b * c.heads + h, past, low);
    pack_part(
        part, 0, at<T>(c.k_old, b, h), at<T>(c.k, c.k_, b, h), at<T>(c.v_old, b, h), at<T>(c.v, c.v_, b, h), past, low,
        c.dk != nullptr);
    return part;
  }

  void set_biases(Part<T>& part, long task, long past, long low) {
    const long first = task * c.biases + c.biases - c.rows - past + low;
    T* to = buffers.key_bias.zeroed(round_up(part.keys, GRAIN<T>));
    std::copy_n((const T*)c.key_bias + first, part.keys, to);
    part.key_bias = to, part.query_bias = (const T*)c.query_bias + task * c.rows;
    if (c.dkey_bias) {
      part.dkey_bias = (T*)c.dkey_bias + first;
      std::fill_n((T*)c.dkey_bias + task * c.biases, c.biases, T(0));
    }
    if (c.dquery_bias) std::fill_n(part.dquery_bias = (T*)c.dquery_bias + task * c.rows, c.rows, T(0));
  }

  Part<T> persistent_part(long b, long h) {
    Part<T> part;
    part.keys = c.persistent, part.columns = part.flat = c.persistent, part.all = true;
    const At<T> k{(T*)c.extra_k + h * c.persistent * K, K}, v{(T*)c.extra_v + h * c.persistent * K, K};
    pack_part(part, 1, k, k, v, v, 0, 0, false);
    if (backward) part.dk = sums.zeroed_k(b * c.heads + h), part.dv = sums.zeroed_v(b * c.heads + h);
    return part;
  }

  void read_rows(At<T> from, long t0, long rows, std::vector<T>& to) const {
    std::fill(to.begin(), to.end(), T(0));
    for (long i = 0; i < rows; ++i) std::memcpy(&to[i * Kp], from[t0 + i], K * sizeof(T));
  }
  void write_rows(const std::vector<T>& from, long t0, long rows, At<T> to) const {
    for (long i = 0; i < rows; ++i) std::memcpy(to[t0 + i], &from[i * Kp], K * sizeof(T));
  }

  // ``width`` keys from ``begin`` on, in whole vectors, for ROWS rows.
  struct Chunk {
    long begin, width, n_keys;  // keys from n_keys on are padding
    long index;                 // of the first key in tables, for the first row; one less for each next row
    bool unmasked;              // whether no pair has a bias or is hidden, and m = 1
    long row, rows;             // the first row, and the number of rows; the others are padding
  };
  template <class F> void chunks(const Part<T>& part, long t0, long rows, F&& visit) const {
    const long end = std::min(part.last(t0 + rows - 1) + 1, part.keys);
    for (long begin = round_down(part.first(t0), GRAIN<T>); begin < end; begin += CHUNK) {
      const long n_keys = std::min(CHUNK, end - begin), width = round_up(n_keys, GRAIN<T>);
      const long index = c.distances - 1 - part.last(t0) + begin + PAD;
      const bool is_flat = part.last(t0 + ROWS - 1) - begin < part.flat && part.last(t0) >= begin + width - 1;
      visit(Chunk{begin, width, n_keys, index, part.all ? n_keys == width : is_flat, t0, rows});
    }
  }

  void score(const Part<T>& part, const std::vector<T>& query, const Chunk& chunk) {
    multiply_panels(query, part.k_panels, chunk.begin, scores.data(), LD, chunk.width);
    if (part.all) {
      for (long i = 0; i < ROWS && !chunk.unmasked; ++i)
        std::fill(&scores[i * LD + chunk.n_keys], &scores[i * LD + chunk.width], -std::numeric_limits<T>::infinity());
      return;
    }
    if (part.vectors) {
      const long begin = round_down(chunk.index - (ROWS - 1), LANES<T>), stride = LD + PAD;
      const long width = round_up(chunk.index + chunk.width - begin, LANES<T>);
      multiply_panels(query, (const T*)c.vector_panels, begin, by_distance.data(), stride, width);
      for (long i = 0; i < ROWS; ++i)
        add(&scores[i * LD], &by_distance[i * stride + chunk.index - i - begin], chunk.width);
    }
    for (long i = 0; i < ROWS && !chunk.unmasked; ++i) add(&scores[i * LD], part.table + chunk.index - i, chunk.width);
    for (long i = 0; i < chunk.rows && part.key_bias; ++i)
      add(&scores[i * LD], part.key_bias + chunk.begin, chunk.width, part.query_bias[chunk.row + i]);
  }
  static void add(T* to, const T* from, long width, T subtracted = 0) {
    for (long j = 0; j < width; j += LANES<T>) store(to + j, load(to + j) + (load(from + j) - subtracted));
  }

  void forward_part(const Part<T>& part, const std::vector<T>& query, long t0, long rows, T* row_max, T* sum) {
    chunks(part, t0, rows, [&](const Chunk& chunk) {
      score(part, query, chunk);
      for (long i = 0; i < ROWS; ++i) {
        T* s = &scores[i * LD];
        Vector<T> lane_max = load(s);
        for (long j = LANES<T>; j < chunk.width; j += LANES<T>) {
          const Vector<T> next = load(s + j);
          lane_max = lane_max > next ? lane_max : next;
        }
        const T chunk_max = largest<T>(lane_max);
        const T new_max = chunk_max > row_max[i] || std::isnan(chunk_max) ? chunk_max : row_max[i];
        if (new_max == -std::numeric_limits<T>::infinity()) {
          std::fill(s, s + chunk.width, T(0));
          continue;
        }
        if (new_max != row_max[i]) {
          const T factor = std::exp(row_max[i] - new_max);
          sum[i] *= factor;
          for (long k = 0; k < Kp; ++k) y[i * Kp + k] *= factor;
          row_max[i] = new_max;
        }
        Vector<T> lane_sums = {};
        for (long j = 0; j < chunk.width; j += LANES<T>) {
          const Vector<T> weight = exponential<T>(load(s + j) - new_max);
          lane_sums += weight;
          store(s + j, weight);
        }
        sum[i] += total<T>(lane_sums);
      }
      product<true>(scores.data(), LD, 1, part.v + chunk.begin * Kp, y.data(), Kp, chunk.n_keys);
    });
  }

  void run_forward(long b, long h) {
    long low;
    Part<T> window = window_part(b, h, low), persistent;
    if (c.persistent) persistent = persistent_part(b, h);
    T* lse = (T*)c.lse + (b * c.heads + h) * c.rows;
    for (long t0 = 0; t0 < c.rows; t0 += ROWS) {
      const long rows = std::min((long)ROWS, c.rows - t0);
      T row_max[ROWS], sum[ROWS] = {};
      std::fill(row_max, row_max + ROWS, -std::numeric_limits<T>::infinity());
      std::fill(y.begin(), y.end(), T(0));
      read_rows(at<T>(c.q, c.q_, b, h), t0, rows, q);
      forward_part(window, q, t0, rows, row_max, sum);
      if (c.persistent) {
        read_rows(at<T>(c.extra_q, c.extra_q_, b, h), t0, rows, q);
        forward_part(persistent, q, t0, rows, row_max, sum);
      }
      for (long i = 0; i < rows; ++i) {
        // A row that sees no key has output 0 and weights 0, also in the backward pass.
        lse[t0 + i] = sum[i] == 0 ? std::numeric_limits<T>::infinity() : row_max[i] + std::log(sum[i]);
        const T share = sum[i] == 0 ? 0 : 1 / sum[i];
        for (long k = 0; k < Kp; ++k) y[i * Kp + k] *= share;
      }
      write_rows(y, t0, rows, at<T>(c.y, c.y_, b, h));
    }
  }

  // Replace scores by weights, and products of g and values in ``dscores`` by gradients of scores.
  void differentiate(const Part<T>& part, const Chunk& chunk, const T* lse, const T* delta) {
    for (long i = 0; i < ROWS; ++i) {
      T *s = &scores[i * LD], *r = &dscores[i * LD];
      if (chunk.unmasked || !part.mask) {
        for (long j = 0; j < chunk.width; j += LANES<T>) {
          const Vector<T> weight = exponential<T>(load(s + j) - lse[i]);
          store(s + j, weight);
          store(r + j, weight * (load(r + j) - delta[i]));
        }
        continue;
      }
      Vector<T> on_ramp = {};
      const T *mask = part.mask + chunk.index - i, *slope = part.slope + chunk.index - i;
      for (long j = 0; j < chunk.width; j += LANES<T>) {
        const Vector<T> unmasked = exponential<T>(load(s + j) - lse[i]);
        const Vector<T> dscore = unmasked * (load(r + j) - delta[i]);
        on_ramp += dscore * load(slope + j);
        store(s + j, unmasked * load(mask + j));
        const Vector<T> m = load(mask + j);
        store(r + j, m > 0 ? dscore * m : m);  // with m = 0, dscore may be infinite
      }
      span_gradient += total<T>(on_ramp);
    }
  }

  void backward_part(
      const Part<T>& part, const std::vector<T>& query, std::vector<T>& dquery, long t0, long rows, const T* lse,
      const T* delta) {
    chunks(part, t0, rows, [&](const Chunk& chunk) {
      score(part, query, chunk);
      multiply_panels(g, part.v_panels, chunk.begin, dscores.data(), LD, chunk.width);
      differentiate(part, chunk, lse, delta);
      product<true>(dscores.data(), LD, 1, part.k + chunk.begin * Kp, dquery.data(), Kp, chunk.n_keys);
      if (part.vectors) differentiate_vectors(chunk, query, dquery);
      for (long i = 0; i < rows && part.key_bias; ++i)
        for (long j = 0; j < chunk.n_keys; ++j) {
          const T dscore = dscores[i * LD + j];
          if (part.dkey_bias) part.dkey_bias[chunk.begin + j] += dscore;
          if (part.dquery_bias) part.dquery_bias[t0 + i] -= dscore;
        }
      if (!part.dk) return;
      const long first = std::max(part.first_gradient - chunk.begin, 0L);
      for (long j = round_down(first, ROWS); j < chunk.width; j += ROWS) {
        T *dk = part.dk + (chunk.begin + j) * Kp, *dv = part.dv + (chunk.begin + j) * Kp;
        product<true>(&dscores[j], 1, LD, query.data(), dk, Kp, ROWS);
        product<true>(&scores[j], 1, LD, g.data(), dv, Kp, ROWS);
      }
    });
  }

  // Gradients through the vectors: row i is moved by i entries, so that equal distances are in one column.
  void differentiate_vectors(const Chunk& chunk, const std::vector<T>& query, std::vector<T>& dquery) {
    const long width = round_up(chunk.width + ROWS - 1, ROWS), stride = LD + PAD;
    const long index = chunk.index - (ROWS - 1);
    for (long i = 0; i < ROWS; ++i) {
      T* to = &by_distance[i * stride];
      std::fill(to, to + width, T(0));
      std::memcpy(to + ROWS - 1 - i, &dscores[i * LD], chunk.width * sizeof(T));
    }
    product<true>(by_distance.data(), stride, 1, (const T*)c.vectors + index * Kp, dquery.data(), Kp, width);
    for (long u = 0; dvectors && u < width; u += ROWS)
      product<true>(&by_distance[u], 1, stride, query.data(), dvectors + (index - first_index + u) * Kp, Kp, ROWS);
  }

  void run_backward(long b, long h) {
    long low;
    Part<T> window = window_part(b, h, low), persistent;
    if (c.persistent) persistent = persistent_part(b, h);
    const long task = b * c.heads + h;
    dvectors = sums.zeroed_vectors(b, h);
    first_index = c.distances - c.columns[h];
    span_gradient = 0;
    for (long t0 = 0; t0 < c.rows; t0 += ROWS) {
      const long rows = std::min((long)ROWS, c.rows - t0);
      read_rows(at<T>(c.q, c.q_, b, h), t0, rows, q);
      read_rows(at<T>(c.g, c.g_, b, h), t0, rows, g);
      read_rows(at<T>(c.y, c.y_, b, h), t0, rows, y);
      T lse[ROWS], delta[ROWS] = {};
      for (long i = 0; i < ROWS; ++i) {
        lse[i] = i < rows ? ((const T*)c.lse)[task * c.rows + t0 + i] : std::numeric_limits<T>::infinity();
        for (long k = 0; k < K; ++k) delta[i] += g[i * Kp + k] * y[i * Kp + k];
      }
      std::fill(dq.begin(), dq.end(), T(0));
      backward_part(window, q, dq, t0, rows, lse, delta);
      write_rows(dq, t0, rows, at<T>(c.dq, c.dq_, b, h));
      if (!c.persistent) continue;
      read_rows(at<T>(c.extra_q, c.extra_q_, b, h), t0, rows, extra_q);
      std::fill(dextra_q.begin(), dextra_q.end(), T(0));
      backward_part(persistent, extra_q, dextra_q, t0, rows, lse, delta);
      write_rows(dextra_q, t0, rows, at<T>(c.dextra_q, c.dextra_q_, b, h));
    }
    write_key_gradients(window, b, h, low);
    sums.z[task] = span_gradient;
  }

  void write_key_gradients(const Part<T>& window, long b, long h, long low) {
    if (!c.dk) return;  // window.dk may be null if no key is visible; the gradients are then zeros
    const long past = c.past[h];
    if (c.dk_old) {
      write_padded(window.dk, low, window.keys, 0, past, at<T>(c.dk_old, b, h));
      write_padded(window.dv, low, window.keys, 0, past, at<T>(c.dv_old, b, h));
    }
    write_padded(window.dk, low, window.keys, past, past + c.rows, at<T>(c.dk, c.dk_, b, h));
    write_padded(window.dv, low, window.keys, past, past + c.rows, at<T>(c.dv, c.dv_, b, h));
  }

  // Write the gradients of keys ``begin`` to ``end``. ``from`` has those of keys ``low`` to low + keys; others are 0.
  void write_padded(const T* from, long low, long keys, long begin, long end, At<T> to) const {
    for (long j = begin; j < end; ++j) {
      if (j >= low && j < low + keys)
        std::memcpy(to[j - begin], from + (j - low) * Kp, K * sizeof(T));
      else
        std::memset(to[j - begin], 0, K * sizeof(T));
    }
  }
};

// The longest heads come first, so that no thread starts one at the end.
template <class T> void run(const Call& call, bool backward) {
  const long tasks = call.streams * call.heads;
  Sums<T> sums(call, Buffers<T>::of_thread());
#pragma omp parallel num_threads(call.threads)
  {
    Worker<T> worker(call, backward, Buffers<T>::of_thread(), sums);
#pragma omp for schedule(dynamic, 1)
    for (long task = 0; task < tasks; ++task) {
      const long b = task % call.streams, h = call.order[task / call.streams];
      backward ? worker.run_backward(b, h) : worker.run_forward(b, h);
    }
#pragma omp atomic
    *call.flops += worker.flops;
    const long extra = backward && call.dextra_k ? call.heads * call.persistent : 0;
#pragma omp for nowait
    for (long row = 0; row < extra; ++row) {
      sums.sum_streams(sums.k, call.dextra_k, row);
      sums.sum_streams(sums.v, call.dextra_v, row);
    }
    const long distances = backward && call.dvectors ? call.distances : 0;
#pragma omp for nowait
    for (long x = 0; x < distances; ++x) sums.sum_heads(x);
  }
  for (long h = 0; backward && call.dz && h < call.heads; ++h) {
    T* out = (T*)call.dz + h;
    *out = 0;
    for (long b = 0; b < call.streams; ++b) *out += sums.z[b * call.heads + h];
  }
}

}  // namespace

extern "C" {
int64_t window_pad() { return PAD; }
int64_t window_bytes() { return BYTES; }
void window_forward_float(const Call* call) { run<float>(*call, false); }
void window_forward_double(const Call* call) { run<double>(*call, false); }
void window_backward_float(const Call* call) { run<float>(*call, true); }
void window_backward_double(const Call* call) { run<double>(*call, true); }
}
