// Work shared among threads, and errors that do not leave the library.
#pragma once
#include <cstdint>
#include <functional>

#define GRADTRACE_API extern "C" __attribute__((visibility("default")))

namespace gradtrace {

enum Status : int { DONE = 0, OUT_OF_MEMORY = 1, FAILED = 2 };

// Run body(0), ..., body(tasks - 1), each once, on at most so many threads. Which thread runs which
// task is not fixed, so a result must not depend on it. Exceptions are passed on to the caller.
void each(int64_t tasks, int threads, const std::function<void(int64_t)>& body);

// What an exported function returns: exceptions end here.
int guarded(const std::function<void()>& body) noexcept;

}  // namespace gradtrace
