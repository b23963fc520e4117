// Follows paths through a program: a warp takes one path from its leaf to the root, and at every
// element moves on to the one that contributes most. The program is a table of 64-bit words
// (gradtrace/kernels/path_table.py), in which nodes, terms and layouts are given by their places.

#define LANES 32
#define UNROLL _Pragma("unroll")
#define NOT_INLINED __device__ __noinline__
#define ALL 0xffffffffu
#define MAX_WORDS 4  // words of a set of components in each lane
#define MAX_RANK 4

struct Follow {
  const i64* table;
  const i64* starts;  // pairs of a node and an element
  i64 n, words;
  i64* sets;  // (n, words)
  double* mantissa;
  i64* exponent;  // NOT_WHOLE for a path that does not reach the root
  double* gradient;
};

enum Kind { MOVE, TABLE, SLOT, SCALE, SUM, NORMALISE, SCATTER };

struct Operand {  // in a table: address, dtype, layout from element numbers to offsets
  i64 data, kind, layout;
};

struct Term {
  i64 kind, next;
  Operand x, w;  // w without an address: the number whose bits are in its layout
  Operand total;  // the size of the whole term, if it is not that of its largest contribution
  i64 shift;      // a power of two by which sizes are multiplied
  i64 source;     // layout: the first element number that an element may come from
  i64 args[14];
};

struct Node {
  i64 bits, slices, terms, first;
  Operand gradient;
};

__device__ __forceinline__ i64 quotient(i64 a, i64 b) {
  if (((a | b) >> 32) == 0) return (u32)a / (u32)b;
  return a / b;
}

// A layout: the number of its dimensions, an offset, and for each a step, a size and a stride.
// This and the functions below are not inlined: the compiler would take half a minute.
NOT_INLINED i64 located(const i64* table, i64 at, i64 element) {
  if (!at) return element;
  const i64* layout = table + at;
  const i64 dims = layout[0];
  i64 total = layout[1];
  for (i64 d = 0; d < dims; d++) {
    const i64 step = layout[2 + 3 * d], size = layout[3 + 3 * d];
    i64 number = step > 1 ? quotient(element, step) : element;
    if (d + 1 < dims) number -= quotient(number, size) * size;
    total += number * layout[4 + 3 * d];
  }
  return total;
}

NOT_INLINED double load(i64 data, i64 kind, i64 at) {
  if (kind == 0) return ((const float*)data)[at];
  if (kind == 1) return ((const double*)data)[at];
  const unsigned short bits = ((const unsigned short*)data)[at];
  return kind == 2 ? of_half(bits) : of_bfloat(bits);
}

__device__ __forceinline__ float wide(float x) { return x; }
__device__ __forceinline__ float wide(unsigned short x) { return of_bfloat(x); }

// Computes in float64, or as float32 would: products and sums of float32 that are rounded from
// float64 are the same, as that has more than twice as many digits.
struct Arithmetic {
  bool single;
  __device__ __forceinline__ double rounded(double x) const { return single ? (double)(float)x : x; }
  __device__ __forceinline__ double times(double a, double b) const {
    return rounded(__dmul_rn(a, b));
  }
  __device__ __forceinline__ double plus(double a, double b) const {
    return rounded(__dadd_rn(a, b));
  }
};

struct Single {
  __device__ __forceinline__ float times(float a, float b) const { return __fmul_rn(a, b); }
  __device__ __forceinline__ float plus(float a, float b) const { return __fadd_rn(a, b); }
};

struct Best {
  double value;
  i64 source;  // -1 for none
  double weight;
};

// The largest of all lanes, the lowest place of several.
template <typename B>
__device__ __forceinline__ void join(B& most, i64& place) {
  for (int half = LANES / 2; half; half /= 2) {
    const B other = __shfl_xor_sync(ALL, most, half);
    const i64 there = __shfl_xor_sync(ALL, place, half);
    if (other > most || (other == most && there < place)) most = other, place = there;
  }
}

// The elements of a line: their address, and the step from one to the next.
template <typename X>
struct Line {
  const X* data;
  i64 step;
  __device__ __forceinline__ float at(i64 k) const { return wide(data[k * step]); }
};

// A line of any dtype, or one that is read by a layout; or, without an address, of ones.
struct Any {
  const i64* table;
  const Operand& x;
  i64 first, step;
  bool layout;
  __device__ __forceinline__ double at(i64 k) const {
    if (!x.data) return 1;
    return load(x.data, x.kind, first + (layout ? located(table, step, k) : k * step));
  }
};

// The largest |x[k] w[k]| but for k = skip, of which a lane takes every 32nd; the lowest k of
// several. Four at a time, so that loads need not wait for one another.
template <typename T, typename A, typename X, typename W>
__device__ __forceinline__ double search(const A& a, const X& x, const W& w, i64 count, i64 skip,
                                         i64& place) {
  decltype(sized(T(0))) most = -1;
  i64 k = threadIdx.x % LANES;
  for (; k + 3 * LANES < count; k += 4 * LANES) {
    T here[4];
    UNROLL
    for (int u = 0; u < 4; u++) here[u] = a.times(x.at(k + LANES * u), w.at(k + LANES * u));
    UNROLL
    for (int u = 0; u < 4; u++) {
      const auto size = sized(here[u]);
      if (size > most && k + LANES * u != skip) most = size, place = k + LANES * u;
    }
  }
  for (; k < count; k += LANES) {
    const auto size = sized((T)a.times(x.at(k), w.at(k)));
    if (size > most && k != skip) most = size, place = k;
  }
  join(most, place);
  return most < 0 ? -1 : (double)number(most);
}

// out[i] = sum of w[k] x[k]: matrix products, and sums over dimensions (without w).
// args: count, whether the next are layouts, steps of x, w and the source along k, or their layouts.
NOT_INLINED Best summed(const i64* table, const Term& t, i64 element, bool single) {
  const i64 count = t.args[0], xs = t.args[2], ws = t.args[3];
  const bool layouts = t.args[1];
  const i64 x0 = located(table, t.x.layout, element);
  const i64 w0 = t.w.data ? located(table, t.w.layout, element) : 0;
  const Any x = {table, t.x, x0, xs, layouts}, w = {table, t.w, w0, ws, layouts};
  const bool matrices = !layouts && t.w.data && t.x.kind == t.w.kind;
  double most;
  i64 place = count;
  if (matrices && t.x.kind == 0) {
    const Line<float> a = {(const float*)t.x.data + x0, xs}, b = {(const float*)t.w.data + w0, ws};
    most = search<float>(Single(), a, b, count, -1, place);
  } else if (matrices && t.x.kind == 3) {
    const Line<unsigned short> a = {(const unsigned short*)t.x.data + x0, xs};
    const Line<unsigned short> b = {(const unsigned short*)t.w.data + w0, ws};
    most = search<float>(Single(), a, b, count, -1, place);
  } else {
    most = search<double>(Arithmetic{single}, x, w, count, -1, place);
  }
  if (most <= 0) return {0.0, -1, 0.0};
  const i64 along = layouts ? located(table, t.args[4], place) : place * t.args[4];
  return {most, located(table, t.source, element) + along, w.at(place)};
}

// The weights of a line that is diagonal plus low rank: for every rank left, a number, and right.
template <typename T, typename A>
struct LowRank {
  A a;
  const i64* parts;  // 4 words each: address, dtype, layout, step along lines
  i64 rank;
  T left[MAX_RANK];
  i64 right[MAX_RANK];

  __device__ __forceinline__ LowRank(A how, const i64* table, const Term& t, i64 element) : a(how) {
    parts = table + t.args[4];
    rank = t.args[3];
    for (i64 r = 0; r < rank; r++) {
      const i64 *u = parts + 4 + 8 * r, *v = u + 4;
      left[r] = (T)load(u[0], u[1], located(table, u[2], element));
      right[r] = located(table, v[2], element);
    }
  }

  __device__ __forceinline__ T there(i64 r, i64 k) const {
    const i64* v = parts + 8 + 8 * r;
    const i64 at = right[r] + k * v[3];
    return sizeof(T) == 4 ? (T)((const float*)v[0])[at] : (T)load(v[0], v[1], at);
  }

  // Of rank 1 without left, by which the largest is multiplied afterwards.
  __device__ __forceinline__ T at(i64 k) const {
    if (rank == 1) return there(0, k);
    T here = a.times(left[0], there(0, k));
    for (i64 r = 1; r < rank; r++) here = a.plus(here, a.times(left[r], there(r, k)));
    return here;
  }

  __device__ __forceinline__ T sum(T from, i64 k) const {
    for (i64 r = 0; r < rank; r++) from = a.plus(from, a.times(left[r], there(r, k)));
    return from;
  }
};

// args: length of lines, layout of an element's place on its line, step of element numbers along it,
// rank, the place of the parts (the diagonal, then left and right of every rank), step of x.
NOT_INLINED Best normalised(const i64* table, const Term& t, i64 element, bool single) {
  const i64 count = t.args[0], mine = located(table, t.args[1], element);
  const Any x = {table, t.x, located(table, t.x.layout, element), t.args[5], false};
  const LowRank<double, Arithmetic> w({single}, table, t, element);
  bool floats = t.x.kind == 0;
  for (i64 r = 0; r < w.rank; r++) floats = floats && w.parts[9 + 8 * r] == 0;
  double most;
  i64 place = count;
  if (floats) {
    const Line<float> line = {(const float*)t.x.data + x.first, x.step};
    const LowRank<float, Single> narrow(Single(), table, t, element);
    most = search<float>(Single(), line, narrow, count, mine, place);
  } else {
    most = search<double>(w.a, x, w, count, mine, place);
  }
  if (place < count && w.rank == 1) most = fabs(w.a.times(w.left[0], most));
  const double diagonal = load(w.parts[0], w.parts[1], located(table, w.parts[2], element));
  const double self = fabs(w.a.times(w.sum(diagonal, mine), x.at(mine)));
  const bool same = self == most || (self != self && most != most);
  const bool own = place == count || self > most || (self != self && most == most) ||
                   (same && mine < place);
  if (own) most = self, place = mine;
  if (most == 0) return {0.0, -1, 0.0};
  double chosen = w.sum(0, place);
  if (own) chosen = w.a.plus(chosen, diagonal);
  return {most, located(table, t.source, element) + place * t.args[2], chosen};
}

// out[i] = sum of the x[j] whose target is i. args: addresses of the targets in ascending order and
// of the j in that order, and their number.
NOT_INLINED Best scattered(const i64* table, const Term& t, i64 element) {
  const i64 *targets = (const i64*)t.args[0], *order = (const i64*)t.args[1], count = t.args[2];
  i64 low = 0, high = count, most = -1, place = count;
  while (low < high) {
    const i64 middle = (low + high) / 2;
    if (targets[middle] < element) low = middle + 1;
    else high = middle;
  }
  for (i64 k = low + threadIdx.x % LANES; k < count && targets[k] == element; k += LANES) {
    const i64 size = sized(load(t.x.data, t.x.kind, located(table, t.x.layout, order[k])));
    if (size > most) most = size, place = k;
  }
  join(most, place);
  if (most <= 0) return {0.0, -1, 0.0};
  return {number(most), order[place], 1.0};
}

NOT_INLINED i64 moved(const i64* table, const Term& t, i64 element) {
  if (t.kind == TABLE) return ((const i64*)t.args[0])[element];
  if (t.kind == MOVE) return located(table, t.source, element);
  const i64 inner = t.args[0], size = t.args[1], whole = t.args[2], start = t.args[3];
  const i64 outer = quotient(element, inner), block = quotient(outer, whole);
  const i64 along = outer - block * whole - start;
  if (along < 0 || along >= size) return -1;
  return (block * size + along) * inner + element - outer * inner;
}

// The largest contribution of one term to an element. `alone`: where the element is only moved,
// its size is not asked for.
NOT_INLINED Best offered(const i64* table, const Term& t, i64 element, bool alone, bool single) {
  if (t.kind == SUM) return summed(table, t, element, single);
  if (t.kind == NORMALISE) return normalised(table, t, element, single);
  if (t.kind == SCATTER) return scattered(table, t, element);
  Best found = {0.0, element, 1.0};
  if (t.kind != SCALE) {
    found.source = moved(table, t, element);
    if (alone || found.source < 0) return found;
  }
  double x = load(t.x.data, t.x.kind, located(table, t.x.layout, found.source));
  if (t.kind == SCALE) {
    found.weight = t.w.data ? load(t.w.data, t.w.kind, located(table, t.w.layout, element))
                            : __longlong_as_double(t.w.layout);
    const Arithmetic a = {single};
    x = a.times(t.w.kind == 1 ? found.weight : (double)(float)found.weight, x);
  }
  found.value = fabs(x);
  if (found.value == 0) found.source = -1;
  return found;
}

// A size times a power of two, in steps that are within the range of float32, as it is rounded.
__device__ __forceinline__ double shifted(double size, i64 shift, bool single) {
  if (shift < -4096) shift = -4096;
  const Arithmetic a = {single};
  while (shift) {
    const int step = shift < -96 ? -96 : (int)shift;
    size = a.times(size, ldexp(1.0, step));
    shift -= step;
  }
  return size;
}

// The choice among the terms of a node, and the node that it leads to.
NOT_INLINED Best chosen(const i64* table, const Node& node, i64 element, i64& next) {
  const bool alone = node.terms == 1;
  Best best = {-1.0, -1, 0.0};
  const i64* list = table + node.first;
  for (i64 k = 0; k < node.terms; k++) {
    const Term& t = *(const Term*)(table + list[k]);
    const bool single = !(t.x.data && t.x.kind == 1) && t.w.kind != 1;
    Best here = offered(table, t, element, alone, single);
    if (!alone) {
      if (t.total.data && here.value != 0)
        here.value = fabs(load(t.total.data, t.total.kind,
                               located(table, t.total.layout, element)));
      here.value = shifted(here.value, t.shift, single);
      if (k && !(here.value > best.value) && !(here.value != here.value && best.value == best.value))
        continue;
    }
    best = here;
    next = t.next;
  }
  return best;
}

#define NOT_WHOLE (-(1LL << 40))

#define FOUR_BLOCKS 256, 4  // threads per block, and at least so many blocks, for more warps

KERNEL(FOUR_BLOCKS, follow, Follow) {
  const i64 path = (i64)blockIdx.x * 8 + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (path >= c.n) return;
  i64 at = c.starts[2 * path], element = c.starts[2 * path + 1], exponent = 0;
  double mantissa = 1.0;
  i64 set[MAX_WORDS] = {0};
  bool whole = false, first = true;
  for (;;) {
    const Node& node = *(const Node*)(c.table + at);
    if (first && node.gradient.data && lane == 0)
      c.gradient[path] = load(node.gradient.data, node.gradient.kind,
                                      located(c.table, node.gradient.layout, element));
    for (int w = 0; w < MAX_WORDS && w * 32 + lane < c.words; w++) {
      const i64 word = w * 32 + lane;
      if (node.bits) set[w] |= c.table[node.bits + word];
      if (node.slices) {
        const i64* slices = c.table + node.slices;  // step, size, then a row of words for each
        const i64 number = quotient(element, slices[0]);
        set[w] |= slices[2 + (number - quotient(number, slices[1]) * slices[1]) * c.words + word];
      }
    }
    if (!node.terms) {  // the root
      const double seed = load(node.gradient.data, node.gradient.kind,
                                       located(c.table, node.gradient.layout, element));
      int power = 0;
      mantissa = frexp(mantissa * seed, &power);
      exponent += power;
      whole = !first;
      if (seed != 0 && lane == 0) set[0] |= 1;
      break;
    }
    const Best best = chosen(c.table, node, element, at);
    if (best.source < 0) break;
    element = best.source;
    int power = 0;
    mantissa = frexp(mantissa * best.weight, &power);
    exponent += power;
    first = false;
  }
  for (int w = 0; w < MAX_WORDS && w * 32 + lane < c.words; w++)
    c.sets[path * c.words + w * 32 + lane] = set[w];
  if (lane == 0) {
    c.mantissa[path] = mantissa;
    c.exponent[path] = whole ? exponent : NOT_WHOLE;
  }
}
