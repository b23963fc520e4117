// Work shared among threads, and errors that do not leave the library.
#pragma once
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <stdexcept>

#define GRADTRACE_API extern "C" __attribute__((visibility("default")))

namespace gradtrace {

enum Status : int { DONE = 0, OUT_OF_MEMORY = 1, FAILED = 2, BAD_OPERANDS = 3 };

// Run body(0), ..., body(tasks - 1), each once, on at most so many threads. Which thread runs which
// task is not fixed, so a result must not depend on it. Exceptions are passed on to the caller.
void each(int64_t tasks, int threads, const std::function<void(int64_t)>& body);

// Whatever a kernel is handed is checked before it is read; `guarded` makes BAD_OPERANDS of it.
inline void require(bool holds) {
  if (!holds) throw std::invalid_argument("operands");
}

// There are so many elements, and each of these places is one.
inline void require_places(int64_t elements, std::initializer_list<const void*> places) {
  require(elements >= 0);
  for (const void* place : places) require(place || !elements);
}

// a * b * ..., of sizes that are not negative; refused where it leaves 64 bits.
inline int64_t product_of(std::initializer_list<int64_t> sizes) {
  int64_t all = 1;
  for (const int64_t size : sizes) require(size >= 0 && !__builtin_mul_overflow(all, size, &all));
  return all;
}

// What an exported function returns: exceptions end here.
int guarded(const std::function<void()>& body) noexcept;

}  // namespace gradtrace
