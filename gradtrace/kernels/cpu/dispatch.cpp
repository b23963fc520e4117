// Selects the instruction set: the widest that this processor supports, or the one requested.
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "contract.h"
#include "threads.h"

namespace gradtrace {

namespace {

const Machine* const MACHINES[] = {  // best last
    &generic_machine,
#if defined(__aarch64__)
    &neon_machine,
#elif defined(__x86_64__)
    &avx2_machine,
    &avx512_machine,
#endif
};

const Machine* best() {
  const char* wanted = std::getenv("GRADTRACE_ISA");
  const Machine* out = &generic_machine;
  for (const Machine* one : MACHINES) {
    if (!one->runs()) continue;
    if (wanted && !std::strcmp(wanted, one->name)) return one;
    out = one;
  }
  return out;
}

std::atomic<const Machine*>& chosen() {
  static std::atomic<const Machine*> one{best()};
  return one;
}

}  // namespace

const Machine& machine() { return *chosen().load(std::memory_order_relaxed); }

}  // namespace gradtrace

// The name of the n-th instruction set that this processor supports; null after the last.
GRADTRACE_API const char* gradtrace_isa(int n) {
  for (const gradtrace::Machine* one : gradtrace::MACHINES) {
    if (one->runs() && n-- == 0) return one->name;
  }
  return nullptr;
}

GRADTRACE_API const char* gradtrace_current_isa() { return gradtrace::machine().name; }

// Use the named instruction set from now on; returns whether this processor supports it.
GRADTRACE_API int gradtrace_use_isa(const char* name) {
  for (const gradtrace::Machine* one : gradtrace::MACHINES) {
    if (one->runs() && !std::strcmp(name, one->name)) {
      gradtrace::chosen().store(one, std::memory_order_relaxed);
      return 1;
    }
  }
  return 0;
}
