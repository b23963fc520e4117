// The contraction for x86 with AVX-512.
#include "contract.h"
#if defined(__x86_64__)
#include <immintrin.h>

namespace gradtrace {
namespace avx512 {
#define GRADTRACE_AVX512
#include "contract_lanes.h"
#include "low_rank.h"
#include "contract_rows.h"
#include "magnitudes.h"
}  // namespace avx512

static bool runs() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq"); }
const Machine avx512_machine = {"avx512", runs, &avx512::kernels<float>, &avx512::kernels<double>, avx512::magnitudes};

}  // namespace gradtrace
#endif
