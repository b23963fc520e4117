// Shared by all CUDA sources: gradtrace/kernels/cuda_launch.py prepends it to each. EMULATED is
// defined when they are compiled for the CPU (tests/emulated).

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// A kernel of at most `threads` threads per block, with one structure, c, as its argument.
// cuda_launch.py finds kernels by this macro.
#define KERNEL(threads, name, given) \
  extern "C" __global__ __launch_bounds__(threads) void name(const __grid_constant__ given c)

#ifndef EMULATED
#define DYNAMIC(type, name) extern __shared__ type name[]  // size given at launch

__device__ __forceinline__ float of_half(unsigned short bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

// Asynchronous copy of 16 bytes from global to shared memory: `size` bytes, the rest zeros.
__device__ __forceinline__ void fetch(void* to, const void* from, int size) {
  u32 shared = (u32)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(size));
}

// The same for 4 bytes, or zeros.
__device__ __forceinline__ void word(void* to, const void* from, bool there) {
  u32 shared = (u32)__cvta_generic_to_shared(to);
  const int size = there ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(from), "r"(size));
}

// Makes the compiler recompute what depends on x from here on, instead of keeping it in registers.
#define RECOMPUTE(x) asm volatile("" : "+r"(x))

#define COMMIT asm volatile("cp.async.commit_group;")
#define AWAIT(n) asm volatile("cp.async.wait_group %0;" ::"n"(n))
#endif

__device__ __forceinline__ i64 place(const i64* table, i64 step, i64 n) {
  return table ? table[n] : n * step;
}

// Half and bfloat16 by their bits, so that no header is needed.
__device__ __forceinline__ float of_bfloat(unsigned short bits) {
  return __uint_as_float((u32)bits << 16);
}

// |x| as an integer of the same order. NaN is the largest, and all NaNs are equal, so that the
// first of them stays.
__device__ __forceinline__ int sized(float x) { return min(__float_as_int(x) & 0x7fffffff, 0x7fc00000); }

__device__ __forceinline__ i64 sized(double x) {
  const i64 bits = __double_as_longlong(x) & 0x7fffffffffffffffLL;
  return bits < 0x7ff8000000000000LL ? bits : 0x7ff8000000000000LL;
}

// |x y|. A GPU's products have only one NaN, 0x7fffffff.
__device__ __forceinline__ float size(float x, float y) { return __fmul_rn(fabsf(x), fabsf(y)); }

// Maximum of three such products, compared by their bits, NaN largest: one instruction on Hopper.
__device__ __forceinline__ float largest(float a, float b, float c) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return __int_as_float(__vimax3_s32(__float_as_int(a), __float_as_int(b), __float_as_int(c)));
#else
  return __int_as_float(max(max(__float_as_int(a), __float_as_int(b)), __float_as_int(c)));
#endif
}

__device__ __forceinline__ bool larger(float a, float b) {
  return __float_as_int(a) > __float_as_int(b);
}

__device__ __forceinline__ float number(int bits) { return __int_as_float(bits); }
__device__ __forceinline__ double number(i64 bits) { return __longlong_as_double(bits); }
