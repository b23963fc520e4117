// Elementwise, index and reduction kernels: value and provenance id (id) in one pass over memory.
//
// Magnitudes are compared as the bits of |x|, which have the same order; NaN is mapped to the
// largest bit pattern that occurs, the same for all NaNs, so that the first of them stays.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "contract.h"
#include "threads.h"

namespace gradtrace {
namespace {

template <typename T>
struct Kind;

template <>
struct Kind<float> {
  using Bits = int32_t;
  static constexpr Bits NAN_BITS = 0x7fc00000, INF_BITS = 0x7f800000, SIZE = 0x7fffffff;
  static constexpr float TINY = 0x1p-110f;  // below it, rounding errors are not relative
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

// |x| as an integer of the same order.
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

// Maximum of terms ----------------------------------------------------------------------------

template <typename T>
void merge(int64_t n, T* __restrict size, int32_t* __restrict ids, const T* __restrict value,
           const int32_t* __restrict other, int32_t constant, int32_t shift) {
  const int32_t fixed = constant + shift;
  for (int64_t i = 0; i < n; i++) {
    const Bits<T> here = sized(size[i]), there = sized(value[i]);
    const int32_t id = other ? other[i] : 1;
    const bool wins = (there > here) & (id != 0);
    size[i] = wins ? number<T>(there) : size[i];
    ids[i] = wins ? (other ? id + shift : fixed) : ids[i];
  }
}

// Counts and sums by provenance id --------------------------------------------------------------

// Sums are exact and rounded once, so that the order of additions does not matter. Values are added
// to bins by their exponent, 8 exponents per bin: up to a limited number of values (MAX_VALUES), such
// sums are exact in double precision. The upper and the lower bits of a double are added
// separately.
template <typename T>
struct Cut;

template <>
struct Cut<float> {
  static constexpr int UNIT = -150, MANTISSA = 23, HALVES = 1;
  static constexpr int64_t MAX_VALUES = 1 << 20;  // values of 24 + 7 bits
};

template <>
struct Cut<double> {
  static constexpr int UNIT = -1075, MANTISSA = 52, HALVES = 2;
  static constexpr int64_t MAX_VALUES = 1 << 16;  // halves of 29 + 7 bits, and of 24 + 7
};

constexpr int BIN = 8, LOWER = 24;  // exponents per bin, and bits of the lower half

template <typename T>
int field(Bits<T> size) {
  return static_cast<int>(size >> Cut<T>::MANTISSA);
}

// The smallest nonzero and the largest |x|, as bits.
template <typename T>
struct Reach {
  using U = std::make_unsigned_t<Bits<T>>;
  U least = ~U(0);  // minus one, so that 0 wraps around to the largest
  Bits<T> most = 0;

  void take(int64_t n, const T* x) {
    U low = least;
    Bits<T> high = most;
    for (int64_t i = 0; i < n; i++) {
      Bits<T> size;
      std::memcpy(&size, x + i, sizeof size);
      size &= Kind<T>::SIZE;
      const U there = U(size) - 1;
      low = there < low ? there : low;
      high = size > high ? size : high;
    }
    least = low;
    most = high;
  }

  static Reach everything() {
    Reach all;
    all.least = 0;
    all.most = Kind<T>::INF_BITS;
    return all;
  }

  void take(const Reach& other) {
    least = std::min(least, other.least);
    most = std::max(most, other.most);
  }

  int first() const { return most ? field<T>(Bits<T>(least + 1)) : 0; }  // exponent fields
  int last() const { return field<T>(most); }
};

// |x| / 2**power, for an x that is an integer multiple of 2**power.
inline uint64_t whole(double x, int power) {
  const Bits<double> size = sized(x);
  const int exponent = field<double>(size), normal = exponent != 0;
  const uint64_t bits = (size & ((Bits<double>(1) << 52) - 1)) | Bits<double>(normal) << 52;
  const int shift = exponent - normal - 1074 - power;
  return !bits ? 0 : shift < 0 ? bits >> -shift : bits << shift;
}

// Number of elements and sum by provenance id. Bins have COPIES, so that successive additions to
// one id do not depend on each other.
template <typename T, int COPIES>
struct Table {
  static constexpr int HALVES = Cut<T>::HALVES;
  static constexpr int64_t BLOCK = 32, LONG = 1024;
  int64_t count, room = Cut<T>::MAX_VALUES;
  int lowest, rows;
  std::vector<double> bins;  // (halves, rows, ids, copies)
  std::vector<uint64_t> units;  // (halves, rows, ids), from earlier flushes
  std::vector<int64_t> number;

  // The 4 additional rows of bins are for the upper parts of the sums of runs.
  Table(int64_t count, const Reach<T>& reach)
      : count(count),
        lowest(reach.first() / BIN),
        rows(reach.last() / BIN - lowest + 1 + (HALVES == 1 ? 4 : 0)),
        bins(HALVES * rows * count * COPIES),
        number(count * COPIES) {}

  static bool uniform(const int32_t* ids, int32_t id) {
    int32_t differs = (ids[0] ^ id) | (ids[1] ^ id) | (ids[7] ^ id) | (ids[BLOCK - 1] ^ id);
    if (differs) return false;
    for (int64_t i = 0; i < BLOCK; i++) differs |= ids[i] ^ id;
    return !differs;
  }

  void add(int64_t n, const int32_t* ids, const T* gradient) {
    if ((room -= n) < 0) flush();
    for (int64_t i = 0; i < n;) {
      int64_t j = i;
      if (HALVES == 1) {
        while (j + BLOCK <= n && j - i < LONG && uniform(ids + j, ids[i])) j += BLOCK;
      }
      if (j > i) {
        check(1, ids + i);
        number[int64_t(ids[i]) * COPIES] += j - i;
        run(j - i, ids[i], gradient + i);
      } else {
        j = std::min(n, i + BLOCK);
        check(j - i, ids + i);
        for (int64_t k = i; k < j; k++) {
          number[int64_t(ids[k]) * COPIES + k % COPIES]++;
          one(ids[k], gradient[k], k % COPIES);
        }
      }
      i = j;
    }
  }

  // Adds elements that all have the first id.
  void all(int64_t n, const T* gradient) {
    if ((room -= n) < 0) flush();
    int64_t i = 0;
    if (HALVES == 1) {
      for (int64_t some; (some = std::min(LONG, (n - i) / 8 * 8)); i += some) {
        number[0] += some - run(some, 0, gradient + i);
      }
    }
    for (; i < n; i++) {
      number[0] += gradient[i] != 0;
      one(0, gradient[i], i % COPIES);
    }
  }

  void check(int64_t n, const int32_t* ids) const {
    const uint32_t limit = static_cast<uint32_t>(std::min<int64_t>(count, INT32_MAX));
    uint32_t wrong = 0;
    for (int64_t i = 0; i < n; i++) wrong |= static_cast<uint32_t>(ids[i]) >= limit;
    if (wrong) throw std::out_of_range("a id that is not counted");
  }

  void one(int64_t id, T x, int64_t copy) {
    Bits<T> size;
    std::memcpy(&size, &x, sizeof size);
    size &= Kind<T>::SIZE;
    const int row = std::max(field<T>(size) / BIN - lowest, 0);  // 0 may be below all others
    double* at = &bins[(row * count + id) * COPIES + copy];
    const double value = number_of(size);
    if (HALVES == 1) {
      *at += value;
      return;
    }
    const Bits<T> lower = (Bits<T>(1) << (HALVES == 1 ? 0 : LOWER)) - 1;
    const double upper = number_of(size < Kind<T>::INF_BITS ? size & ~lower : size);
    *at += upper;
    if (size < Kind<T>::INF_BITS) at[rows * count * COPIES] += value - upper;
  }

  static double number_of(Bits<T> size) { return gradtrace::number<T>(size); }

  // Adds at most LONG elements of one id, a multiple of 8, and returns how many are 0. If the ratio
  // of the largest to the smallest is limited, all partial sums are exact in double precision.
  int64_t run(int64_t n, int64_t id, const float* gradient) {
    Magnitudes found;
    machine().magnitudes(gradient, n, &found);
    Reach<float> reach;
    reach.least = found.least;
    reach.most = found.most;
    if (!reach.most) return n;
    constexpr int ROOM = 53 - 24 - 10;  // LONG is 2**10
    if (reach.last() == 255 || reach.last() - reach.first() > ROOM) {
      for (int64_t i = 0; i < n; i++) one(id, gradient[i], i % COPIES);
      return found.zeros;
    }
    // In two parts, each within the range of other values of its bin.
    const int row = reach.first() / BIN - lowest, power = Cut<T>::UNIT + BIN * (lowest + row);
    const uint64_t sum = whole(found.sum, power);
    double* at = &bins[(row * count + id) * COPIES];
    at[0] += std::ldexp(static_cast<double>(sum & 0xffffffff), power);
    at[4 * count * COPIES] += std::ldexp(static_cast<double>(sum >> 32), power + 32);
    return found.zeros;
  }
  int64_t run(int64_t, int64_t, const double*) { return 0; }  // HALVES is 2

  int power(int half, int row) const {
    return Cut<T>::UNIT + BIN * (lowest + row) + (HALVES == 2 && half == 0 ? LOWER : 0);
  }

  // Flushes bins to integers, before they hold so many values that sums might be rounded.
  void flush() {
    units.resize(HALVES * rows * count);
    for (int half = 0; half < HALVES; half++) {
      for (int row = 0; row < rows; row++) {
        for (int64_t id = 0; id < count; id++) {
          double* at = &bins[((half * rows + row) * count + id) * COPIES];
          for (int copy = 0; copy < COPIES; copy++) {
            if (!std::isfinite(at[copy])) continue;
            units[(half * rows + row) * count + id] += whole(at[copy], power(half, row));
            at[copy] = 0.0;
          }
        }
      }
    }
    room = Cut<T>::MAX_VALUES;
  }

  void take(Table& other) {
    flush();
    other.flush();
    for (size_t i = 0; i < units.size(); i++) units[i] += other.units[i];
    for (size_t i = 0; i < number.size(); i++) number[i] += other.number[i];
    for (size_t i = 0; i < bins.size(); i++) bins[i] += other.bins[i];  // 0 or not finite
  }

  void finish(int64_t* counts, double* sums) const {
    for (int64_t id = 0; id < count; id++) {
      counts[id] = 0;
      for (int copy = 0; copy < COPIES; copy++) counts[id] += number[id * COPIES + copy];
      sums[id] = counts[id] ? rounded(id) : 0.0;
    }
  }

  // Rounds to nearest, ties to even: the highest 64 bits form two exact doubles; the bits below are
  // reduced to a sticky bit.
  double rounded(int64_t id) const {
    uint64_t carry = 0, window = 0, held = 0;
    bool lost = false, below = false;
    int top = 0;
    double odd = 0.0;
    const auto read = [&](int half, int row) {
      const int64_t at = (half * rows + row) * count + id;
      if (!units.empty()) carry += units[at];
      for (int copy = 0; copy < COPIES; copy++) {
        const double here = bins[at * COPIES + copy];
        if (std::isfinite(here)) {
          carry += whole(here, power(half, row));
        } else {
          odd += here;
        }
      }
    };
    const int shifted = LOWER / BIN, all = rows + (HALVES == 2 ? shifted : 0);
    for (int digit = 0; digit < all || carry; digit++) {
      if (digit < rows) read(HALVES - 1, digit);
      if (HALVES == 2 && digit >= shifted && digit < all) read(0, digit - shifted);
      lost |= (window & 255) != 0;
      window = window >> 8 | (carry & 255) << 56;
      if (carry & 255) {
        held = window;
        below = lost;
        top = digit;
      }
      carry >>= 8;
    }
    const double high = static_cast<double>(held >> 32) * 0x1p32;
    const double low = static_cast<double>((held & 0xffffffff) | uint64_t(below));
    return std::ldexp(high + low, BIN * (top - 7 + lowest) + Cut<T>::UNIT) + odd;
  }
};

constexpr int64_t COUNTED = 1 << 14;  // elements that a task tallies at a time

template <typename T>
Reach<T> reach(int64_t n, const T* x, int threads) {
  std::vector<Reach<T>> found(parts(n, COUNTED));
  pieces(n, COUNTED, threads, [&](int64_t i, int64_t j) { found[i / COUNTED].take(j - i, x + i); });
  Reach<T> all;
  for (const Reach<T>& some : found) all.take(some);
  return all;
}

// Runs body(table, first, last) over pieces of 0..n, with one table per task, and adds up the
// tables.
template <typename T, int COPIES, typename Body>
void counted(int64_t n, int64_t count, const Reach<T>& all, int64_t* counts, double* sums, int threads,
             const Body& body) {
  const int64_t tasks = std::max<int64_t>(1, std::min<int64_t>(parts(n, COUNTED), threads));
  std::vector<Table<T, COPIES>> tables;
  for (int64_t task = 0; task < tasks; task++) tables.emplace_back(count, all);
  each(tasks, threads, [&](int64_t task) {
    for (int64_t i = task * COUNTED; i < n; i += tasks * COUNTED) {
      body(tables[task], i, std::min(n, i + COUNTED));
    }
  });
  for (int64_t task = 1; task < tasks; task++) tables[0].take(tables[task]);
  tables[0].finish(counts, sums);
}

template <typename T>
void tally(int64_t n, const int32_t* ids, const T* gradient, int64_t count, int64_t* counts,
           double* sums, int threads) {
  const auto add = [&](auto& table, int64_t i, int64_t j) { table.add(j - i, ids + i, gradient + i); };
  // Bins of all exponents that occur, or, if they are few beside the elements, of all there are.
  const bool every = sizeof(T) == 4 && n >= 256 * count;
  const Reach<T> all = every ? Reach<T>::everything() : reach(n, gradient, threads);
  count <= 128 ? counted<T, 4>(n, count, all, counts, sums, threads, add)
               : counted<T, 1>(n, count, all, counts, sums, threads, add);
}

// Tally of all nonzero elements as one id.
template <typename T>
void magnitude(int64_t n, const T* gradient, int64_t* count, double* sum, int threads) {
  const Reach<T> all = sizeof(T) == 4 ? Reach<T>::everything() : reach(n, gradient, threads);
  counted<T, 4>(n, 1, all, count, sum, threads, [&](auto& table, int64_t i, int64_t j) {
    table.all(j - i, gradient + i);
  });
}

// Norm, largest |x|, number of nonzero elements and Σ |x| of floats, in float64: pieces are added up
// in order, so that the result does not depend on threads.
void sizes(int64_t n, const float* x, double* out, int threads) {
  constexpr int64_t MOST = 1024;  // that ``magnitudes`` takes
  std::vector<Magnitudes> found(parts(n, COUNTED));
  pieces(n, COUNTED, threads, [&](int64_t i, int64_t j) {
    Magnitudes& piece = found[i / COUNTED];
    while (i < j) {
      Magnitudes here{};
      const int64_t some = std::min(MOST, (j - i) / 8 * 8);
      if (some) {
        machine().magnitudes(x + i, some, &here);
      } else {
        const double size = std::fabs(x[i]);
        here = {0, sized(x[i]), size == 0, size, size * size};
      }
      piece.most = std::max(piece.most, here.most);
      piece.zeros += here.zeros;
      piece.sum += here.sum;
      piece.squares += here.squares;
      i += some ? some : 1;
    }
  });
  Magnitudes all{};
  for (const Magnitudes& piece : found) {
    all.most = std::max(all.most, piece.most);
    all.zeros += piece.zeros;
    all.sum += piece.sum;
    all.squares += piece.squares;
  }
  out[0] = std::sqrt(all.squares);
  out[1] = number<float>(all.most);
  out[2] = static_cast<double>(n - all.zeros);
  out[3] = all.sum;
}

// The numbers of the elements that are 0, ascending, as many as there is room for; returns how many
// there are. Without room, only whether there are any.
template <typename T>
int64_t zeros(int64_t n, const T* x, int64_t room, int64_t* out, int threads) {
  constexpr int64_t BLOCK = 512;
  std::vector<std::vector<int64_t>> found(parts(n, COUNTED));
  const auto any_zero = kernels_for(x).any_zero;
  pieces(n, COUNTED, threads, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += BLOCK) {
      const int64_t j = std::min(last, i + BLOCK);
      const bool any = any_zero(x + i, j - i);
      for (int64_t k = i; any && k < j; k++) {
        if (x[k] != 0) continue;
        found[first / COUNTED].push_back(k);
        if (!room) return;
      }
    }
  });
  int64_t count = 0;
  for (const auto& piece : found) {
    for (const int64_t at : piece) {
      if (count < room) out[count] = at;
      count++;
    }
  }
  return count;
}

// Maximum along dimensions ----------------------------------------------------------------------

// The index of the first maximum, or -1 if n is 0.
template <typename B>
int64_t first_largest(const B* size, int64_t n) {
  if (!n) return -1;
  B most = size[0];
  for (int64_t i = 1; i < n; i++) most = size[i] > most ? size[i] : most;
  int64_t place = 0;
  while (size[place] != most) place++;
  return place;
}

// A tensor as four levels, two reduced (r1, r2) and two kept (k1, k2), from the outermost to the
// innermost: r1, k1, r2, k2.
struct Levels {
  int64_t size[4];
  int64_t step[4];   // strides of the values
  int64_t along[4];  // strides of the ids
};

constexpr int64_t BLOCK = 512;

template <typename T>
struct Reduction {
  const T* x;
  Levels how;

  // Reduces elements [low, high) in order, for contiguous kept elements [first, last): compares
  // whole rows with the maxima so far.
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

  // The same for one kept element, whose reduced elements may be contiguous.
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

  void run(const int32_t* ids, T* value, int32_t* out, int threads) const {
    const int64_t k1 = how.size[1], k2 = how.size[3], reduced = how.size[0] * how.size[2];
    const bool beside = k2 > 1 && how.step[3] == 1;
    const int64_t width = std::min(k2, beside ? BLOCK : std::max<int64_t>(1, BLOCK / (reduced + 1)));
    const int64_t columns = parts(k2, width), blocks = k1 * columns;
    // Few results of long lines: lines are cut, and their parts combined in order.
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
          out[out_at] = most[best] ? ids[from] : 0;
        }
      }
    });
  }
};

template <typename T>
void scatter(int64_t n, const T* x, const int32_t* ids, const int64_t* target,
             int64_t size, T* value, int32_t* out) {
  for (int64_t j = 0; j < n; j++) {
    const int64_t i = target[j];
    if (i < 0 || i >= size) continue;
    const Bits<T> here = sized(x[j]);
    if (here > sized(value[i])) {
      value[i] = number<T>(here);
      out[i] = ids[j];
    }
  }
}

// Sparse matrices in CSR format -----------------------------------------------------------------

// For every row the sum of its products or, given ids, the largest product and its id. x is
// (blocks, planes, columns, inner), the result (blocks, planes, rows, inner).
template <typename T>
struct Compressed {
  int64_t blocks, planes, inner, columns, rows, entries;
  const int64_t* starts;
  const int64_t* source;
  const T* weight;

  // Whether the offsets and columns of all entries are valid.
  bool sound() const {
    const int64_t all = blocks * rows;
    if (starts[0] < 0 || starts[all] > entries) return false;
    for (int64_t r = 0; r < all; r++) {
      if (starts[r] > starts[r + 1]) return false;
    }
    for (int64_t e = starts[0]; e < starts[all]; e++) {
      if (source[e] < 0 || source[e] >= columns) return false;
    }
    return true;
  }

  // Calls body(weight, index in x) for the entries of a row of a plane.
  template <typename Body>
  void entries_of(int64_t block, int64_t plane, int64_t row, const Body& body) const {
    const int64_t at = block * rows + row;
    const int64_t base = (block * planes + plane) * columns;
    for (int64_t e = starts[at]; e < starts[at + 1]; e++) {
      body(weight[e], (base + source[e]) * inner);
    }
  }

  // Calls body(block, plane, row, index in the result) for every row of every plane.
  template <typename Body>
  void each_row(int threads, const Body& body) const {
    const int64_t length = std::max<int64_t>(1, (1 << 14) / std::max<int64_t>(inner, 1));
    const int64_t cuts = parts(rows, length);
    const int64_t together = cuts == 1 ? std::max<int64_t>(1, length / rows) : 1;  // planes
    pieces(blocks * planes * cuts, together, threads, [&](int64_t first, int64_t last) {
      for (int64_t task = first; task < last; task++) {
        const int64_t plane = task / cuts, low = task % cuts * length;
        const int64_t high = std::min(rows, low + length);
        for (int64_t row = low; row < high; row++) {
          body(plane / planes, plane % planes, row, (plane * rows + row) * inner);
        }
      }
    });
  }

  void sum(const T* x, T* value, int threads) const {
    each_row(threads, [&](int64_t block, int64_t plane, int64_t row, int64_t out) {
      if (inner == 1) {
        T total = 0;
        entries_of(block, plane, row, [&](T w, int64_t at) { total += w * x[at]; });
        value[out] = total;
        return;
      }
      T* here = value + out;
      std::fill(here, here + inner, T(0));
      entries_of(block, plane, row, [&](T w, int64_t at) {
        for (int64_t d = 0; d < inner; d++) here[d] += w * x[at + d];
      });
    });
  }

  void largest(const T* x, const int32_t* ids, T* value, int32_t* out, int threads) const {
    each_row(threads, [&](int64_t block, int64_t plane, int64_t row, int64_t to) {
      if (inner == 1) {
        Bits<T> most = 0;
        int64_t place = -1;
        entries_of(block, plane, row, [&](T w, int64_t at) {
          const Bits<T> size = sized(w * x[at]);
          place = size > most ? at : place;
          most = size > most ? size : most;
        });
        value[to] = number<T>(most);
        out[to] = place < 0 ? 0 : ids[place];
        return;
      }
      std::fill(value + to, value + to + inner, T(0));
      std::fill(out + to, out + to + inner, 0);
      entries_of(block, plane, row, [&](T w, int64_t at) {
        for (int64_t d = 0; d < inner; d++) {
          const Bits<T> size = sized(w * x[at + d]);
          const bool wins = size > sized(value[to + d]);
          value[to + d] = wins ? number<T>(size) : value[to + d];
          out[to + d] = wins ? ids[at + d] : out[to + d];
        }
      });
    });
  }
};

// Diagonal plus low rank ------------------------------------------------------------------------

// A strided matrix: `line` is the stride of lines, `step` that of elements.
template <typename T>
struct Lines {
  const T* data;
  int64_t line, step;

  // One line as contiguous memory; copied if it is strided.
  const T* at(int64_t number, int64_t n, T* copy) const {
    const T* from = data + number * line;
    if (step == 1) return from;
    for (int64_t i = 0; i < n; i++) copy[i] = from[i * step];
    return copy;
  }
};

// SIMD vectors.
template <typename T>
struct Wide;

template <>
struct Wide<float> {
  typedef float Numbers __attribute__((vector_size(16)));
  typedef int32_t Whole __attribute__((vector_size(16)));
};

template <>
struct Wide<double> {
  typedef double Numbers __attribute__((vector_size(16)));
  typedef int64_t Whole __attribute__((vector_size(16)));
};

// For one line of n elements: for each i the largest |J[i, j]·x[j]| and the lowest j that attains
// it, where J[i, j] = Σᵣ u[r][i]·v[r][j], plus d[i] for i = j; of rank one or two. Buffers are
// reused for the next line.
template <typename T>
class Normalised {
 public:
  using B = Bits<T>;
  Normalised(int64_t n, int rank) : n(n), rank(rank), padded((n + STEP - 1) / STEP * STEP) {
    for (auto& some : copies) some.resize(n);
    for (auto* some : {&size, &place, &sizes, &few}) some->resize(padded);
    for (auto* some : {&a, &b}) some->resize(n);
    turn.reserve(n);
  }

  // Reads a line, for largest().
  void read(const Lines<T>* from, int64_t line) {
    d = from[0].at(line, n, copies[0].data());
    x = from[1].at(line, n, copies[1].data());
    for (int r = 0; r < rank; r++) {
      u[r] = from[2 + r].at(line, n, copies[2 + r].data());
      v[r] = from[2 + rank + r].at(line, n, copies[4 + r].data());
    }
  }

  // Computes the maximum (as bits) and its index for each i; 0 where all products are 0.
  void largest() {
    if (rank == 1) {
      others_of_one();
      own<1>();
    } else {
      others_of_two();
      own<2>();
    }
  }

  std::vector<B> size, place;

 private:
  struct Point {
    T a, b;
    B j;
  };
  struct Turn {
    T slope, a, b;  // a direction (a, b) with a ≥ 0
    B i;
  };
  static constexpr int64_t LANES_OF = 16 / sizeof(T), STEP = 4 * LANES_OF;
  static constexpr int64_t SHORT = 16;  // the longest lines that are not worth a hull
  static constexpr int64_t MANY = 64;   // points beyond which directions are sorted
  static constexpr size_t ENOUGH = 8;
  // A multiple of the rounding error of a coordinate of at most 1: see within_polygon.
  static constexpr T MARGIN = 32 * std::numeric_limits<T>::epsilon();
  using Numbers = typename Wide<T>::Numbers;
  using Whole = typename Wide<T>::Whole;

  // The diagonal element i = j wins ties only against later ones.
  template <int RANK>
  void own() {
    B *__restrict most = size.data(), *__restrict at = place.data();
    const T *diagonal = d, *value = x, *u0 = u[0], *v0 = v[0], *u1 = u[RANK - 1], *v1 = v[RANK - 1];
    const B last = static_cast<B>(n);
    for (B i = 0; i < last; i++) {
      T weight = diagonal[i] + u0[i] * v0[i];
      if (RANK == 2) weight = weight + u1[i] * v1[i];
      const B here = sized(weight * value[i]);
      const bool wins = (here > most[i]) | ((here == most[i]) & (i < at[i])) | (at[i] < 0);
      most[i] = wins ? here : most[i];
      at[i] = wins ? i : at[i];
    }
  }

  // Rank one: the largest of the line, or the second largest where the largest is the diagonal one.
  void others_of_one() {
    for (int64_t j = 0; j < n; j++) place[j] = sized(v[0][j] * x[j]);
    const int64_t first = first_largest(place.data(), n);
    const B most = place[first];
    place[first] = -1;
    const int64_t second = n > 1 ? first_largest(place.data(), n) : -1;
    const B next = n > 1 ? place[second] : 0;
    for (int64_t i = 0; i < n; i++) {
      size[i] = sized(u[0][i] * number<T>(most));
      place[i] = static_cast<B>(first);
    }
    size[first] = n > 1 ? sized(u[0][first] * number<T>(next)) : 0;
    place[first] = static_cast<B>(second);
  }

  // Rank two: ±(v0·x, v1·x) are points in the plane, and the maximal j for i is the point furthest
  // in the direction (u0, u1)[i], which must be a corner of their convex hull.
  void others_of_two() {
    const bool bounded = n > SHORT && within();
    count = 0;
    for (int64_t j = 0; j < n; j++) {
      a[count] = a[j];
      b[count] = b[j];
      few[count] = static_cast<B>(j);
      count += !bounded || x[j] != 0;
    }
    if (bounded && !count) limit = 0;
    if (bounded && count) {
      within_polygon<4>();
      within_polygon<16>();
    }
    if (bounded && count > MANY) {
      by_sectors();
    } else {
      compare();
    }
    const T low = bounded ? limit : 0, wide = reach[0], high = reach[1];
    const T *u0 = u[0], *u1 = u[1];
    const B *at = place.data(), last = static_cast<B>(n);
    B* __restrict again = few.data();
    for (B i = 0; i < last; i++) {
      again[i] = (at[i] == i) | (std::fabs(u0[i]) * wide + std::fabs(u1[i]) * high < low);
    }
    for (int64_t i = 0; i < n; i++) {
      if (again[i]) alone(i);
    }
  }

  // Compares one i with every other j.
  void alone(int64_t i) {
    B* all = sizes.data();
    const T first = u[0][i], second = u[1][i];
    for (int64_t j = 0; j < n; j++) all[j] = sized((first * v[0][j] + second * v[1][j]) * x[j]);
    all[i] = -1;
    const int64_t at = n > 1 ? first_largest(all, n) : -1;
    size[i] = at < 0 ? 0 : all[at];
    place[i] = static_cast<B>(at);
  }

  // Compares every i with the remaining points, in ascending order; i itself may be among them.
  void compare() {
    const Whole none = Whole{} - 1, bits = Whole{} + Kind<T>::SIZE;
    const Whole nan = Whole{} + Kind<T>::NAN_BITS;
    for (int64_t i = 0; i < n; i += STEP) {
      Numbers left[2][4];
      Whole most[4], at[4];
      const int64_t rest = std::min(n - i, STEP);
      for (int r = 0; r < 2; r++) {
        T some[STEP] = {};
        std::memcpy(some, u[r] + i, rest * sizeof(T));
        std::memcpy(left[r], some, sizeof some);
      }
      for (int k = 0; k < 4; k++) most[k] = at[k] = none;
      for (int64_t f = 0; f < count; f++) {
        const B j = few[f];
        const T first = v[0][j], second = v[1][j], scale = x[j];
        for (int k = 0; k < 4; k++) {
          const Numbers product = (left[0][k] * first + left[1][k] * second) * scale;
          Whole here = (Whole)product & bits;
          here = here < nan ? here : nan;
          const Whole wins = here > most[k];
          most[k] = wins ? here : most[k];
          at[k] = wins ? Whole{} + j : at[k];
        }
      }
      std::memcpy(&size[i], most, sizeof most);
      std::memcpy(&place[i], at, sizeof at);
    }
  }

  // Whether no product overflows or underflows, and the points (v0·x, v1·x), scaled to a largest
  // coordinate of 1 on each axis, are exact to a few roundings.
  bool within() {
    T most[5] = {};
    const T* all[5] = {u[0], u[1], v[0], v[1], x};
    for (int k = 0; k < 5; k++) {
      B here = 0;
      for (int64_t i = 0; i < n; i++) here = std::max(here, sized(all[k][i]));
      most[k] = number<T>(here);
    }
    const T bound = (most[0] * most[2] + most[1] * most[3]) * most[4] * 4;
    if (!(bound <= std::numeric_limits<T>::max())) return false;
    B wide = 0, high = 0;
    for (int64_t j = 0; j < n; j++) {
      a[j] = v[0][j] * x[j];
      b[j] = v[1][j] * x[j];
      wide = std::max(wide, sized(a[j]));
      high = std::max(high, sized(b[j]));
    }
    reach[0] = number<T>(wide);
    reach[1] = number<T>(high);
    for (int r = 0; r < 2; r++) {
      const bool nothing = most[2 + r] == 0 || most[4] == 0;
      if (!nothing && !(reach[r] >= Kind<T>::TINY)) return false;
      const T scale = nothing ? 1 : 1 / reach[r];
      if (!(scale <= std::numeric_limits<T>::max())) return false;
      for (int64_t j = 0; j < n; j++) (r ? b : a)[j] *= scale;
    }
    limit = Kind<T>::TINY * std::max<T>(1, most[4]);
    return true;
  }

  // Prunes points well inside a polygon of points. Computed products differ from exact ones by a
  // few roundings of |u0|·reach0 + |u1|·reach1, so a point may be dropped if, moved by MARGIN along
  // either axis, it stays inside: then some corner is larger for every i, even as computed.
  template <int COUNT>
  void within_polygon() {
    T p[COUNT + 1], q[COUNT + 1];
    for (int k = 0; k < COUNT; k++) {
      const double angle = M_PI * k / COUNT;
      furthest(T(std::cos(angle)), T(std::sin(angle)), p + k, q + k);
    }
    p[COUNT] = -p[0];  // after half a turn, the mirror image
    q[COUNT] = -q[0];
    std::fill(sizes.begin(), sizes.begin() + count, 0);  // 1 for a point that is not inside
    for (int k = 0; k < COUNT; k++) {
      const T across = q[k + 1] - q[k], up = p[k] - p[k + 1];  // outward normal
      const T size = std::fabs(across) + std::fabs(up);
      if (!(size > 0)) continue;  // two directions with the same corner have no edge
      const T edge = across * p[k] + up * q[k] - MARGIN * size;
      for (int64_t f = 0; f < count; f++) {
        sizes[f] = std::fabs(across * a[f] + up * b[f]) <= edge ? sizes[f] : 1;
      }
    }
    int64_t kept = 0;
    for (int64_t f = 0; f < count; f++) {
      a[kept] = a[f];
      b[kept] = b[f];
      few[kept] = few[f];
      kept += sizes[f];
    }
    count = kept;
  }

  // The point furthest in a direction, or its mirror image.
  void furthest(T across, T up, T* p, T* q) {
    for (int64_t f = 0; f < count; f++) sizes[f] = sized(a[f] * across + b[f] * up);
    const int64_t at = first_largest(sizes.data(), count);
    const T sign = a[at] * across + b[at] * up < 0 ? T(-1) : T(1);
    *p = sign * a[at];
    *q = sign * b[at];
  }

  // For many points near an edge of the hull: sorts the directions, and for a sector of them
  // considers only the points that no other point exceeds at both ends.
  void by_sectors() {
    turn.clear();
    for (int64_t i = 0; i < n; i++) {
      T across = u[0][i] * reach[0], up = u[1][i] * reach[1];
      if (across < 0 || (across == 0 && up < 0)) across = -across, up = -up;
      size[i] = 0;
      place[i] = -1;
      if (across == 0 && up == 0) continue;
      const T slope = across > 0 ? up / across : std::numeric_limits<T>::infinity();
      turn.push_back({slope, across, up, static_cast<B>(i)});
    }
    std::sort(turn.begin(), turn.end(), [](const Turn& s, const Turn& t) { return s.slope < t.slope; });
    std::vector<Point> points;
    for (int64_t f = 0; f < count; f++) points.push_back({a[f], b[f], few[f]});
    if (!turn.empty()) sector(0, turn.size(), points);
  }

  void sector(size_t first, size_t last, const std::vector<Point>& all) {
    const std::vector<Point> some = last - first > 1 ? contenders(first, last, all) : all;
    if (some.size() > ENOUGH && last - first > 1) {
      const size_t middle = first + (last - first) / 2;
      sector(first, middle, some);
      sector(middle, last, some);
      return;
    }
    for (size_t k = first; k < last; k++) {
      const B i = turn[k].i;
      B most = -1, at = -1;
      for (const Point& point : some) {
        const B j = point.j;
        const B here = sized((u[0][i] * v[0][j] + u[1][i] * v[1][j]) * x[j]);
        at = here > most ? j : at;
        most = here > most ? here : most;
      }
      size[i] = most;
      place[i] = at;
    }
  }

  // The points that may be maximal for a direction in the sector.
  std::vector<Point> contenders(size_t first, size_t last, const std::vector<Point>& all) const {
    const Turn &s = turn[first], &t = turn[last - 1];
    const auto far = [&](const Turn& way, const Point& point) { return way.a * point.a + way.b * point.b; };
    const T slack_s = MARGIN * (s.a + std::fabs(s.b)), slack_t = MARGIN * (t.a + std::fabs(t.b));
    T most_s = -1, most_t = -1, with_s = 0, with_t = 0;  // maxima at both ends, and at the other
    for (const Point& point : all) {
      const T at_s = far(s, point), at_t = far(t, point);
      if (std::fabs(at_s) > most_s) most_s = std::fabs(at_s), with_s = at_s < 0 ? -at_t : at_t;
      if (std::fabs(at_t) > most_t) most_t = std::fabs(at_t), with_t = at_t < 0 ? -at_s : at_s;
    }
    std::vector<Point> some;
    for (const Point& point : all) {
      const T at_s = std::fabs(far(s, point)) + slack_s, at_t = std::fabs(far(t, point)) + slack_t;
      const bool below = (at_s <= most_s && at_t <= with_s) || (at_s <= with_t && at_t <= most_t);
      if (!below) some.push_back(point);
    }
    return some;
  }

  int64_t n;
  int rank;
  int64_t padded;
  const T *d = nullptr, *x = nullptr, *u[2] = {}, *v[2] = {};
  std::vector<T> copies[6], a, b;
  T reach[2] = {}, limit = 0;
  std::vector<B> sizes, few;  // few: j of the remaining points (a, b)
  int64_t count = 0;
  std::vector<Turn> turn;
};

// Lines of the diagonal, x, the left and the right factors, in this order.
template <typename T>
void normalise(int64_t lines, int64_t n, int rank, const Lines<T>* from, const Lines<int32_t>& ids,
               T* value, int64_t* place, int32_t* out, int threads) {
  const int64_t some = std::max<int64_t>(1, std::min<int64_t>((1 << 14) / n, parts(lines, 4 * threads)));
  pieces(lines, some, threads, [&](int64_t first, int64_t last) {
    Normalised<T> line(n, rank);
    for (int64_t k = first; k < last; k++) {
      line.read(from, k);
      line.largest();
      for (int64_t i = 0; i < n; i++) {
        const int64_t at = line.place[i];
        const bool there = line.size[i] > 0;
        if (value) value[k * n + i] = number<T>(line.size[i]);
        if (place) place[k * n + i] = there ? at : -1;
        if (out) out[k * n + i] = there ? ids.data[k * ids.line + at * ids.step] : 0;
      }
    }
  });
}

// Whether any of n numbers, given as bits, has the exponent of infinity and NaN.
template <typename B>
bool any_nonfinite(const void* data, int64_t n, B exponent) {
  const B* bits = static_cast<const B*>(data);
  B found = 0;
  for (int64_t i = 0; i < n; i++) found |= B((bits[i] & exponent) == exponent);
  return found != 0;
}

}  // namespace
}  // namespace gradtrace

using gradtrace::guarded;

// The place of the first of these tensors that holds a number which is not finite, or -1: data, size
// and kind (0: float, 1: double, 2: bfloat16, 3: half) of each.
GRADTRACE_API int gradtrace_first_nonfinite(int64_t tensors, const int64_t* items) {
  for (int64_t k = 0; k < tensors; k++) {
    const void* data = reinterpret_cast<const void*>(items[3 * k]);
    const int64_t n = items[3 * k + 1];
    bool bad = false;
    if (!data || n < 0) return static_cast<int>(k);
    switch (items[3 * k + 2]) {
      case 0: bad = gradtrace::any_nonfinite<uint32_t>(data, n, 0x7f800000); break;
      case 1: bad = gradtrace::any_nonfinite<uint64_t>(data, n, 0x7ff0000000000000); break;
      case 2: bad = gradtrace::any_nonfinite<uint16_t>(data, n, 0x7f80); break;
      default: bad = gradtrace::any_nonfinite<uint16_t>(data, n, 0x7c00); break;
    }
    if (bad) return static_cast<int>(k);
  }
  return -1;
}

GRADTRACE_API int gradtrace_merge(int wide, int64_t n, void* size, int32_t* ids,
                                  const void* value, const int32_t* other, int32_t constant,
                                  int32_t shift, int threads) {
  const auto run = [&](auto* sizes) {
    const auto* values = static_cast<decltype(sizes)>(const_cast<void*>(value));
    gradtrace::pieces(n, 1 << 15, threads, [&](int64_t i, int64_t j) {
      gradtrace::merge(j - i, sizes + i, ids + i, values + i, other ? other + i : nullptr,
                       constant, shift);
    });
  };
  return guarded([&] {
    gradtrace::require_places(n, {size, ids, value});
    wide ? run(static_cast<double*>(size)) : run(static_cast<float*>(size));
  });
}

GRADTRACE_API int gradtrace_tally(int wide, int64_t n, const int32_t* ids, const void* gradient,
                                  int64_t count, int64_t* counts, double* sums, int threads) {
  return guarded([&] {
    gradtrace::require_places(n, {ids, gradient});
    gradtrace::require_places(count, {counts, sums});
    wide ? gradtrace::tally(n, ids, static_cast<const double*>(gradient), count, counts, sums, threads)
         : gradtrace::tally(n, ids, static_cast<const float*>(gradient), count, counts, sums, threads);
  });
}

GRADTRACE_API int gradtrace_magnitude(int wide, int64_t n, const void* gradient, int64_t* count,
                                      double* sum, int threads) {
  return guarded([&] {
    gradtrace::require_places(n, {gradient});
    gradtrace::require_places(1, {count, sum});
    wide ? gradtrace::magnitude(n, static_cast<const double*>(gradient), count, sum, threads)
         : gradtrace::magnitude(n, static_cast<const float*>(gradient), count, sum, threads);
  });
}

// Norm, largest |x|, number of nonzero elements and Σ |x|.
GRADTRACE_API int gradtrace_sizes(int64_t n, const float* x, double* out, int threads) {
  return guarded([&] {
    gradtrace::require_places(n, {x});
    gradtrace::require_places(4, {out});
    gradtrace::sizes(n, x, out, threads);
  });
}

// The numbers of elements that are 0: `count` of them, of which those that there is room for.
GRADTRACE_API int gradtrace_zeros(int wide, int64_t n, const void* x, int64_t room, int64_t* out,
                                  int64_t* count, int threads) {
  return guarded([&] {
    gradtrace::require_places(n, {x});
    gradtrace::require_places(room, {out});
    gradtrace::require_places(1, {count});
    *count = wide ? gradtrace::zeros(n, static_cast<const double*>(x), room, out, threads)
                  : gradtrace::zeros(n, static_cast<const float*>(x), room, out, threads);
  });
}

// Many tensors at once: data, size and whether it is of doubles, of each.
GRADTRACE_API int gradtrace_magnitudes(int64_t tensors, const int64_t* items, int64_t* counts,
                                       double* sums, int threads) {
  return guarded([&] {
    gradtrace::require_places(tensors, {items, counts, sums});
    gradtrace::pieces(tensors, 16, threads, [&](int64_t first, int64_t last) {
      for (int64_t n = first; n < last; n++) {
        const void* data = reinterpret_cast<const void*>(items[3 * n]);
        const int64_t size = items[3 * n + 1];
        gradtrace::require_places(size, {data});
        items[3 * n + 2]
            ? gradtrace::magnitude(size, static_cast<const double*>(data), counts + n, sums + n, 1)
            : gradtrace::magnitude(size, static_cast<const float*>(data), counts + n, sums + n, 1);
      }
    });
  });
}

// how: sizes, strides of x and strides of the ids, each of r1, k1, r2, k2.
GRADTRACE_API int gradtrace_reduce(int wide, const void* x, const int32_t* ids,
                                   const int64_t* how, void* value, int32_t* out, int threads) {
  return guarded([&] {
    gradtrace::require(how);
    gradtrace::Levels levels;
    std::copy(how, how + 4, levels.size);
    std::copy(how + 4, how + 8, levels.step);
    std::copy(how + 8, how + 12, levels.along);
    const int64_t n = gradtrace::product_of({how[0], how[1], how[2], how[3]});
    gradtrace::require_places(n, {x, ids, value, out});
    if (wide) {
      gradtrace::Reduction<double>{static_cast<const double*>(x), levels}.run(
          ids, static_cast<double*>(value), out, threads);
    } else {
      gradtrace::Reduction<float>{static_cast<const float*>(x), levels}.run(
          ids, static_cast<float*>(value), out, threads);
    }
  });
}

// value and out must be 0 initially.
GRADTRACE_API int gradtrace_scatter(int wide, int64_t n, const void* x, const int32_t* ids,
                                    const int64_t* target, int64_t size, void* value,
                                    int32_t* out) {
  return guarded([&] {
    gradtrace::require_places(n, {x, ids, target});
    gradtrace::require_places(size, {value, out});
    if (wide) {
      gradtrace::scatter(n, static_cast<const double*>(x), ids, target, size,
                         static_cast<double*>(value), out);
    } else {
      gradtrace::scatter(n, static_cast<const float*>(x), ids, target, size,
                         static_cast<float*>(value), out);
    }
  });
}

// sizes: blocks, planes, inner, columns, rows, entries. Computes the sums if ids is null.
GRADTRACE_API int gradtrace_sparse(int wide, const int64_t* sizes, const int64_t* starts,
                                   const int64_t* source, const void* weight, const void* x,
                                   const int32_t* ids, void* value, int32_t* out, int threads) {
  const auto run = [&](auto* values) {
    using T = std::remove_pointer_t<decltype(values)>;
    const gradtrace::Compressed<T> matrix{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4],
                                          sizes[5], starts,   source,   static_cast<const T*>(weight)};
    gradtrace::require(matrix.sound());
    const T* from = static_cast<const T*>(x);
    ids ? matrix.largest(from, ids, values, out, threads) : matrix.sum(from, values, threads);
  };
  return guarded([&] {
    using gradtrace::product_of;
    gradtrace::require(sizes && starts);
    const int64_t outputs = product_of({sizes[0], sizes[1], sizes[2], sizes[4]});
    product_of({sizes[0], sizes[1], sizes[2], sizes[3]});
    gradtrace::require_places(outputs, {value});
    if (ids) gradtrace::require_places(outputs, {out});
    gradtrace::require_places(sizes[5], {source, weight, x});
    if (!outputs) return;
    wide ? run(static_cast<double*>(value)) : run(static_cast<float*>(value));
  });
}

// from: address, stride of lines and stride of elements of the diagonal, x, the left and the right
// factors, and the ids. Results that are not requested are null.
GRADTRACE_API int gradtrace_normalise(int wide, int64_t lines, int64_t n, int rank,
                                      const int64_t* from, void* value, int64_t* place,
                                      int32_t* out, int threads) {
  const auto run = [&](auto* values) {
    using T = std::remove_pointer_t<decltype(values)>;
    gradtrace::Lines<T> all[6];
    for (int k = 0; k < 2 + 2 * rank; k++, from += 3) {
      all[k] = {reinterpret_cast<const T*>(from[0]), from[1], from[2]};
    }
    const gradtrace::Lines<int32_t> ids{reinterpret_cast<const int32_t*>(from[0]), from[1],
                                          from[2]};
    gradtrace::normalise<T>(lines, n, rank, all, ids, values, place, out, threads);
  };
  return guarded([&] {
    gradtrace::require(from && (rank == 1 || rank == 2) && n < int64_t(1) << 31);
    const int64_t all = gradtrace::product_of({lines, n});
    for (int k = 0; k < 2 + 2 * rank + (out ? 1 : 0); k++) gradtrace::require(from[3 * k] || !all);
    wide ? run(static_cast<double*>(value)) : run(static_cast<float*>(value));
  });
}
