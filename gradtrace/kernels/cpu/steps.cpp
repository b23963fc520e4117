// Elementwise, index and reduction steps: value and mark in one pass over memory.
//
// Sizes are compared as the bits of |x|, which order as the numbers do; a NaN is made the largest
// of all bit patterns that occur, and all NaNs equal, so that the first of them stays.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "threads.h"

namespace gradtrace {
namespace {

template <typename T>
struct Kind;

template <>
struct Kind<float> {
  using Bits = int32_t;
  static constexpr Bits NAN_BITS = 0x7fc00000, INF_BITS = 0x7f800000, SIZE = 0x7fffffff;
  static constexpr float TINY = 0x1p-110f;  // below it, rounding is no longer relative
};

template <>
struct Kind<double> {
  using Bits = int64_t;
  static constexpr Bits NAN_BITS = 0x7ff8000000000000, INF_BITS = 0x7ff0000000000000,
                        SIZE = 0x7fffffffffffffff;
  static constexpr double TINY = 0x1p-1000;
};

template <typename T>
using Bits = typename Kind<T>::Bits;

// |x| as bits that order as numbers do.
template <typename T>
inline Bits<T> sized(T x) {
  Bits<T> bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits &= Kind<T>::SIZE;
  return bits < Kind<T>::NAN_BITS ? bits : Kind<T>::NAN_BITS;
}

template <typename T>
inline T number(Bits<T> bits) {
  T x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

int64_t parts(int64_t n, int64_t length) { return (n + length - 1) / length; }

// Run body(first, last) over pieces of 0..n.
template <typename Body>
void pieces(int64_t n, int64_t length, int threads, const Body& body) {
  each(parts(n, length), threads, [&](int64_t task) {
    body(task * length, std::min(n, (task + 1) * length));
  });
}

// Choosing among terms ------------------------------------------------------------------------

template <typename T>
void merge(int64_t n, T* __restrict size, int32_t* __restrict marks, const T* __restrict value,
           const int32_t* __restrict other, int32_t constant, int32_t shift) {
  const int32_t fixed = constant + shift;
  for (int64_t i = 0; i < n; i++) {
    const Bits<T> here = sized(size[i]), there = sized(value[i]);
    const int32_t mark = other ? other[i] : 1;
    const bool wins = (there > here) & (mark != 0);
    size[i] = wins ? number<T>(there) : size[i];
    marks[i] = wins ? (other ? mark + shift : fixed) : marks[i];
  }
}

// Counting --------------------------------------------------------------------------------------

constexpr int LANES = 4;

double added(const double* lanes) { return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]); }

// What is known of a mark in one chunk, for each lane.
struct Entry {
  double sum[LANES];
  int64_t count[LANES];
};

// The table of one chunk. While the mark stays the same, its sums are kept in registers; the order
// of additions is that of the elements all the same.
template <typename T>
void tally(int64_t n, const int32_t* marks, const T* gradient, int64_t count, Entry* table) {
  const auto one = [&](int64_t i, int lane) {
    if (marks[i] < 0 || marks[i] >= count) throw std::out_of_range("a mark that is not counted");
    Entry& entry = table[marks[i]];
    entry.sum[lane] += std::fabs(double(gradient[i]));
    entry.count[lane]++;
  };
  int64_t i = 0;
  while (i + LANES <= n) {
    for (int lane = 0; lane < LANES; lane++) one(i + lane, lane);
    const int32_t mark = marks[i];
    const auto stays = [&](const int32_t* at) {
      return (at[0] == mark) & (at[1] == mark) & (at[2] == mark) & (at[3] == mark);
    };
    const bool uniform = stays(marks + i);
    i += LANES;
    if (!uniform || i + LANES > n || !stays(marks + i)) continue;
    Entry held = table[mark];
    const int64_t first = i;
    for (; i + LANES <= n && stays(marks + i); i += LANES) {
      for (int lane = 0; lane < LANES; lane++) held.sum[lane] += std::fabs(double(gradient[i + lane]));
    }
    for (int lane = 0; lane < LANES; lane++) held.count[lane] += (i - first) / LANES;
    table[mark] = held;
  }
  for (int lane = 0; i < n; i++, lane++) one(i, lane);
}

template <typename T>
void magnitude(int64_t n, const T* gradient, int64_t* count, double* sums) {
  double held[LANES] = {};
  int64_t zeros = 0, i = 0;
  for (; i + LANES <= n; i += LANES) {
    for (int lane = 0; lane < LANES; lane++) {
      held[lane] += std::fabs(double(gradient[i + lane]));
      zeros += gradient[i + lane] == 0;
    }
  }
  for (; i < n; i++) {
    held[i % LANES] += std::fabs(double(gradient[i]));
    zeros += gradient[i] == 0;
  }
  *count = n - zeros;
  std::memcpy(sums, held, sizeof held);
}

// Choosing along lines --------------------------------------------------------------------------

// The first of the largest: its place, or -1 where there is no element.
template <typename B>
int64_t first_largest(const B* size, int64_t n) {
  if (!n) return -1;
  B most = size[0];
  for (int64_t i = 1; i < n; i++) most = size[i] > most ? size[i] : most;
  int64_t place = 0;
  while (size[place] != most) place++;
  return place;
}

// A tensor of four levels, the dimensions that are reduced (r1, r2) and those that are kept (k1,
// k2), from the outermost to the innermost: r1, k1, r2, k2.
struct Levels {
  int64_t size[4];
  int64_t step[4];   // of the values
  int64_t along[4];  // of the marks
};

constexpr int64_t BLOCK = 512;

template <typename T>
struct Reduction {
  const T* x;
  Levels how;

  // Elements [low, high) of the reduced ones in order, for kept ones [first, last) that lie side by
  // side: rows of numbers, compared with the largest so far.
  void rows(int64_t k1, int64_t first, int64_t last, int64_t low, int64_t high, Bits<T>* most,
            Bits<T>* place) const {
    const int64_t n = last - first;
    for (int64_t r = low; r < high; r++) {
      const T* row = x + r / how.size[2] * how.step[0] + k1 * how.step[1] +
                     r % how.size[2] * how.step[2] + first;
      const Bits<T> at = static_cast<Bits<T>>(r);
      for (int64_t i = 0; i < n; i++) {
        const Bits<T> size = sized(row[i]);
        const bool wins = size > most[i];
        most[i] = wins ? size : most[i];
        place[i] = wins ? at : place[i];
      }
    }
  }

  // The same for one kept element, whose reduced ones may lie side by side.
  void line(const T* start, int64_t low, int64_t high, Bits<T>* most, Bits<T>* place) const {
    Bits<T> sizes[BLOCK];
    for (int64_t r = low; r < high;) {
      const int64_t inner = r % how.size[2];
      const int64_t n = std::min({high - r, how.size[2] - inner, BLOCK});
      const T* from = start + r / how.size[2] * how.step[0] + inner * how.step[2];
      if (how.step[2] == 1) {
        for (int64_t i = 0; i < n; i++) sizes[i] = sized(from[i]);
      } else {
        for (int64_t i = 0; i < n; i++) sizes[i] = sized(from[i * how.step[2]]);
      }
      Bits<T> here = sizes[0];
      for (int64_t i = 1; i < n; i++) here = sizes[i] > here ? sizes[i] : here;
      if (here > *most) {
        *most = here;
        *place = static_cast<Bits<T>>(r + (std::find(sizes, sizes + n, here) - sizes));
      }
      r += n;
    }
  }

  void run(const int32_t* marks, T* value, int32_t* out, int threads) const {
    const int64_t k1 = how.size[1], k2 = how.size[3], reduced = how.size[0] * how.size[2];
    const bool beside = k2 > 1 && how.step[3] == 1;
    const int64_t width = std::min(k2, beside ? BLOCK : std::max<int64_t>(1, BLOCK / (reduced + 1)));
    const int64_t columns = parts(k2, width), blocks = k1 * columns;
    // Few results of long lines: lines are cut, and their parts compared in order.
    const int64_t cuts = blocks >= 4 * threads
                             ? 1
                             : std::min<int64_t>(4 * threads, parts(reduced * width, 1 << 14));
    const int64_t length = parts(std::max<int64_t>(reduced, 1), cuts);
    std::vector<Bits<T>> most(blocks * cuts * width, 0), place(blocks * cuts * width, 0);
    each(blocks * cuts, threads, [&](int64_t task) {
      const int64_t block = task / cuts, cut = task % cuts;
      const int64_t row = block / columns, first = block % columns * width;
      const int64_t last = std::min(k2, first + width);
      const int64_t low = std::min(reduced, cut * length);
      const int64_t high = std::min(reduced, low + length);
      Bits<T>*m = &most[task * width], *p = &place[task * width];
      if (beside) {
        rows(row, first, last, low, high, m, p);
        return;
      }
      for (int64_t k = first; k < last; k++) {
        line(x + row * how.step[1] + k * how.step[3], low, high, m + k - first, p + k - first);
      }
    });
    pieces(blocks, std::max<int64_t>(1, (1 << 14) / width), threads, [&](int64_t b0, int64_t b1) {
      for (int64_t block = b0; block < b1; block++) {
        const int64_t row = block / columns, first = block % columns * width;
        const int64_t last = std::min(k2, first + width);
        for (int64_t k = first; k < last; k++) {
          const int64_t at = block * cuts * width + k - first;
          int64_t best = at;
          for (int64_t cut = 1; cut < cuts; cut++) {
            if (most[at + cut * width] > most[best]) best = at + cut * width;
          }
          const int64_t r = place[best], out_at = row * k2 + k;
          const int64_t from = r / how.size[2] * how.along[0] + row * how.along[1] +
                               r % how.size[2] * how.along[2] + k * how.along[3];
          if (value) value[out_at] = number<T>(most[best]);
          out[out_at] = most[best] ? marks[from] : 0;
        }
      }
    });
  }
};

template <typename T>
void scatter(int64_t n, const T* x, const int32_t* marks, const int64_t* target,
             int64_t size, T* value, int32_t* out) {
  for (int64_t j = 0; j < n; j++) {
    const int64_t i = target[j];
    if (i < 0 || i >= size) continue;
    const Bits<T> here = sized(x[j]);
    if (here > sized(value[i])) {
      value[i] = number<T>(here);
      out[i] = marks[j];
    }
  }
}

}  // namespace
}  // namespace gradtrace

using gradtrace::guarded;

GRADTRACE_API int gradtrace_merge(int wide, int64_t n, void* size, int32_t* marks,
                                  const void* value, const int32_t* other, int32_t constant,
                                  int32_t shift, int threads) {
  const auto run = [&](auto* sizes) {
    const auto* values = static_cast<decltype(sizes)>(const_cast<void*>(value));
    gradtrace::pieces(n, 1 << 15, threads, [&](int64_t i, int64_t j) {
      gradtrace::merge(j - i, sizes + i, marks + i, values + i, other ? other + i : nullptr,
                       constant, shift);
    });
  };
  return guarded([&] {
    wide ? run(static_cast<double*>(size)) : run(static_cast<float*>(size));
  });
}

GRADTRACE_API int gradtrace_tally(int wide, int64_t n, const int32_t* marks, const void* gradient,
                                  int64_t count, int64_t length, int64_t* counts, double* sums,
                                  int threads) {
  return guarded([&] {
    const int64_t chunks = gradtrace::parts(n, length);
    std::vector<gradtrace::Entry> tables(chunks * count);
    gradtrace::pieces(n, length, threads, [&](int64_t i, int64_t j) {
      gradtrace::Entry* table = tables.data() + i / length * count;
      if (wide) {
        gradtrace::tally(j - i, marks + i, static_cast<const double*>(gradient) + i, count, table);
      } else {
        gradtrace::tally(j - i, marks + i, static_cast<const float*>(gradient) + i, count, table);
      }
    });
    for (int64_t at = 0; at < chunks * count; at++) {
      const gradtrace::Entry& entry = tables[at];
      sums[at % count] += gradtrace::added(entry.sum);
      for (const int64_t some : entry.count) counts[at % count] += some;
    }
  });
}

GRADTRACE_API int gradtrace_magnitude(int wide, int64_t n, const void* gradient, int64_t length,
                                      int64_t* count, double* sum, int threads) {
  return guarded([&] {
    const int64_t chunks = gradtrace::parts(n, length);
    std::vector<double> lanes(chunks * gradtrace::LANES);
    std::vector<int64_t> number(chunks);
    gradtrace::pieces(n, length, threads, [&](int64_t i, int64_t j) {
      int64_t* c = &number[i / length];
      double* s = &lanes[i / length * gradtrace::LANES];
      if (wide) {
        gradtrace::magnitude(j - i, static_cast<const double*>(gradient) + i, c, s);
      } else {
        gradtrace::magnitude(j - i, static_cast<const float*>(gradient) + i, c, s);
      }
    });
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
      *sum += gradtrace::added(&lanes[chunk * gradtrace::LANES]);
      *count += number[chunk];
    }
  });
}

// how: sizes, steps of x and steps of the marks, of r1, k1, r2, k2 each.
GRADTRACE_API int gradtrace_reduce(int wide, const void* x, const int32_t* marks,
                                   const int64_t* how, void* value, int32_t* out, int threads) {
  return guarded([&] {
    gradtrace::Levels levels;
    std::copy(how, how + 4, levels.size);
    std::copy(how + 4, how + 8, levels.step);
    std::copy(how + 8, how + 12, levels.along);
    if (wide) {
      gradtrace::Reduction<double>{static_cast<const double*>(x), levels}.run(
          marks, static_cast<double*>(value), out, threads);
    } else {
      gradtrace::Reduction<float>{static_cast<const float*>(x), levels}.run(
          marks, static_cast<float*>(value), out, threads);
    }
  });
}

// value and out are 0 at first.
GRADTRACE_API int gradtrace_scatter(int wide, int64_t n, const void* x, const int32_t* marks,
                                    const int64_t* target, int64_t size, void* value,
                                    int32_t* out) {
  return guarded([&] {
    if (wide) {
      gradtrace::scatter(n, static_cast<const double*>(x), marks, target, size,
                         static_cast<double*>(value), out);
    } else {
      gradtrace::scatter(n, static_cast<const float*>(x), marks, target, size,
                         static_cast<float*>(value), out);
    }
  });
}
