// The (max, ×) contraction: out[m, n] = maxₖ |a[m, k] · b[n, k]|, and the k that attains it.
//
// Rows of a are packed as |a|; columns of b in panels, |b| by k, with the largest entry `top[k]` of
// each k. Rounding is monotone, so |a·b| ≤ a · top[k] holds for the rounded products of every
// column of the panel. A k whose bound is less than a lower bound of every column's maximum can
// neither win nor tie and is pruned; products are computed for the surviving k, in ascending order.
// Where most survive, the bounds are skipped.
#pragma once
#include <cstdint>

namespace gradtrace {

enum Kind : int64_t { FLOAT32 = 0, FLOAT64 = 1, FLOAT16 = 2, BFLOAT16 = 3, INT32 = 4 };

// Offsets along one dimension: table[i], or i · step without a table.
struct Axis {
  const int64_t* table;
  int64_t step;

  __attribute__((always_inline)) int64_t operator()(int64_t i) const {
    return table ? table[i] : i * step;
  }
};

// x[i, r, k] = data[batch(i) + rows(r) + inner(k)]
struct View {
  const void* data;
  int64_t kind;
  int64_t size;  // readable elements from data on, if there are tables; else 0
  Axis batch, rows, inner;
};

enum Algorithm : int64_t { BY_MEASURE = 0, DENSE = 1, PRUNED = 2 };

// The arguments, 8 bytes each, which Python passes as one array. Results are contiguous, of shape
// (batches, rows, columns); null if not requested.
struct Call {
  View a, b, ids;
  int64_t batches, rows, inner, columns;
  int64_t kind;  // of the products: FLOAT32 or FLOAT64
  void* value;
  int64_t* index;
  int32_t* out_ids;
  int64_t first_batch, last_batch, first_row, last_row;  // the requested part
  int64_t threads, algorithm;
  int64_t by_column;  // whether ids belong to b; then their rows are its columns
  int64_t survived, considered;  // incremented: k that survived pruning, and all k
};

constexpr int64_t BOUND_STEP = 16;          // k that are compared with the bound at a time
constexpr int64_t PANEL_MAX_K = 1024;       // limited by the cache and by 16-bit indices
constexpr int64_t SEEDS = 32;               // the most k of a row that give the first lower bound
constexpr int64_t UNPACKED_MAX_ROWS = 2;    // up to so many rows, nothing is packed
constexpr int64_t UNPACKED_COLUMNS = 1024;  // columns that those rows are contracted with at a time

// A group of columns, packed: [k][Kernels::panel].
template <class T>
struct Panel {
  T* b;      // 0 in padding columns
  T* top;    // [k] the largest of the columns; 0 from `inner` to the next multiple of BOUND_STEP
  T* floor;  // [column] infinity where the whole column is 0, else 0
  int64_t columns, inner;
  bool finite;
};

// State of contracting rows with one panel: maxima so far, and where results go after the last k.
template <class T>
struct Rows {
  const T* a;  // |a|, [row][stride]
  int64_t stride, rows;
  const uint16_t* seeds;  // [row][SEEDS]
  int64_t seeded;         // number of seeds per row
  int64_t first;          // the first k of the panel
  bool last, finite;      // whether these are the last k; whether all a are finite
  Algorithm algorithm;
  T* value;        // [row][panel], maxima so far
  int32_t* index;  // likewise, -1 while the value is 0; null if not requested
  int64_t step;    // stride of rows; 0 if the panel has all k, so that nothing is kept
  T* out_value;    // [row][pitch], each null if not requested
  int64_t* out_index;
  int32_t* out_ids;
  int64_t pitch;
  const int32_t* ids;  // [row][ids_step], 0 at index -1; or [column] of the panel
  bool by_column;
  int64_t ids_step;
  int64_t survived, considered;
};

// x[line, row, column] = data[line · line stride + row · row stride + column]
template <class T>
struct Operand {
  const T* data;
  int64_t line, row;

  __attribute__((always_inline)) const T* at(int64_t l, int64_t r) const {
    return data + l * line + r * row;
  }
};

constexpr int64_t LOW_RANK_BYTES = 128;  // of the columns whose sums are computed at a time

// out[i, c] = d[i, c] · x[i, c] + Σᵣ left[r][i, c] · Σⱼ right[r][j, c] · x[j, c] for the rows i of
// each line; without the first term, and with the sums given, if the diagonal is null.
template <class T>
struct LowRank {
  int64_t n, columns;
  int rank;
  Operand<T> diagonal, x, left[2], right[2];
  T* out;
};

template <class T>
struct Kernels {
  int64_t panel;  // columns in a panel
  bool (*pack_rows)(const View&, int64_t batch, int64_t row, int64_t rows, int64_t inner,
                    int64_t stride, T* out);
  void (*pack_ids)(const View&, int64_t batch, int64_t row, int64_t rows, int64_t inner,
                     int32_t* out);
  void (*find_seeds)(const T* rows, int64_t count, int64_t stride, int64_t inner, int64_t seeded,
                     uint16_t* out);
  void (*pack_panel)(const View&, int64_t batch, int64_t column, int64_t first, Panel<T>&);
  void (*run)(const Panel<T>&, Rows<T>&);
  void (*few)(const View&, int64_t batch, int64_t column, int64_t columns, int64_t inner,
              const Rows<T>&);
  void (*low_rank)(const LowRank<T>&, int64_t line);
  bool (*any_zero)(const T* x, int64_t n);
};

// The smallest nonzero |x| of some floats, as bits minus one; the largest, as bits; how many are 0;
// their sum, and that of their squares.
struct Magnitudes {
  uint32_t least;
  int32_t most;
  int64_t zeros;
  double sum, squares;
};

// Kernels of one compiled instruction set.
struct Machine {
  const char* name;
  bool (*runs)();  // whether this processor supports it
  const Kernels<float>* single;
  const Kernels<double>* twice;
  void (*magnitudes)(const float* x, int64_t n, Magnitudes*);  // n: a multiple of 8, at most 1024
};

extern const Machine generic_machine, neon_machine, avx2_machine, avx512_machine;

const Machine& machine();  // the one in use

// Its kernels for numbers of this type.
inline const Kernels<float>& kernels_for(const float*) { return *machine().single; }
inline const Kernels<double>& kernels_for(const double*) { return *machine().twice; }

}  // namespace gradtrace
