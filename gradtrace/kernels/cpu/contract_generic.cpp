// The contraction for any processor.
#include "contract.h"

namespace gradtrace {
namespace generic {
#include "contract_lanes.h"
#include "low_rank.h"
#include "contract_rows.h"
#include "magnitudes.h"
}  // namespace generic

static bool runs() { return true; }
const Machine generic_machine = {"generic", runs, &generic::kernels<float>, &generic::kernels<double>, generic::magnitudes};

}  // namespace gradtrace
