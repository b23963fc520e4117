// The contraction for 64-bit Arm.
#include "contract.h"
#if defined(__aarch64__)
#include <arm_neon.h>

namespace gradtrace {
namespace neon {
#define GRADTRACE_NEON
#include "contract_lanes.h"
#include "low_rank.h"
#include "contract_rows.h"
#include "magnitudes.h"
}  // namespace neon

static bool runs() { return true; }
const Machine neon_machine = {"neon", runs, &neon::kernels<float>, &neon::kernels<double>, neon::magnitudes};

}  // namespace gradtrace
#endif
