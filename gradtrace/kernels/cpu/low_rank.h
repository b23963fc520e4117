// A diagonal plus low rank along the rows of a matrix, for a block of its columns; compiled once for
// each instruction set, in its namespace. See LowRank.

template <class T>
struct Block {
  static constexpr int PARTS = LOW_RANK_BYTES / BYTES, WIDTH = PARTS * Lanes<T>::W;
  typename Lanes<T>::V part[PARTS];

  INLINE Block read(const T* from) {
    Block out;
    UNROLL for (int p = 0; p < PARTS; p++) out.part[p] = load(from + p * Lanes<T>::W);
    return out;
  }
  inline __attribute__((always_inline)) void write(T* to) const {
    UNROLL for (int p = 0; p < PARTS; p++) store(to + p * Lanes<T>::W, part[p]);
  }
  inline __attribute__((always_inline)) void operator+=(const Block& other) {
    UNROLL for (int p = 0; p < PARTS; p++) part[p] += other.part[p];
  }
  inline __attribute__((always_inline)) Block operator*(const Block& other) const {
    Block out;
    UNROLL for (int p = 0; p < PARTS; p++) out.part[p] = part[p] * other.part[p];
    return out;
  }
};

// total[r] = Σᵢ right[r][i] · x[i]: 16 rows (more if there are many) in order, then as many of such
// sums. That is how torch adds up columns, so that the bits are those of its sum.
template <class T, int RANK>
static void sum_products(const LowRank<T>& all, int64_t line, int64_t column, Block<T>* total) {
  constexpr int LEVELS = 4;
  int power = 0;
  while (int64_t(1) << power < all.n) power++;
  power = power / LEVELS > 4 ? power / LEVELS : 4;
  const int64_t length = int64_t(1) << power;
  Block<T> sum[RANK][LEVELS] = {};
  for (int64_t i = 0; i < all.n;) {
    const bool whole = i + length <= all.n;
    Block<T> here[RANK] = {};
    for (const int64_t end = whole ? i + length : all.n; i < end; i++) {
      const Block<T> x = Block<T>::read(all.x.at(line, i) + column);
      UNROLL for (int r = 0; r < RANK; r++) {
        here[r] += Block<T>::read(all.right[r].at(line, i) + column) * x;
      }
    }
    for (int r = 0; r < RANK; r++) {
      if (!whole) {
        sum[r][0] = here[r];
        continue;
      }
      sum[r][1] += here[r];
      for (int level = 2; level < LEVELS; level++) {
        if (i & ((length - 1) << ((level - 1) * power))) break;
        sum[r][level] += sum[r][level - 1];
        sum[r][level - 1] = {};
      }
    }
  }
  for (int r = 0; r < RANK; r++) {
    total[r] = sum[r][0];
    for (int level = 1; level < LEVELS; level++) total[r] += sum[r][level];
  }
}

// out[i] = d[i] · x[i] + Σᵣ left[r][i] · total[r], each product rounded, in this order.
template <class T, int RANK, bool DIAGONAL>
static void low_rank_block(const LowRank<T>& all, int64_t line, int64_t column) {
  Block<T> total[RANK];
  if (DIAGONAL) {
    sum_products<T, RANK>(all, line, column, total);
  } else {
    for (int r = 0; r < RANK; r++) total[r] = Block<T>::read(all.right[r].at(line, 0) + column);
  }
  T* out = all.out + line * all.n * all.columns + column;
  for (int64_t i = 0; i < all.n; i++, out += all.columns) {
    Block<T> found = Block<T>::read(all.left[0].at(line, i) + column) * total[0];
    if (DIAGONAL) {
      Block<T> own = Block<T>::read(all.diagonal.at(line, i) + column);
      own = own * Block<T>::read(all.x.at(line, i) + column);
      own += found;
      found = own;
    }
    if (RANK == 2) found += Block<T>::read(all.left[RANK - 1].at(line, i) + column) * total[RANK - 1];
    found.write(out);
  }
}

// The columns from ``column`` on, fewer than a block, where the sums are given.
template <class T>
static void low_rank_rest(const LowRank<T>& all, int64_t line, int64_t column) {
  for (int64_t i = 0; i < all.n; i++) {
    for (int64_t c = column; c < all.columns; c++) {
      T found = all.left[0].at(line, i)[c] * all.right[0].at(line, 0)[c];
      if (all.rank == 2) found += all.left[1].at(line, i)[c] * all.right[1].at(line, 0)[c];
      all.out[(line * all.n + i) * all.columns + c] = found;
    }
  }
}

template <class T>
static void low_rank(const LowRank<T>& all, int64_t line) {
  const bool diagonal = all.diagonal.data;
  const auto block = all.rank == 2 ? (diagonal ? low_rank_block<T, 2, true> : low_rank_block<T, 2, false>)
                                   : (diagonal ? low_rank_block<T, 1, true> : low_rank_block<T, 1, false>);
  int64_t column = 0;
  for (; column + Block<T>::WIDTH <= all.columns; column += Block<T>::WIDTH) block(all, line, column);
  if (column < all.columns) low_rank_rest(all, line, column);
}

// Whether any of some numbers is 0.
template <class T>
static bool any_zero(const T* x, int64_t n) {
  typename Lanes<T>::Int any = 0;
  for (int64_t k = 0; k < n; k++) any |= -typename Lanes<T>::Int(x[k] == 0);
  return any;
}
