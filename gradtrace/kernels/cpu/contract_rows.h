// The contraction in one instruction set. Included once in each contract_<set>.cpp, inside its
// namespace. Uses no templates of the standard library: the linker keeps one copy of each, which
// could be one with instructions that the processor lacks.

// ---- packing --------------------------------------------------------------------------------------

struct Half {
  uint16_t bits;
};
struct Brain {
  uint16_t bits;
};

INLINE float number(float x) { return x; }
INLINE double number(double x) { return x; }
INLINE int32_t number(int32_t x) { return x; }
INLINE float from_bits(uint32_t bits) {
  float out;
  __builtin_memcpy(&out, &bits, sizeof out);
  return out;
}
INLINE float number(Brain x) { return from_bits(static_cast<uint32_t>(x.bits) << 16); }
INLINE float number(Half x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00u) return from_bits(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  // The exponent is that of float minus 112; the multiplication also converts denormals.
  return from_bits(sign | rest << 13) * 0x1p112f;
}

INLINE int64_t least(int64_t x, int64_t y) { return x < y ? x : y; }

// Packs rows [row, row + rows) as |x|, [row][stride], padded with 0 from `inner` on.
template <class T, class S>
static void copy_rows(const View& x, int64_t offset, int64_t row, int64_t rows, int64_t inner,
                      int64_t stride, T* out) {
  const S* data = static_cast<const S*>(x.data) + offset;
  constexpr int64_t TILE = 16;
  if (!x.inner.table && x.inner.step == 1) {
    for (int64_t r = 0; r < rows; r++) {
      const S* from = data + x.rows(row + r);
      for (int64_t k = 0; k < inner; k++) out[r * stride + k] = size(static_cast<T>(number(from[k])));
    }
  } else {
    for (int64_t r0 = 0; r0 < rows; r0 += TILE) {
      const int64_t r1 = least(rows, r0 + TILE);
      for (int64_t k = 0; k < inner; k++) {
        const S* from = data + x.inner(k);
        for (int64_t r = r0; r < r1; r++) {
          out[r * stride + k] = size(static_cast<T>(number(from[x.rows(row + r)])));
        }
      }
    }
  }
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t k = inner; k < stride; k++) out[r * stride + k] = 0;
  }
}

// Whether all values are finite.
template <class T>
static bool all_finite(const T* x, int64_t count) {
  using V = typename Lanes<T>::V;
  V sum = {};
  int64_t i = 0;
  for (; i + Lanes<T>::W <= count; i += Lanes<T>::W) {
    const V here = load(x + i);
    sum += here - here;  // 0, or NaN from here on
  }
  T rest = 0;
  for (; i < count; i++) rest += x[i] - x[i];
  for (int w = 0; w < Lanes<T>::W; w++) rest += sum[w];
  return rest == 0;
}

template <class T>
static bool pack_rows(const View& x, int64_t batch, int64_t row, int64_t rows, int64_t inner,
                      int64_t stride, T* out) {
  const int64_t offset = x.batch(batch);
  switch (x.kind) {
    case FLOAT32: copy_rows<T, float>(x, offset, row, rows, inner, stride, out); break;
    case FLOAT64: copy_rows<T, double>(x, offset, row, rows, inner, stride, out); break;
    case FLOAT16: copy_rows<T, Half>(x, offset, row, rows, inner, stride, out); break;
    default: copy_rows<T, Brain>(x, offset, row, rows, inner, stride, out);
  }
  return all_finite(out, rows * stride);
}

// Indices of large values in each row: the largest of every COUNT-th. Rows are 0 from `inner` on,
// up to a multiple of BOUND_STEP.
template <class T, int COUNT>
static void find_some(const T* rows, int64_t count, int64_t stride, int64_t inner, uint16_t* out) {
  using V = typename Lanes<T>::V;
  using I = typename Lanes<T>::I;
  constexpr int W = Lanes<T>::W, PARTS = COUNT / W;
  const int64_t whole = inner / COUNT * COUNT;
  for (int64_t r = 0; r < count; r++, rows += stride) {
    V best[PARTS];
    I at[PARTS];
    for (int j = 0; j < PARTS; j++) best[j] = V{}, at[j] = I{};
    for (int64_t k = 0; k < whole; k += COUNT) {
      const I now = all_int<T>(k);
      for (int j = 0; j < PARTS; j++) take<true>(load(rows + k + j * W), best[j], at[j], now);
    }
    for (int j = 0; j < COUNT; j++) {
      out[r * SEEDS + j] = static_cast<uint16_t>(least(at[j / W][j % W] + j, inner - 1));
    }
  }
}

template <class T>
static void find_seeds(const T* rows, int64_t count, int64_t stride, int64_t inner, int64_t seeded,
                       uint16_t* out) {
  if (seeded == SEEDS) {
    find_some<T, SEEDS>(rows, count, stride, inner, out);
  } else {
    find_some<T, SEEDS / 2>(rows, count, stride, inner, out);
  }
}

// Packs ids with a 0 after each row: index -1 of the next row, the id of a zero value.
static void pack_ids(const View& x, int64_t batch, int64_t row, int64_t rows, int64_t inner,
                       int32_t* out) {
  copy_rows<int32_t, int32_t>(x, x.batch(batch), row, rows, inner, inner + 1, out);
}

// Packs |b| of columns [column, column + panel.columns) for k in [first, first + panel.inner).
template <class T, class S>
static void copy_panel(const View& x, int64_t offset, int64_t column, int64_t first,
                       const Panel<T>& panel) {
  constexpr int64_t WIDE = ACROSS * Lanes<T>::W;
  const S* data = static_cast<const S*>(x.data) + offset;
  const int64_t wide = panel.columns;
  T* out = panel.b;
  if (!x.rows.table && x.rows.step == 1) {
    for (int64_t k = 0; k < panel.inner; k++, out += WIDE) {
      const S* from = data + x.inner(first + k) + column;
      if (wide == WIDE) {
        for (int64_t n = 0; n < WIDE; n++) out[n] = size(static_cast<T>(number(from[n])));
      } else {
        for (int64_t n = 0; n < wide; n++) out[n] = size(static_cast<T>(number(from[n])));
        for (int64_t n = wide; n < WIDE; n++) out[n] = 0;
      }
    }
    return;
  }
  constexpr int64_t TILE = 16;
  for (int64_t k0 = 0; k0 < panel.inner; k0 += TILE) {
    const int64_t k1 = least(panel.inner, k0 + TILE);
    for (int64_t n = 0; n < wide; n++) {
      const S* from = data + x.rows(column + n);
      for (int64_t k = k0; k < k1; k++) {
        out[k * WIDE + n] = size(static_cast<T>(number(from[x.inner(first + k)])));
      }
    }
    for (int64_t n = wide; n < WIDE; n++) {
      for (int64_t k = k0; k < k1; k++) out[k * WIDE + n] = 0;
    }
  }
}

// The maximum of each k over the columns, from `begin` to `end`; `floor` gets that of each column.
template <class T>
static void measure(const Panel<T>& panel, int64_t begin, int64_t end) {
  using V = typename Lanes<T>::V;
  constexpr int W = Lanes<T>::W;
  constexpr int64_t WIDE = ACROSS * W;
  V high[ACROSS];
  UNROLL for (int j = 0; j < ACROSS; j++) high[j] = load(panel.floor + j * W);
  for (int64_t k = begin; k < end; k++) {
    V most = {};
    UNROLL for (int j = 0; j < ACROSS; j++) {
      const V here = load(panel.b + k * WIDE + j * W);
      most = larger_size(here, most);
      high[j] = larger_size(here, high[j]);
    }
    panel.top[k] = largest_of(most);
  }
  UNROLL for (int j = 0; j < ACROSS; j++) store(panel.floor + j * W, high[j]);
}

// Whether all values are finite, and which columns are 0 throughout.
template <class T>
static void conclude(Panel<T>& panel) {
  panel.finite = true;
  for (int64_t n = 0; n < ACROSS * Lanes<T>::W; n++) {
    const T most = panel.floor[n];
    panel.finite = panel.finite && most - most == 0;
    panel.floor[n] = most == 0 ? infinity<T>() : 0;
  }
  for (int64_t k = panel.inner; k % BOUND_STEP; k++) panel.top[k] = 0;
}

template <class T>
static void pack_panel(const View& x, int64_t batch, int64_t column, int64_t first,
                       Panel<T>& panel) {
  constexpr int64_t WIDE = ACROSS * Lanes<T>::W, SOME = 64;  // fits the L1 cache
  const int64_t offset = x.batch(batch);
  for (int64_t n = 0; n < WIDE; n++) panel.floor[n] = 0;
  for (int64_t k = 0; k < panel.inner; k += SOME) {
    Panel<T> some = panel;
    some.b += k * WIDE;
    some.inner = least(SOME, panel.inner - k);
    switch (x.kind) {
      case FLOAT32: copy_panel<T, float>(x, offset, column, first + k, some); break;
      case FLOAT64: copy_panel<T, double>(x, offset, column, first + k, some); break;
      case FLOAT16: copy_panel<T, Half>(x, offset, column, first + k, some); break;
      default: copy_panel<T, Brain>(x, offset, column, first + k, some);
    }
    measure(panel, k, k + some.inner);
  }
  conclude(panel);
}

// ---- which k survive ------------------------------------------------------------------------------

// For each byte the positions of its set bits, and their number.
struct Places {
  alignas(16) uint16_t at[256][8];
  uint8_t count[256];
};
constexpr Places make_places() {
  Places out{};
  for (int byte = 0; byte < 256; byte++) {
    for (int bit = 0; bit < 8; bit++) {
      if (byte >> bit & 1) out.at[byte][out.count[byte]++] = static_cast<uint16_t>(bit);
    }
  }
  return out;
}
static constexpr Places places = make_places();

typedef uint16_t Eight __attribute__((vector_size(16)));
typedef uint16_t LooseEight __attribute__((vector_size(16), aligned(2), may_alias));

INLINE int64_t append(unsigned byte, int64_t k, uint16_t* to) {
  const uint16_t base = static_cast<uint16_t>(k);
  const Eight start = {base, base, base, base, base, base, base, base};
  *reinterpret_cast<LooseEight*>(to) = *reinterpret_cast<const Eight*>(places.at[byte]) + start;
  return places.count[byte];
}

// Writes the k with a[k] · top[k] not less than the bound, ascending; up to 8 entries after them
// are overwritten.
template <class T>
static int64_t survivors(const T* a, const Panel<T>& panel, T bound, uint16_t* list) {
  const typename Lanes<T>::V least_needed = all<T>(bound);
  int64_t count = 0;
  for (int64_t k = 0; k < panel.inner; k += BOUND_STEP) {
    const unsigned bits = not_less(a + k, panel.top + k, least_needed);
    count += append(bits & 255, k, list + count);
    count += append(bits >> 8, k + 8, list + count);
  }
  return count;
}

// The smallest positive number.
INLINE float tiniest(float) { return 0x1p-149f; }
INLINE double tiniest(double) { return 0x1p-1074; }

// The minimum over the columns, except those of zeros, of a lower bound of their maxima: the larger
// of the maximum so far and the products of the seeds.
template <class T, bool FINITE>
static T lower_bound(const T* a, const uint16_t* seeds, int64_t seeded, const T* known,
                     const Panel<T>& panel) {
  using V = typename Lanes<T>::V;
  constexpr int W = Lanes<T>::W;
  const auto more = [](V x, V y) {
    if constexpr (FINITE) {
      return larger(x, y);
    } else {
      return x > y ? x : y;  // y if x is NaN; y never is NaN
    }
  };
  V low[ACROSS];
  UNROLL for (int j = 0; j < ACROSS; j++) low[j] = more(load(known + j * W), load(panel.floor + j * W));
  for (int64_t s = 0; s < seeded; s++) {
    const T* b = panel.b + seeds[s] * (ACROSS * W);
    const T x = a[seeds[s]];
    UNROLL for (int j = 0; j < ACROSS; j++) low[j] = more(load(b + j * W) * x, low[j]);
  }
  UNROLL for (int j = 1; j < ACROSS; j++) low[0] = smaller(low[j], low[0]);
  const T out = smallest_of(low[0]);
  const T tiny = tiniest(out);
  return out > tiny ? out : tiny;
}

// ---- products -------------------------------------------------------------------------------------

constexpr int GROUP = 4;

template <class T>
struct Line {
  const T* a;
  const T* b;  // [k][column]
  const uint16_t* list;
  int64_t count;
  T* value;        // [column]
  int32_t* index;  // or null
  int64_t columns, first;
};

template <class T, int N, bool FINITE>
static void keep_place(const Line<T>& line) {
  using V = typename Lanes<T>::V;
  using I = typename Lanes<T>::I;
  constexpr int W = Lanes<T>::W;
  constexpr int64_t WIDE = ACROSS * W;
  V v[N];
  I at[N];
  UNROLL for (int j = 0; j < N; j++) v[j] = load(line.value + j * W), at[j] = all_int<T>(-1);
  for (int64_t t = 0; t < line.count; t++) {
    const int64_t k = line.list[t];
    const T* b = line.b + k * WIDE;
    const T x = line.a[k];
    const I now = all_int<T>(k);
    UNROLL for (int j = 0; j < N; j++) take<FINITE>(load(b + j * W) * x, v[j], at[j], now);
  }
  UNROLL for (int j = 0; j < N; j++) store(line.value + j * W, v[j]);
  typename Lanes<T>::Int place[N * W];
  __builtin_memcpy(place, at, sizeof place);
  for (int64_t n = 0; n < N * W; n++) {
    const int32_t before = line.index[n], found = static_cast<int32_t>(line.first + place[n]);
    line.index[n] = place[n] < 0 ? before : found;
  }
}

// The maximum of GROUP products for each column.
template <class T, bool FINITE>
INLINE typename Lanes<T>::V of_group(const T* const* b, const T* x, int64_t at) {
  using V = typename Lanes<T>::V;
  const V p = load(b[0] + at) * x[0], q = load(b[1] + at) * x[1];
  const V r = load(b[2] + at) * x[2], s = load(b[3] + at) * x[3];
  if constexpr (FINITE) {
    return larger(larger(p, q), larger(r, s));
  } else {
    return larger_or_nan(larger_or_nan(p, q), larger_or_nan(r, s));
  }
}

// The first k of the group whose product equals the maximum (NaN for NaN).
template <class T, bool FINITE>
INLINE int64_t first_in_group(const Line<T>& line, const uint16_t* group, T value, int64_t n) {
  constexpr int64_t WIDE = ACROSS * Lanes<T>::W;
  int64_t k = group[GROUP - 1];
  UNROLL for (int g = GROUP - 2; g >= 0; g--) {
    const T product = line.a[group[g]] * line.b[group[g] * WIDE + n];
    const bool same = product == value || (!FINITE && product != product && value != value);
    k = same ? group[g] : k;
  }
  return k;
}

// The list must be padded to a multiple of GROUP.
template <class T, int N, bool FINITE, bool INDEX>
static void keep_group(const Line<T>& line) {
  using V = typename Lanes<T>::V;
  using I = typename Lanes<T>::I;
  constexpr int W = Lanes<T>::W;
  constexpr int64_t WIDE = ACROSS * W;
  V v[N];
  I at[N];
  UNROLL for (int j = 0; j < N; j++) v[j] = load(line.value + j * W), at[j] = all_int<T>(-1);
  for (int64_t t = 0; t < line.count; t += GROUP) {
    const T* b[GROUP];
    T x[GROUP];
    UNROLL for (int g = 0; g < GROUP; g++) {
      b[g] = line.b + line.list[t + g] * WIDE;
      x[g] = line.a[line.list[t + g]];
    }
    const I now = all_int<T>(t);
    UNROLL for (int j = 0; j < N; j++) {
      const V m = of_group<T, FINITE>(b, x, j * W);
      if constexpr (INDEX) {
        take<FINITE>(m, v[j], at[j], now);
      } else {
        v[j] = FINITE ? larger(m, v[j]) : larger_or_nan(v[j], m);
      }
    }
  }
  UNROLL for (int j = 0; j < N; j++) store(line.value + j * W, v[j]);
  if constexpr (INDEX) {
    typename Lanes<T>::Int place[N * W];
    __builtin_memcpy(place, at, sizeof place);
    for (int64_t n = 0; n < line.columns; n++) {
      if (place[n] < 0) continue;
      const int64_t k = first_in_group<T, FINITE>(line, line.list + place[n], line.value[n], n);
      line.index[n] = static_cast<int32_t>(line.first + k);
    }
  }
}

template <class T, int N, bool FINITE>
static void products(const Line<T>& line) {
  if (!line.index) {
    keep_group<T, N, FINITE, false>(line);
  } else if (line.count <= SHORT) {
    keep_place<T, N, FINITE>(line);
  } else {
    keep_group<T, N, FINITE, true>(line);
  }
}

template <class T, bool FINITE>
static void products_of(const Line<T>& line) {
  constexpr int W = Lanes<T>::W;
  if (line.columns <= W) {
    products<T, 1, FINITE>(line);
  } else if (line.columns <= 2 * W) {
    products<T, 2, FINITE>(line);
  } else if (ACROSS == 4 || line.columns <= 4 * W) {
    products<T, 4, FINITE>(line);
  } else {
    products<T, ACROSS, FINITE>(line);
  }
}

// Writes the results of one row.
template <class T>
static void write_results(const Rows<T>& rows, int64_t r, int64_t columns) {
  const T* value = rows.value + r * rows.step;
  if (rows.out_value) __builtin_memcpy(rows.out_value + r * rows.pitch, value, columns * sizeof(T));
  if (!rows.index) return;
  const int32_t* index = rows.index + r * rows.step;
  if (rows.out_index) {
    for (int64_t n = 0; n < columns; n++) {
      rows.out_index[r * rows.pitch + n] = index[n] < 0 ? 0 : index[n];
    }
  }
  if (rows.out_ids) {
    const int64_t step = rows.by_column ? rows.ids_step : 0;
    pick(rows.ids + (step ? 0 : r * rows.ids_step), step, index, columns, rows.out_ids + r * rows.pitch);
  }
}

// Two rows of every RUN are always pruned; if many k survive, the others are computed without
// bounds.
constexpr int64_t RUN = 32, TRIED = 2;

template <class T>
static void run(const Panel<T>& panel, Rows<T>& rows) {
  constexpr int64_t WIDE = ACROSS * Lanes<T>::W;
  uint16_t list[PANEL_MAX_K + BOUND_STEP], every[PANEL_MAX_K + BOUND_STEP];
  for (int64_t k = 0; k < panel.inner; k++) every[k] = static_cast<uint16_t>(k);
  const bool finite = rows.finite && panel.finite;
  int64_t seen = 0;
  for (int64_t r = 0; r < rows.rows; r++) {
    const T* a = rows.a + r * rows.stride;
    Line<T> line{a, panel.b, every, panel.inner, rows.value + r * rows.step,
                 rows.index ? rows.index + r * rows.step : nullptr, panel.columns, rows.first};
    if (!rows.first) {
      for (int64_t n = 0; n < WIDE; n++) line.value[n] = 0;
      for (int64_t n = 0; line.index && n < WIDE; n++) line.index[n] = -1;
    }
    if (r % RUN == 0) seen = 0;
    const bool much = r % RUN >= TRIED && seen > TRIED * panel.inner * 3 / 4;
    if (rows.algorithm == PRUNED || (rows.algorithm == BY_MEASURE && !much)) {
      const uint16_t* seeds = rows.seeds + r * SEEDS;
      const int64_t seeded = rows.first ? 0 : rows.seeded;
      const T bound = finite ? lower_bound<T, true>(a, seeds, seeded, line.value, panel)
                             : lower_bound<T, false>(a, seeds, seeded, line.value, panel);
      line.list = list;
      line.count = survivors(a, panel, bound, list);
      if (r % RUN < TRIED) seen += line.count;
      rows.survived += line.count;
      rows.considered += panel.inner;
    }
    if (line.count) {
      uint16_t* end = (line.list == list ? list : every) + line.count;
      for (int64_t t = line.count; t % GROUP; t++) *end++ = line.list[line.count - 1];
      finite ? products_of<T, true>(line) : products_of<T, false>(line);
    }
    if (rows.last) write_results(rows, r, panel.columns);
  }
}

// ---- few rows -------------------------------------------------------------------------------------

// Several k at once for one row, with b[k] read in place: updates value and index of each column.
template <class T, int COUNT>
static void sweep(const T* const* b, const T* x, int64_t k, int64_t columns, T* value,
                  typename Lanes<T>::Int* place) {
  using V = typename Lanes<T>::V;
  using I = typename Lanes<T>::I;
  constexpr int W = Lanes<T>::W;
  int64_t n = 0;
  for (; n + W <= columns; n += W) {
    V v = load(value + n);
    I at = load_int<T>(place + n);
    UNROLL for (int j = 0; j < COUNT; j++) {
      take<false>(size(load(b[j] + n)) * x[j], v, at, all_int<T>(k + j));
    }
    store(value + n, v);
    store_int<T>(place + n, at);
  }
  for (; n < columns; n++) {
    for (int j = 0; j < COUNT; j++) {
      const T p = size(b[j][n]) * x[j];
      if (!(p <= value[n]) && value[n] == value[n]) value[n] = p, place[n] = k + j;
    }
  }
}

// At most UNPACKED_MAX_ROWS rows and UNPACKED_COLUMNS columns; b is read once and not packed, since
// its columns are contiguous.
template <class T>
static void few(const View& x, int64_t batch, int64_t column, int64_t columns, int64_t inner,
                const Rows<T>& rows) {
  constexpr int64_t GO = 4;
  T value[UNPACKED_MAX_ROWS][UNPACKED_COLUMNS];
  typename Lanes<T>::Int place[UNPACKED_MAX_ROWS][UNPACKED_COLUMNS];
  __builtin_memset(value, 0, sizeof value);
  __builtin_memset(place, -1, sizeof place);
  const T* data = static_cast<const T*>(x.data) + x.batch(batch) + column;
  for (int64_t k = 0; k < inner; k += GO) {
    const T* b[GO];
    const int64_t count = least(GO, inner - k);
    for (int64_t j = 0; j < count; j++) b[j] = data + x.inner(k + j);
    for (int64_t r = 0; r < rows.rows; r++) {
      const T* a = rows.a + r * rows.stride + k;
      if (count == GO) {
        sweep<T, GO>(b, a, k, columns, value[r], place[r]);
        continue;
      }
      for (int64_t j = 0; j < count; j++) {
        sweep<T, 1>(b + j, a + j, k + j, columns, value[r], place[r]);
      }
    }
  }
  for (int64_t r = 0; r < rows.rows; r++) {
    __builtin_memcpy(rows.value + r * rows.step, value[r], columns * sizeof(T));
    for (int64_t n = 0; rows.index && n < columns; n++) {
      rows.index[r * rows.step + n] = static_cast<int32_t>(place[r][n]);
    }
    write_results(rows, r, columns);
  }
}

template <class T>
constexpr Kernels<T> kernels = {ACROSS * Lanes<T>::W, pack_rows<T>, pack_ids, find_seeds<T>,
                                pack_panel<T>,        run<T>,       few<T>,   low_rank<T>,
                                any_zero<T>};
