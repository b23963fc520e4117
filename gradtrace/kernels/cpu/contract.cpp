// Driver of the (max, ×) contraction: packing of operands, and division of the work among threads.
#include "contract.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>

#include "threads.h"

namespace gradtrace {
namespace {

// Per-thread buffer that is kept for the next call.
class Scratch {
 public:
  ~Scratch() { std::free(memory); }

  template <class T>
  T* get(int64_t count) {
    const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 127) / 64 * 64;
    if (bytes > size) {
      std::free(memory);
      size = 0;
      memory = std::aligned_alloc(64, bytes);
      if (!memory) throw std::bad_alloc();
      size = bytes;
    }
    return static_cast<T*>(memory);
  }

 private:
  void* memory = nullptr;
  size_t size = 0;
};

struct ThreadScratch {
  Scratch rows, seeds, ids, panel, top, value, index, columns;
};
thread_local ThreadScratch mine;

int64_t up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

int64_t parts(int64_t x, int64_t step) { return (x + step - 1) / step; }

// Elements per block of packed rows of a: 16 MB of float.
constexpr int64_t PACKED_MAX_ELEMENTS = 4 << 20;

// With fewer k than this, pruning costs more than computing all products; without indices to
// record, products cost less.
constexpr int64_t PRUNE_MIN_K = 24, PRUNE_VALUES_MIN_K = 60;

// Products below which a second thread costs more than it saves.
constexpr int64_t SINGLE_THREAD_MAX_PRODUCTS = 1 << 17;

template <class T>
class Product {
 public:
  Product(Call& call, const Kernels<T>& kernels)
      : call(call), kernels(kernels), stride(up(call.inner, BOUND_STEP)) {
    chunk = up(parts(call.inner, parts(call.inner, PANEL_MAX_K)), BOUND_STEP);
    block = std::clamp<int64_t>(PACKED_MAX_ELEMENTS / stride, 16, 1024);
    const int64_t worth = call.index || call.out_ids ? PRUNE_MIN_K : PRUNE_VALUES_MIN_K;
    algorithm = static_cast<Algorithm>(call.algorithm);
    if (algorithm == BY_MEASURE && call.inner < worth) algorithm = DENSE;
  }

  void run() {
    const int64_t batches = call.last_batch - call.first_batch;
    const int64_t rows = call.last_row - call.first_row;
    const double work = double(batches) * rows * call.inner * call.columns;
    const int threads = work < SINGLE_THREAD_MAX_PRODUCTS ? 1 : static_cast<int>(call.threads);
    if (batches >= 2 * threads || threads == 1) {
      each(batches, threads, [&](int64_t i) { matrix(call.first_batch + i, 1); });
    } else {
      for (int64_t i = 0; i < batches; i++) matrix(call.first_batch + i, threads);
    }
    call.survived += survived;
    call.considered += considered;
  }

 private:
  struct Block {
    int64_t batch, row, rows;
    T* a;
    uint16_t* seeds;
    int32_t* ids;
    bool finite;
  };

  void matrix(int64_t batch, int threads) {
    for (int64_t row = call.first_row; row < call.last_row; row += block) {
      Block here{};
      here.batch = batch;
      here.row = row;
      here.rows = std::min(block, call.last_row - row);
      pack(here, threads);
      if (here.rows <= UNPACKED_MAX_ROWS && at_hand()) {
        each(parts(call.columns, UNPACKED_COLUMNS), threads,
             [&](int64_t task) { span(here, task * UNPACKED_COLUMNS); });
        continue;
      }
      const int64_t panels = parts(call.columns, kernels.panel);
      const int64_t pieces = std::min(parts(4 * threads, panels), parts(here.rows, 64));
      const int64_t share = parts(here.rows, threads > 1 ? pieces : 1);
      const int64_t shares = parts(here.rows, share);
      each(panels * shares, threads, [&](int64_t task) {
        const int64_t first = task % shares * share;
        panel(here, task / shares * kernels.panel, first, std::min(share, here.rows - first));
      });
    }
  }

  // With few k, fewer seeds stand out, and there is less to gain.
  int64_t seeded() const { return call.inner >= 256 ? SEEDS : SEEDS / 2; }

  void pack(Block& here, int threads) {
    here.a = mine.rows.get<T>(here.rows * stride);
    here.seeds = mine.seeds.get<uint16_t>(here.rows * SEEDS);
    const int64_t ids_step = call.inner + 1;
    const bool out_ids = call.out_ids && !call.by_column;
    if (out_ids) {
      here.ids = mine.ids.get<int32_t>(here.rows * ids_step + 1) + 1;
      here.ids[-1] = 0;
    }
    constexpr int64_t SOME = 16;
    std::atomic<bool> finite{true};
    each(parts(here.rows, SOME), threads, [&](int64_t task) {
      const int64_t first = task * SOME, count = std::min(SOME, here.rows - first);
      const int64_t row = here.row + first, inner = call.inner;
      T* a = here.a + first * stride;
      if (!kernels.pack_rows(call.a, here.batch, row, count, inner, stride, a)) finite = false;
      if (algorithm != DENSE) {
        uint16_t* seeds = here.seeds + first * SEEDS;
        kernels.find_seeds(a, count, stride, std::min(chunk, inner), seeded(), seeds);
      }
      if (out_ids) {
        int32_t* ids = here.ids + first * ids_step;
        kernels.pack_ids(call.ids, here.batch, row, count, inner, ids);
      }
    });
    here.finite = finite;
  }

  // The rows of the block from `row` on, with memory for this many columns of one row, or of each.
  Rows<T> rows_of(const Block& here, int64_t row, int64_t rows, int64_t column, int64_t wide,
                  bool each_of_them) const {
    Rows<T> some{};
    some.a = here.a + row * stride;
    some.stride = stride;
    some.rows = rows;
    some.seeds = here.seeds + row * SEEDS;
    some.seeded = seeded();
    some.finite = here.finite;
    some.algorithm = algorithm;
    some.step = each_of_them ? wide : 0;
    const int64_t kept = each_of_them ? rows * wide : wide;
    some.value = mine.value.get<T>(kept);
    some.index = call.index || call.out_ids ? mine.index.get<int32_t>(kept) : nullptr;
    const int64_t at = (here.batch * call.rows + here.row + row) * call.columns + column;
    some.out_value = call.value ? static_cast<T*>(call.value) + at : nullptr;
    some.out_index = call.index ? call.index + at : nullptr;
    some.out_ids = call.out_ids ? call.out_ids + at : nullptr;
    some.pitch = call.columns;
    some.ids_step = call.inner + 1;
    some.ids = here.ids ? here.ids + row * some.ids_step : nullptr;
    some.by_column = call.by_column;
    return some;
  }

  // Whether columns of b are contiguous and have the dtype of the products.
  bool at_hand() const {
    return !call.b.rows.table && call.b.rows.step == 1 && call.b.kind == call.kind &&
           call.algorithm == BY_MEASURE && !call.by_column;
  }

  // Contracts all rows of the block, if they are few, with a range of columns.
  void span(const Block& here, int64_t column) {
    const int64_t columns = std::min(UNPACKED_COLUMNS, call.columns - column);
    const Rows<T> some = rows_of(here, 0, here.rows, column, UNPACKED_COLUMNS, false);
    kernels.few(call.b, here.batch, column, columns, call.inner, some);
  }

  // Contracts a range of rows of the block with one panel.
  void panel(const Block& here, int64_t column, int64_t row, int64_t rows) {
    const int64_t wide = kernels.panel;
    Panel<T> panel{};
    panel.b = mine.panel.get<T>(chunk * wide);
    panel.top = mine.top.get<T>(chunk + wide);
    panel.floor = panel.top + chunk;
    panel.columns = std::min(wide, call.columns - column);
    Rows<T> some = rows_of(here, row, rows, column, wide, chunk < call.inner);
    if (call.out_ids && call.by_column) {
      int32_t* ids = mine.columns.get<int32_t>(panel.columns * some.ids_step + 1) + 1;
      ids[-1] = 0;
      kernels.pack_ids(call.ids, here.batch, column, panel.columns, call.inner, ids);
      some.ids = ids;
    }
    for (int64_t k = 0; k < call.inner; k += chunk) {
      panel.inner = std::min(chunk, call.inner - k);
      kernels.pack_panel(call.b, here.batch, column, k, panel);
      some.a = here.a + row * stride + k;
      some.first = k;
      some.last = k + chunk >= call.inner;
      kernels.run(panel, some);
    }
    survived += some.survived;
    considered += some.considered;
  }

  Call& call;
  const Kernels<T>& kernels;
  int64_t stride, chunk, block;
  Algorithm algorithm;
  std::atomic<int64_t> survived{0}, considered{0};
};

// The smallest and the largest offset along an axis of this length.
std::pair<int64_t, int64_t> ends(const Axis& axis, int64_t length) {
  if (!axis.table) return {0, (length - 1) * axis.step};
  const auto [low, high] = std::minmax_element(axis.table, axis.table + length);
  return {*low, *high};
}

// Tables come from the caller: none may point outside the data.
void check(const View& x, int64_t batches, int64_t rows, int64_t inner) {
  require(x.data && x.kind >= FLOAT32 && x.kind <= INT32);
  if (!(x.batch.table || x.rows.table || x.inner.table)) return;
  const auto [b0, b1] = ends(x.batch, batches);
  const auto [r0, r1] = ends(x.rows, rows);
  const auto [k0, k1] = ends(x.inner, inner);
  require(b0 + r0 + k0 >= 0 && b1 + r1 + k1 < x.size);
}

void contract(Call& call) {
  require(call.batches > 0 && call.rows > 0 && call.inner > 0 && call.columns > 0);
  product_of({call.batches, call.rows, call.columns, 8});  // bytes of a result, must not overflow
  product_of({call.batches, call.rows, call.inner, 8});
  product_of({call.batches, call.columns, call.inner, 8});
  require(0 <= call.first_batch && call.first_batch <= call.last_batch &&
          call.last_batch <= call.batches);
  require(0 <= call.first_row && call.first_row <= call.last_row && call.last_row <= call.rows);
  require(call.kind == FLOAT32 || call.kind == FLOAT64);
  require(call.a.kind != INT32 && call.b.kind != INT32);
  require(call.algorithm >= BY_MEASURE && call.algorithm <= PRUNED);
  check(call.a, call.batches, call.rows, call.inner);
  check(call.b, call.batches, call.columns, call.inner);
  if (call.out_ids) {
    require(call.ids.kind == INT32);
    check(call.ids, call.batches, call.by_column ? call.columns : call.rows, call.inner);
  }
  if (call.kind == FLOAT64) {
    Product<double>(call, *machine().twice).run();
  } else {
    Product<float>(call, *machine().single).run();
  }
}

}  // namespace
}  // namespace gradtrace

// Requires at least one batch, row, column and k.
GRADTRACE_API int gradtrace_contract(gradtrace::Call* call) {
  return gradtrace::guarded([&] {
    gradtrace::require(call);
    gradtrace::contract(*call);
  });
}
