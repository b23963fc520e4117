#include "threads.h"

#include <atomic>
#include <mutex>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#ifdef GRADTRACE_PORTABLE
// Wheels need no libstdc++ newer than GCC 8's, like torch's. Allocators of later headers call this
// function, which came with GCC 11; CMakeLists.txt keeps its symbol inside the library.
namespace std {
void __throw_bad_array_new_length() { throw bad_alloc(); }
}  // namespace std
// Shared pointers ask glibc 2.32 whether there is one thread: here there may be several.
extern "C" {
char __libc_single_threaded = 0;
}
#endif

namespace gradtrace {
namespace {

// Status code of the exception being handled. (std::exception_ptr would do the same, but needs
// symbols that libstdc++ has only had since GCC 11.)
int status() noexcept {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return OUT_OF_MEMORY;
  } catch (const std::logic_error&) {
    return BAD_OPERANDS;
  } catch (...) {
    return FAILED;
  }
}

void raise(int status) {
  if (status == OUT_OF_MEMORY) throw std::bad_alloc();
  if (status == BAD_OPERANDS) throw std::logic_error("bad operands");
  if (status != DONE) throw std::runtime_error("failed");
}

// GOMP_parallel of the OpenMP runtime that torch has loaded: its thread pool exists anyway, and a
// second runtime would compete with it for the cores.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
Parallel parallel = nullptr;

struct Work {
  int64_t tasks;
  const std::function<void(int64_t)>& body;
  std::atomic<int64_t> next{0};
  std::mutex lock;
  int failure = DONE;

  void run() noexcept {
    for (;;) {
      const int64_t task = next.fetch_add(1, std::memory_order_relaxed);
      if (task >= tasks) return;
      try {
        body(task);
      } catch (...) {
        const std::lock_guard<std::mutex> guard(lock);
        if (failure == DONE) failure = status();
        next.store(tasks);
        return;
      }
    }
  }
};

void start(void* work) { static_cast<Work*>(work)->run(); }

void spawn(Work& work, int threads) {
  std::vector<std::thread> others;
  try {
    for (int n = 1; n < threads; n++) others.emplace_back([&work] { work.run(); });
  } catch (...) {
    // no more threads available: the existing ones do the work
  }
  work.run();
  for (auto& other : others) other.join();
}

}  // namespace

void each(int64_t tasks, int threads, const std::function<void(int64_t)>& body) {
  if (threads <= 1 || tasks <= 1) {
    for (int64_t task = 0; task < tasks; task++) body(task);
    return;
  }
  Work work{tasks, body, {}, {}, DONE};
  const int count = static_cast<int>(tasks < threads ? tasks : threads);
  if (parallel) {
    parallel(start, &work, static_cast<unsigned>(count), 0);
  } else {
    spawn(work, count);
  }
  raise(work.failure);
}

int guarded(const std::function<void()>& body) noexcept {
  try {
    body();
    return DONE;
  } catch (...) {
    return status();
  }
}

}  // namespace gradtrace

// ABI version of this interface; the Python side rejects a library with another one.
GRADTRACE_API int gradtrace_abi() { return 8; }

GRADTRACE_API void gradtrace_use(void (*runtime)(void (*)(void*), void*, unsigned, unsigned)) {
  gradtrace::parallel = runtime;
}
