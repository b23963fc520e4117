// The product with a diagonal plus low rank, for lines that are columns of matrices (batch norm).
#include <type_traits>

#include "contract.h"
#include "threads.h"

namespace {

template <class T>
void run(const gradtrace::LowRank<T>& all, int64_t lines, int threads) {
  const auto& kernels = gradtrace::kernels_for(all.out);
  gradtrace::each(lines, threads, [&](int64_t line) { kernels.low_rank(all, line); });
}

}  // namespace

// from: address, and strides from line to line and from row to row, of the diagonal, x, the left
// and the right factors; elements of a row are side by side. If the diagonal is null, the right
// factors are sums already, one row for each line, and x is not read. Else the bytes of a row are a
// multiple of LOW_RANK_BYTES. The result is contiguous, (lines, n, columns).
GRADTRACE_API int gradtrace_low_rank(int wide, int64_t lines, int64_t n, int64_t columns, int rank,
                                     const int64_t* from, void* out, int threads) {
  const auto start = [&](auto* out) {
    using T = std::remove_pointer_t<decltype(out)>;
    const auto next = [&] {
      const gradtrace::Operand<T> found{reinterpret_cast<const T*>(from[0]), from[1], from[2]};
      from += 3;
      return found;
    };
    gradtrace::LowRank<T> all{n, columns, rank, next(), next(), {}, {}, out};
    for (int r = 0; r < rank; r++) all.left[r] = next();
    for (int r = 0; r < rank; r++) all.right[r] = next();
    gradtrace::require(!all.diagonal.data || !(columns * sizeof(T) % gradtrace::LOW_RANK_BYTES));
    run(all, lines, threads);
  };
  return gradtrace::guarded([&] {
    gradtrace::require(from && (rank == 1 || rank == 2));
    const int64_t all = gradtrace::product_of({lines, n, columns});
    gradtrace::require_places(all, {out});
    for (int k = from[0] ? 1 : 2; k < 2 + 2 * rank; k++) gradtrace::require(from[3 * k] || !all);
    if (!all) return;
    wide ? start(static_cast<double*>(out)) : start(static_cast<float*>(out));
  });
}
