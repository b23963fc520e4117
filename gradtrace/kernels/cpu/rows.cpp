// The largest product along single lines (rows), for a few sampled elements of a large contraction.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "threads.h"

namespace {

constexpr int64_t CHUNK = 256;   // elements of a line that are processed before the next line
constexpr int64_t LINES = 64;    // lines that are copied before they are processed
constexpr int64_t SIDE = 16;     // of them at once: those that share a cache line
constexpr int64_t APART = CHUNK + 16;  // stride of copies, which avoids cache conflicts
constexpr int64_t WORK = 1 << 18;  // the fewest products per task

template <typename T>
struct Bits;
template <>
struct Bits<float> {
  using type = int32_t;
  typedef float few __attribute__((vector_size(16)));
  typedef int32_t sizes __attribute__((vector_size(16)));
  static constexpr type infinity = 0x7f800000;
};
template <>
struct Bits<double> {
  using type = int64_t;
  typedef double few __attribute__((vector_size(16)));
  typedef int64_t sizes __attribute__((vector_size(16)));
  static constexpr type infinity = 0x7ff0000000000000;
};

template <typename T>
using Vector = typename Bits<T>::few;

template <typename T>
inline Vector<T> load(const T* from) {
  Vector<T> x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

// |x| as an integer of the same order; NaN is the largest.
template <typename T>
inline typename Bits<T>::type size_of(T x) {
  typename Bits<T>::type bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits & std::numeric_limits<decltype(bits)>::max();
}
template <typename T>
inline typename Bits<T>::sizes sizes_of(Vector<T> x) {
  typename Bits<T>::sizes bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits & std::numeric_limits<typename Bits<T>::type>::max();
}

// a[k]
template <typename T>
struct Single {
  const T* a;
  T one(int64_t k) const { return a[k]; }
  Vector<T> few(int64_t k) const { return load(a + k); }
};

// a[k] * b[k]
template <typename T>
struct Pair {
  const T* a;
  const T* b;
  T one(int64_t k) const { return a[k] * b[k]; }
  Vector<T> few(int64_t k) const { return load(a + k) * load(b + k); }
};

// (u * v[k] + s * w[k]) * x[k]
template <typename T>
struct Rank {
  T u, s;
  const T *v, *w, *x;
  T one(int64_t k) const { return (u * v[k] + s * w[k]) * x[k]; }
  Vector<T> few(int64_t k) const { return (u * load(v + k) + s * load(w + k)) * load(x + k); }
};

// The largest |product| over first <= k < last, as bits.
template <typename T, typename Product>
inline typename Bits<T>::type largest(int64_t first, int64_t last, const Product& product) {
  using B = typename Bits<T>::type;
  constexpr int64_t LANES = 16 / sizeof(T);
  typename Bits<T>::sizes top[4] = {};
  int64_t k = first;
  for (; k + 4 * LANES <= last; k += 4 * LANES)
    for (int n = 0; n < 4; n++) {
      const auto bits = sizes_of<T>(product.few(k + n * LANES));
      top[n] = bits > top[n] ? bits : top[n];
    }
  B most = 0;
  for (int n = 0; n < 4; n++)
    for (int64_t lane = 0; lane < LANES; lane++) most = std::max(most, B(top[n][lane]));
  for (; k < last; k++) most = std::max(most, size_of(product.one(k)));
  return most;
}

// The running maximum of one line; the first of equals, and the first NaN.
template <typename T>
struct Winner {
  typename Bits<T>::type most = 0;
  int64_t place = 0;

  template <typename Product>
  void look(int64_t first, int64_t last, int64_t before, const Product& product) {
    constexpr auto top = Bits<T>::infinity;
    if (most > top) return;
    const auto here = largest<T>(first, last, product);
    if (here <= most) return;
    most = here;
    int64_t k = first;
    if (here > top) {
      while (size_of(product.one(k)) <= top) k++;
    } else {
      while (size_of(product.one(k)) != here) k++;
    }
    place = before + k;
  }

  void tell(T* value, int64_t* where) const {
    std::memcpy(value, &most, sizeof most);
    *where = place;
  }
};

// Lines at arbitrary offsets: line n begins at data + offset[n].
template <typename T>
struct Lines {
  const T* data;
  const int64_t* offset;
  int64_t step;

  void copy(int64_t n, int64_t first, int64_t last, T* to) const {
    const T* from = data + offset[n];
    for (int64_t k = first; k < last; k++) to[k - first] = from[k * step];
  }
};

template <typename T>
class Products {
 public:
  Products(Lines<T> a, Lines<T> b, int64_t length, T* value, int64_t* place)
      : a_(a), b_(b), length_(length), value_(value), place_(place) {}

  // Entries order[first..last), sorted by b's line.
  void run(const int64_t* order, int64_t first, int64_t last) const {
    if (b_.step == 1) {
      for (int64_t n = first; n < last; n++) alone(order[n]);
      return;
    }
    std::vector<T> packed(LINES * APART);
    for (int64_t from = first; from < last;) {
      std::vector<int64_t> starts;  // first position in order of each distinct line of b
      int64_t to = from;
      for (; to < last; to++) {
        const bool fresh = to == from || b_.offset[order[to]] != b_.offset[order[to - 1]];
        if (fresh && static_cast<int64_t>(starts.size()) == LINES) break;
        if (fresh) starts.push_back(to);
      }
      starts.push_back(to);
      together(order, starts, packed.data());
      from = to;
    }
  }

 private:
  void alone(int64_t n) const {
    const T* b = b_.data + b_.offset[n];
    Winner<T> winner;
    T own[CHUNK];
    for (int64_t k = 0; k < length_; k += CHUNK) {
      const int64_t end = std::min(length_, k + CHUNK);
      const T* a = line(n, k, end, own);
      winner.look(0, end - k, k, Pair<T>{a, b + k});
    }
    winner.tell(value_ + n, place_ + n);
  }

  void together(const int64_t* order, const std::vector<int64_t>& starts, T* packed) const {
    const int64_t lines = static_cast<int64_t>(starts.size()) - 1;
    const int64_t first = starts[0];
    std::vector<Winner<T>> winners(starts[lines] - first);
    int64_t begins[LINES];
    for (int64_t l = 0; l < lines; l++) begins[l] = b_.offset[order[starts[l]]];
    T own[CHUNK];
    for (int64_t k = 0; k < length_; k += CHUNK) {
      const int64_t end = std::min(length_, k + CHUNK);
      for (int64_t l = 0; l < lines; l += SIDE)
        for (int64_t i = k; i < end; i++) {
          const T* row = b_.data + i * b_.step;
          for (int64_t n = l; n < std::min(lines, l + SIDE); n++)
            packed[n * APART + i - k] = row[begins[n]];
        }
      for (int64_t l = 0; l < lines; l++) {
        const T* b = packed + l * APART;
        for (int64_t n = starts[l]; n < starts[l + 1]; n++) {
          const T* a = line(order[n], k, end, own);
          winners[n - first].look(0, end - k, k, Pair<T>{a, b});
        }
      }
    }
    for (int64_t n = first; n < starts[lines]; n++)
      winners[n - first].tell(value_ + order[n], place_ + order[n]);
  }

  // A chunk of a's line, copied if its elements are strided.
  const T* line(int64_t n, int64_t first, int64_t last, T* own) const {
    if (a_.step == 1) return a_.data + a_.offset[n] + first;
    a_.copy(n, first, last, own);
    return own;
  }

  Lines<T> a_, b_;
  int64_t length_;
  T* value_;
  int64_t* place_;
};

// The largest |x| of a contiguous range, as bits.
template <typename T>
typename Bits<T>::type largest_of(const T* x, int64_t size, int threads) {
  constexpr int64_t PART = 1 << 16;
  const int64_t parts = (size + PART - 1) / PART;
  std::vector<typename Bits<T>::type> most(parts);
  gradtrace::each(parts, threads, [&](int64_t n) {
    const T* from = x + n * PART;
    most[n] = largest<T>(0, std::min(PART, size - n * PART), Single<T>{from});
  });
  return *std::max_element(most.begin(), most.end());
}

// All entries that share one line of a. Rounding is monotone, so if no |b| exceeds the bound, a k
// with fl(|a[k]| * bound) below the maximum over a few seeds can neither win nor tie.
template <typename T>
class Pruned {
 public:
  Pruned(Lines<T> a, Lines<T> b, int64_t length, T bound) : a_(a), b_(b), length_(length) {
    bound_ = bound;
  }

  // Whether few enough k survived to check each of them.
  bool run(const int64_t* entry, int64_t count, T* value, int64_t* place) const {
    const T* a = a_.data + a_.offset[entry[0]];
    const T low = reached(a, entry, count);
    std::vector<int64_t> left;
    for (int64_t k = 0; k < length_; k++) {
      if (std::abs(a[k]) * bound_ < low) continue;
      if (static_cast<int64_t>(left.size()) == length_ / FEW) return false;
      left.push_back(k);
    }
    for (int64_t n = 0; n < count; n++) {
      const T* b = b_.data + b_.offset[entry[n]];
      Winner<T> winner;
      for (const int64_t k : left) {
        const T product = a[k] * b[k * b_.step];
        winner.look(0, 1, k, Single<T>{&product});
      }
      winner.tell(value + entry[n], place + entry[n]);
    }
    return true;
  }

 private:
  static constexpr int64_t SEEDS = 16;  // parts of a line; the largest |a| of each is a seed
  static constexpr int64_t FEW = 16;    // up to 1 / FEW of a line, checking k one by one pays

  // Lower bound of the maximum of every entry, from the seeds.
  T reached(const T* a, const int64_t* entry, int64_t count) const {
    std::vector<int64_t> seeds;
    for (int64_t n = 0; n < SEEDS; n++) {
      const int64_t first = n * length_ / SEEDS, last = (n + 1) * length_ / SEEDS;
      Winner<T> winner;
      winner.look(first, last, 0, Single<T>{a});
      seeds.push_back(std::max(first, winner.place));
    }
    T low = std::numeric_limits<T>::infinity();
    for (int64_t n = 0; n < count; n++) {
      const T* b = b_.data + b_.offset[entry[n]];
      T most = 0;
      for (const int64_t k : seeds) most = std::max(most, std::abs(a[k] * b[k * b_.step]));
      low = std::min(low, most);
    }
    return low;
  }

  Lines<T> a_, b_;
  int64_t length_;
  T bound_;
};

// The entries for which pruning does not suffice.
template <typename T>
std::vector<int64_t> undecided(Lines<T> a, Lines<T> b, std::vector<int64_t> order, int64_t size,
                               int64_t length, T* value, int64_t* place, int threads) {
  const int64_t count = static_cast<int64_t>(order.size());
  if (a.step != 1 || count * length < 2 * size || length < 1024) return order;
  const auto bits = largest_of(b.data, size, threads);
  if (bits >= Bits<T>::infinity) return order;
  T bound;
  std::memcpy(&bound, &bits, sizeof bound);
  std::sort(order.begin(), order.end(),
            [&](int64_t i, int64_t j) { return a.offset[i] < a.offset[j]; });
  std::vector<int64_t> starts;
  for (int64_t n = 0; n < count; n++)
    if (n == 0 || a.offset[order[n]] != a.offset[order[n - 1]]) starts.push_back(n);
  const int64_t lines = static_cast<int64_t>(starts.size());
  starts.push_back(count);
  std::vector<char> decided(lines);
  const Pruned<T> pruned(a, b, length, bound);
  gradtrace::each(lines, threads, [&](int64_t n) {
    const int64_t first = starts[n];
    decided[n] = pruned.run(order.data() + first, starts[n + 1] - first, value, place);
  });
  std::vector<int64_t> rest;
  for (int64_t n = 0; n < lines; n++)
    if (!decided[n])
      rest.insert(rest.end(), order.begin() + starts[n], order.begin() + starts[n + 1]);
  return rest;
}

// Checks that every line is within `size` elements.
template <typename T>
void check(const Lines<T>& lines, int64_t size, int64_t count, int64_t length) {
  if (!count || !length) return;
  gradtrace::require_places(count, {lines.data, lines.offset});
  gradtrace::require(lines.step >= 0 && size > 0);
  const auto [low, high] = std::minmax_element(lines.offset, lines.offset + count);
  const int64_t reach = gradtrace::product_of({length - 1, lines.step});
  gradtrace::require(*low >= 0 && *high < size && reach < size - *high);
}

template <typename T>
void products(Lines<T> a, Lines<T> b, int64_t a_size, int64_t b_size, int64_t count,
              int64_t length, T* value, int64_t* place, int threads) {
  gradtrace::require(length >= 0);
  gradtrace::require_places(count, {value, place});
  check(a, a_size, count, length);
  check(b, b_size, count, length);
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  order = undecided(a, b, std::move(order), b_size, length, value, place, threads);
  count = static_cast<int64_t>(order.size());
  if (b.step != 1)
    std::sort(order.begin(), order.end(),
              [&](int64_t i, int64_t j) { return b.offset[i] < b.offset[j]; });
  const int64_t each = std::max<int64_t>(1, WORK / std::max<int64_t>(1, length));
  const int64_t most = 8 * std::max(1, threads);  // tasks: few, to share copied lines
  const int64_t share = std::max(each, (count + most - 1) / most);
  const Products<T> all(a, b, length, value, place);
  gradtrace::each((count + share - 1) / share, threads, [&](int64_t task) {
    all.run(order.data(), task * share, std::min(count, (task + 1) * share));
  });
}

// value[n] = max over k != skip[n] of |(left[0][n] * right[0][line, k] + left[1][n] *
// right[1][line, k]) * x[line, k]|, line being line[n].
template <typename T>
void others(const T* left, const T* right, const T* x, const int64_t* line, const int64_t* skip,
            int64_t count, int64_t lines, int64_t width, T* value, int64_t* place, int threads) {
  gradtrace::require_places(count, {left, right, x, line, skip, value, place});
  gradtrace::product_of({2, lines, width});
  for (int64_t n = 0; n < count; n++) {
    gradtrace::require(0 <= line[n] && line[n] < lines && 0 <= skip[n] && skip[n] < width);
  }
  const int64_t share = std::max<int64_t>(1, WORK / std::max<int64_t>(1, width));
  gradtrace::each((count + share - 1) / share, threads, [&](int64_t task) {
    for (int64_t n = task * share; n < std::min(count, (task + 1) * share); n++) {
      const int64_t begin = line[n] * width;
      const T* v = right + begin;
      const Rank<T> product{left[n], left[count + n], v, v + lines * width, x + begin};
      Winner<T> winner;
      winner.look(0, skip[n], 0, product);
      winner.look(skip[n] + 1, width, 0, product);
      winner.tell(value + n, place + n);
    }
  });
}

}  // namespace

#define GRADTRACE_ROWS(T, SUFFIX)                                                                 \
  GRADTRACE_API int gradtrace_products_##SUFFIX(                                                  \
      const T* a, const int64_t* a_offset, int64_t a_step, int64_t a_size, const T* b,            \
      const int64_t* b_offset, int64_t b_step, int64_t b_size, int64_t count, int64_t length,     \
      T* value, int64_t* place, int threads) {                                                    \
    return gradtrace::guarded([&] {                                                               \
      products<T>({a, a_offset, a_step}, {b, b_offset, b_step}, a_size, b_size, count, length,    \
                  value, place, threads);                                                         \
    });                                                                                           \
  }                                                                                               \
  GRADTRACE_API int gradtrace_others_##SUFFIX(                                                    \
      const T* left, const T* right, const T* x, const int64_t* line, const int64_t* skip,        \
      int64_t count, int64_t lines, int64_t width, T* value, int64_t* place, int threads) {       \
    return gradtrace::guarded([&] {                                                               \
      others<T>(left, right, x, line, skip, count, lines, width, value, place, threads);          \
    });                                                                                           \
  }

GRADTRACE_ROWS(float, float)
GRADTRACE_ROWS(double, double)
