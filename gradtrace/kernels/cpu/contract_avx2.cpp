// The contraction for x86 with AVX2.
#include "contract.h"
#if defined(__x86_64__)
#include <immintrin.h>

namespace gradtrace {
namespace avx2 {
#define GRADTRACE_AVX2
#include "contract_lanes.h"
#include "low_rank.h"
#include "contract_rows.h"
#include "magnitudes.h"
}  // namespace avx2

static bool runs() { return __builtin_cpu_supports("avx2"); }
const Machine avx2_machine = {"avx2", runs, &avx2::kernels<float>, &avx2::kernels<double>, avx2::magnitudes};

}  // namespace gradtrace
#endif
