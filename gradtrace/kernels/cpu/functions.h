// Exported functions that other parts of the library call; see their definitions.
#pragma once
#include <cstdint>

#include "contract.h"
#include "threads.h"

GRADTRACE_API int gradtrace_contract(gradtrace::Call* call);
GRADTRACE_API int gradtrace_merge(int wide, int64_t n, void* size, int32_t* ids, const void* value,
                                  const int32_t* other, int32_t constant, int32_t shift, int threads);
GRADTRACE_API int gradtrace_tally(int wide, int64_t n, const int32_t* ids, const void* gradient,
                                  int64_t count, int64_t* counts, double* sums, int threads);
GRADTRACE_API int gradtrace_magnitude(int wide, int64_t n, const void* gradient, int64_t* count,
                                      double* sum, int threads);
GRADTRACE_API int gradtrace_reduce(int wide, const void* x, const int32_t* ids, const int64_t* how,
                                   void* value, int32_t* out, int threads);
GRADTRACE_API int gradtrace_scatter(int wide, int64_t n, const void* x, const int32_t* ids,
                                    const int64_t* target, int64_t size, void* value, int32_t* out);
GRADTRACE_API int gradtrace_normalise(int wide, int64_t lines, int64_t n, int rank,
                                      const int64_t* from, void* value, int64_t* place, int32_t* out,
                                      int threads);
