// Parallel loops, argument checks, and conversion of exceptions to status codes.
#pragma once
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <stdexcept>

#define GRADTRACE_API extern "C" __attribute__((visibility("default")))

namespace gradtrace {

enum Status : int { DONE = 0, OUT_OF_MEMORY = 1, FAILED = 2, BAD_OPERANDS = 3 };

// Run body(0), ..., body(tasks - 1), each once, on at most `threads` threads. Which thread runs
// which task is not fixed, so a result must not depend on it. Exceptions are passed on to the
// caller.
void each(int64_t tasks, int threads, const std::function<void(int64_t)>& body);

// Kernels check their arguments before reading them; `guarded` turns a failure into BAD_OPERANDS.
inline void require(bool holds) {
  if (!holds) throw std::invalid_argument("operands");
}

// Checks that the number of elements is not negative and, unless it is 0, that no pointer is null.
inline void require_places(int64_t elements, std::initializer_list<const void*> places) {
  require(elements >= 0);
  for (const void* place : places) require(place || !elements);
}

// a * b * ... of nonnegative sizes; fails on overflow of 64 bits.
inline int64_t product_of(std::initializer_list<int64_t> sizes) {
  int64_t all = 1;
  for (const int64_t size : sizes) require(size >= 0 && !__builtin_mul_overflow(all, size, &all));
  return all;
}

// Runs the body of an exported function and returns its status code; exceptions do not leave it.
int guarded(const std::function<void()>& body) noexcept;

}  // namespace gradtrace
