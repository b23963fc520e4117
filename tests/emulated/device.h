// As much of CUDA as gradtrace's kernels use, for a processor: so that they can be tried where there
// is no GPU. Blocks run one after the other. The threads of a block are fibers on stacks of their own,
// which hand over to the next where a GPU's would wait for one another: at barriers, and where the
// lanes of a warp exchange numbers. Waiting for a thread that has ended is an error.
#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ucontext.h>
#include <vector>

#define EMULATED
#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__ __restrict
#define DYNAMIC(type, name) type* name = (type*)emulated::dynamic.data()
#define RECOMPUTE(x)
#define COMMIT
#define AWAIT(n)

struct dim3 {
  unsigned x, y, z;
};
struct float4 {
  float x, y, z, w;
};
struct int4 {
  int x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

static dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {

enum State { READY, AT_BARRIER, AT_WARP, DONE };

struct Fiber {
  std::jmp_buf here;
  ucontext_t start;
  std::vector<char> stack;
  dim3 place;  // threadIdx
  State state = DONE;
  bool started = false;
  unsigned mask = 0;  // of the lanes that are waited for
  int turn = 0;       // of two buffers, so that the quick do not overwrite what the slow still read
};

struct Warp {
  uint64_t given[2][32];
};

static std::vector<char> dynamic;
static std::vector<Fiber*> fibers;
static std::vector<Warp> warps;
static std::jmp_buf scheduler;
static int current = -1, threads = 0;
static int any[2], barrier = 0;
static const char* fault = nullptr;
static void (*body)(const void*) = nullptr;
static const void* words = nullptr;

inline void yield(State state) {
  Fiber& me = *fibers[current];
  me.state = state;
  if (!_setjmp(me.here)) _longjmp(scheduler, 1);
}

static void live() {
  for (;;) {
    body(words);
    yield(DONE);
  }
}

inline void resume(int thread) {
  Fiber& fiber = *fibers[thread];
  current = thread;
  threadIdx = fiber.place;
  if (_setjmp(scheduler)) return;
  if (fiber.started) _longjmp(fiber.here, 1);
  fiber.started = true;
  fiber.stack.resize(1 << 17);
  getcontext(&fiber.start);
  fiber.start.uc_stack.ss_sp = fiber.stack.data();
  fiber.start.uc_stack.ss_size = fiber.stack.size();
  fiber.start.uc_link = nullptr;
  makecontext(&fiber.start, live, 0);
  setcontext(&fiber.start);
}

// Give a number to the other lanes, and wait until all of them have given theirs.
inline const uint64_t* exchange(unsigned mask, uint64_t number) {
  Fiber& me = *fibers[current];
  Warp& warp = warps[current / 32];
  const int turn = me.turn;
  me.turn ^= 1;
  me.mask = mask;
  warp.given[turn][current % 32] = number;
  yield(AT_WARP);
  return warp.given[turn];
}

// Whether some could go on.
inline bool release() {
  bool moved = false;
  for (int w = 0; w < threads; w += 32) {
    unsigned waiting = 0;
    for (int l = 0; l < 32 && w + l < threads; l++) {
      if (fibers[w + l]->state == AT_WARP) waiting |= 1u << l;
    }
    for (int l = 0; l < 32 && w + l < threads; l++) {
      Fiber& fiber = *fibers[w + l];
      if (fiber.state != AT_WARP || (fiber.mask & waiting) != fiber.mask) continue;
      for (int k = 0; k < 32; k++) {
        if (fiber.mask >> k & 1 && fibers[w + k]->mask != fiber.mask) {
          fault = "lanes of a warp wait for one another with different masks";
          return false;
        }
      }
      const unsigned mask = fiber.mask;
      for (int k = 0; k < 32; k++) {
        if (mask >> k & 1) fibers[w + k]->state = READY;
      }
      waiting &= ~mask;
      moved = true;
    }
  }
  return moved;
}

inline void block(bool backwards) {
  std::memset(dynamic.data(), 0xff, dynamic.size());
  for (int t = 0; t < threads; t++) {
    const unsigned x = blockDim.x, y = blockDim.y, at = t;
    fibers[t]->place = {at % x, at / x % y, at / x / y};
    fibers[t]->state = READY;
    fibers[t]->turn = 0;
  }
  any[0] = any[1] = barrier = 0;
  for (;;) {
    bool ran = false;
    for (int t = 0; t < threads; t++) {
      const int at = backwards ? threads - 1 - t : t;
      if (fibers[at]->state != READY) continue;
      resume(at);
      ran = true;
    }
    if (ran) continue;
    if (release()) continue;
    if (fault) return;
    int waiting = 0, done = 0;
    for (int t = 0; t < threads; t++) {
      waiting += fibers[t]->state == AT_BARRIER;
      done += fibers[t]->state == DONE;
    }
    if (done == threads) return;
    if (waiting < threads) {
      fault = done ? "threads wait for one that has ended" : "threads wait at different places";
      for (int t = 0; t < threads; t++) fibers[t]->started = false;  // their stacks are given up
      return;
    }
    barrier ^= 1;
    any[barrier ^ 1] = 0;  // the last answer: all have read it
    for (int t = 0; t < threads; t++) fibers[t]->state = READY;
  }
}

// The number of words is checked against the structure that the kernel takes.
template <typename S>
const char* launch(void (*kernel)(S), const unsigned* shape, int64_t shared, const void* given,
                   int64_t count, bool backwards) {
  static void (*called)(S);
  called = kernel;
  if (count * 8 != (int64_t)sizeof(S)) return "the launch has another number of words";
  gridDim = {shape[0], shape[1], shape[2]};
  blockDim = {shape[3], shape[4], shape[5]};
  if (gridDim.y > 65535 || gridDim.z > 65535 || gridDim.x >= 1u << 31) return "the grid is too large";
  threads = blockDim.x * blockDim.y * blockDim.z;
  if (threads < 1 || threads > 1024) return "so many threads make no block";
  while ((int)fibers.size() < threads) fibers.push_back(new Fiber);
  warps.resize(32);
  dynamic.resize(shared);
  words = given;
  body = [](const void* at) { called(*static_cast<const S*>(at)); };
  fault = nullptr;
  const int64_t blocks = (int64_t)gridDim.x * gridDim.y * gridDim.z;
  for (int64_t b = 0; b < blocks && !fault; b++) {
    const int64_t at = backwards ? blocks - 1 - b : b;
    blockIdx = {unsigned(at % gridDim.x), unsigned(at / gridDim.x % gridDim.y),
                unsigned(at / gridDim.x / gridDim.y)};
    block(backwards);
  }
  return fault;
}

template <typename To, typename From>
inline To cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace emulated

inline void __syncthreads() { emulated::yield(emulated::AT_BARRIER); }

inline int __syncthreads_or(int yes) {
  const int mine = emulated::barrier ^ 1;  // what the barrier ahead tells
  emulated::any[mine] |= yes != 0;
  emulated::yield(emulated::AT_BARRIER);
  return emulated::any[mine];
}

inline void __syncwarp(unsigned mask = 0xffffffffu) { emulated::exchange(mask, 0); }

inline unsigned __ballot_sync(unsigned mask, int yes) {
  const uint64_t* given = emulated::exchange(mask, yes != 0);
  unsigned found = 0;
  for (int l = 0; l < 32; l++) {
    if (mask >> l & 1 && given[l]) found |= 1u << l;
  }
  return found;
}

inline int __any_sync(unsigned mask, int yes) { return __ballot_sync(mask, yes) != 0; }
inline int __all_sync(unsigned mask, int yes) { return __ballot_sync(mask, yes) == mask; }

template <typename T>
inline T __shfl_xor_sync(unsigned mask, T mine, int with) {
  uint64_t bits = 0;
  std::memcpy(&bits, &mine, sizeof mine);
  const uint64_t* given = emulated::exchange(mask, bits);
  T theirs;
  std::memcpy(&theirs, &given[(emulated::current % 32) ^ with], sizeof theirs);
  return theirs;
}

template <typename T>
inline T __shfl_sync(unsigned mask, T mine, int from) {
  return __shfl_xor_sync(mask, mine, (emulated::current % 32) ^ (from & 31));
}

inline int __ffs(unsigned x) { return __builtin_ffs((int)x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }

inline unsigned __byte_perm(unsigned x, unsigned y, unsigned how) {
  const uint64_t both = (uint64_t)y << 32 | x;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) out |= unsigned(both >> 8 * (how >> 4 * i & 7) & 0xff) << 8 * i;
  return out;
}

inline float __uint_as_float(unsigned x) { return emulated::cast<float>(x); }
inline float __int_as_float(int x) { return emulated::cast<float>(x); }
inline int __float_as_int(float x) { return emulated::cast<int>(x); }
inline double __longlong_as_double(long long x) { return emulated::cast<double>(x); }
inline long long __double_as_longlong(double x) { return emulated::cast<long long>(x); }

// A GPU's products have one NaN.
inline float __fmul_rn(float x, float y) {
  const float p = x * y;
  return p == p ? p : __int_as_float(0x7fffffff);
}
inline float __fadd_rn(float x, float y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __dadd_rn(double x, double y) { return x + y; }

template <typename T>
inline T atomicAdd(T* at, T x) {
  const T was = *at;
  *at = was + x;
  return was;
}

template <typename T>
inline T atomicOr(T* at, T x) {
  const T was = *at;
  *at = was | x;
  return was;
}

template <typename T>
inline T atomicCAS(T* at, T wanted, T x) {
  const T was = *at;
  if (was == wanted) *at = x;
  return was;
}

inline void __threadfence() {}

template <typename T>
inline T __ldcg(const T* at) {
  return *at;
}

template <typename T>
inline T atomicMax(T* at, T x) {
  const T was = *at;
  if (x > was) *at = x;
  return was;
}

template <typename T>
inline T atomicMin(T* at, T x) {
  const T was = *at;
  if (x < was) *at = x;
  return was;
}

#define EMULATED_CHOICE(T)                             \
  inline T min(T x, T y) { return x < y ? x : y; }     \
  inline T max(T x, T y) { return x > y ? x : y; }
EMULATED_CHOICE(int)
EMULATED_CHOICE(unsigned)
EMULATED_CHOICE(long long)
EMULATED_CHOICE(unsigned long long)

// Written out, so that no processor's own half precision is needed.
inline float of_half(unsigned short bits) {
  const unsigned sign = (bits & 0x8000u) << 16, power = bits >> 10 & 31, rest = bits & 0x3ffu;
  if (power == 31) return __uint_as_float(sign | 0x7f800000u | rest << 13);
  if (power) return __uint_as_float(sign | (power + 112) << 23 | rest << 13);
  const float small = (float)rest * 0x1p-24f;
  return sign ? -small : small;
}

inline void fetch(void* to, const void* from, int size) {
  std::memset(to, 0, 16);
  if (size) std::memcpy(to, from, size);
}

inline void word(void* to, const void* from, bool there) {
  std::memset(to, 0, 4);
  if (there) std::memcpy(to, from, 4);
}
