// Vectors of one instruction set. Included once in each contract_<set>.cpp, inside its namespace,
// so that no symbol can be linked with that of another set.

// Bytes of a vector, and vectors side by side in a panel, limited by the registers. For lists of up
// to SHORT k the index k itself is tracked; for longer ones only its group, which is searched at
// the end. That search is done for each column separately, so wider vectors need longer lists to
// pay for it.
#if defined(GRADTRACE_AVX512)
constexpr int BYTES = 64, ACROSS = 4, SHORT = 256;
#elif defined(GRADTRACE_AVX2)
constexpr int BYTES = 32, ACROSS = 4, SHORT = 100;
#else
constexpr int BYTES = 16, ACROSS = 8, SHORT = 40;
#endif

template <class T>
struct Bits;
template <>
struct Bits<float> {
  using type = int32_t;
};
template <>
struct Bits<double> {
  using type = int64_t;
};

template <class T>
struct Lanes {
  using Int = typename Bits<T>::type;
  typedef T V __attribute__((vector_size(BYTES)));
  typedef Int I __attribute__((vector_size(BYTES)));
  typedef T Loose __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
  typedef Int LooseInt __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
  static constexpr int W = BYTES / static_cast<int>(sizeof(T));
};
using F = Lanes<float>::V;
using D = Lanes<double>::V;

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

template <class T>
INLINE typename Lanes<T>::V load(const T* from) {
  return *reinterpret_cast<const typename Lanes<T>::Loose*>(from);
}

template <class T>
INLINE void store(T* to, typename Lanes<T>::V x) {
  *reinterpret_cast<typename Lanes<T>::Loose*>(to) = x;
}

template <class T>
INLINE typename Lanes<T>::I load_int(const typename Lanes<T>::Int* from) {
  return *reinterpret_cast<const typename Lanes<T>::LooseInt*>(from);
}

template <class T>
INLINE void store_int(typename Lanes<T>::Int* to, typename Lanes<T>::I x) {
  *reinterpret_cast<typename Lanes<T>::LooseInt*>(to) = x;
}

template <class T>
INLINE typename Lanes<T>::I all_int(int64_t x) {
  return typename Lanes<T>::I{} + static_cast<typename Lanes<T>::Int>(x);
}

// Through integers: 0 + x equals x only for those, and compiles to a broadcast.
template <class T>
INLINE typename Lanes<T>::V all(T x) {
  typename Lanes<T>::Int bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return (typename Lanes<T>::V)all_int<T>(bits);
}

template <class T>
INLINE T infinity() {
  return static_cast<T>(__builtin_inf());
}

INLINE F size(F x) {
  return (F)((Lanes<float>::I)x & all_int<float>(0x7fffffff));
}
INLINE D size(D x) {
  return (D)((Lanes<double>::I)x & all_int<double>(0x7fffffffffffffff));
}
INLINE float size(float x) { return __builtin_fabsf(x); }
INLINE double size(double x) { return __builtin_fabs(x); }
INLINE int32_t size(int32_t x) { return x; }  // a provenance id

// Nonnegative numbers have the order of their bits, and comparing integers is one instruction; for
// floats, a compiler that respects NaN emits several.
INLINE Lanes<float>::I bits(F x) { return (Lanes<float>::I)x; }
INLINE Lanes<double>::I bits(D x) { return (Lanes<double>::I)x; }

// Maximum and minimum of two nonnegative values that are not NaN.
INLINE F larger(F x, F y) {
#if defined(GRADTRACE_AVX512)
  return (F)_mm512_max_ps((__m512)x, (__m512)y);
#elif defined(GRADTRACE_AVX2)
  return (F)_mm256_max_ps((__m256)x, (__m256)y);
#elif defined(GRADTRACE_NEON)
  return (F)vmaxq_f32((float32x4_t)x, (float32x4_t)y);
#else
  return bits(x) > bits(y) ? x : y;
#endif
}
INLINE D larger(D x, D y) {
#if defined(GRADTRACE_AVX512)
  return (D)_mm512_max_pd((__m512d)x, (__m512d)y);
#elif defined(GRADTRACE_AVX2)
  return (D)_mm256_max_pd((__m256d)x, (__m256d)y);
#elif defined(GRADTRACE_NEON)
  return (D)vmaxq_f64((float64x2_t)x, (float64x2_t)y);
#else
  return bits(x) > bits(y) ? x : y;
#endif
}
template <class V>
INLINE V smaller(V x, V y) {
  return bits(x) < bits(y) ? x : y;
}

// Maximum of two values with sign bit 0, NaN if one is NaN: its bits are above those of infinity.
template <class V>
INLINE V larger_size(V x, V y) {
#if defined(GRADTRACE_NEON)
  return larger(x, y);  // propagates NaN here
#else
  return bits(x) > bits(y) ? x : y;
#endif
}

// Maximum of the lanes, likewise.
template <class V>
INLINE auto largest_of(V x) {
#if defined(GRADTRACE_NEON)
  if constexpr (sizeof(x[0]) == 4) {
    return vmaxvq_f32(x);
  } else {
    return vmaxvq_f64(x);
  }
#else
  auto all_bits = bits(x);
#if defined(GRADTRACE_AVX512)
  decltype(all_bits[0] + all_bits[0]) most;
  if constexpr (sizeof(x[0]) == 4) {
    most = _mm512_reduce_max_epi32((__m512i)all_bits);
  } else {
    most = _mm512_reduce_max_epi64((__m512i)all_bits);
  }
#else
  auto most = all_bits[0];
  for (int w = 1; w < static_cast<int>(sizeof x / sizeof x[0]); w++) {
    most = all_bits[w] > most ? all_bits[w] : most;
  }
#endif
  decltype(x[0] + x[0]) out;
  __builtin_memcpy(&out, &most, sizeof out);
  return out;
#endif
}

// Minimum of the lanes, none of which is negative or NaN.
template <class V>
INLINE auto smallest_of(V x) {
#if defined(GRADTRACE_AVX512)
  if constexpr (sizeof(x[0]) == 4) {
    return _mm512_reduce_min_ps((__m512)x);
  } else {
    return _mm512_reduce_min_pd((__m512d)x);
  }
#else
  auto out = x[0];
  for (int w = 1; w < static_cast<int>(sizeof x / sizeof x[0]); w++) out = x[w] < out ? x[w] : out;
  return out;
#endif
}

// out[n] = ids[n · step + index[n]]
INLINE void pick(const int32_t* ids, int64_t step, const int32_t* index, int64_t count, int32_t* out) {
  int64_t n = 0;
#if defined(GRADTRACE_AVX512)
  if (step < 1 << 26) {  // offsets of 16 columns are int32
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i start = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(static_cast<int>(step)));
    for (; n + 16 <= count; n += 16) {
      const __m512i at = _mm512_add_epi32(_mm512_loadu_si512(index + n), start);
      _mm512_storeu_si512(out + n, _mm512_i32gather_epi32(at, ids + n * step, 4));
    }
  }
#endif
  for (; n < count; n++) out[n] = ids[n * step + index[n]];
}

// Maximum of two, NaN if one is NaN.
template <class V>
INLINE V larger_or_nan(V x, V y) {
  return (x > y) | (x != x) ? x : y;
}

// The bits of the canonical NaN: no NaN among products has lower bits.
INLINE Lanes<float>::I quiet(F) { return all_int<float>(0x7fc00000); }
INLINE Lanes<double>::I quiet(D) { return all_int<double>(0x7ff8000000000000); }

// v = max(v, m), and `at` becomes `now` where m is the larger. A product that may be NaN can have
// any sign and bits; made one NaN, it is above all others by its bits, and the first stays.
template <bool FINITE, class V, class I>
INLINE void take(V m, V& v, I& at, I now) {
  if constexpr (FINITE) {
#if defined(GRADTRACE_AVX512)
    if constexpr (sizeof(v[0]) == 4) {
      const __mmask16 g = _mm512_cmp_ps_mask((__m512)m, (__m512)v, _CMP_GT_OQ);
      at = (I)_mm512_mask_mov_epi32((__m512i)at, g, (__m512i)now);
      v = larger(m, v);
      return;
    }
#endif
    at = bits(m) > bits(v) ? now : at;
    v = larger(m, v);
  } else {
    I most = bits(size(m));
    most = most > quiet(m) ? quiet(m) : most;
    const I g = most > bits(v);
    at = g ? now : at;
    v = (V)(g ? most : bits(v));
  }
}

#if defined(GRADTRACE_NEON)
// Bitmask of 16 comparison results (all ones or all zeros): bit set where the comparison failed.
INLINE unsigned bits_of_not(uint16x8_t low, uint16x8_t high) {
  const uint8x16_t held = vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high));
  const uint8x16_t weights = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  uint8x16_t sum = vbicq_u8(weights, held);
  for (int step = 0; step < 3; step++) sum = vpaddq_u8(sum, sum);
  return vgetq_lane_u16(vreinterpretq_u16_u8(sum), 0);
}
#endif

// Bit j is set if a[j] · top[j] is not less than the bound: larger, equal, or NaN. j < BOUND_STEP.
INLINE unsigned not_less(const float* a, const float* top, F bound) {
#if defined(GRADTRACE_AVX512)
  const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(a), _mm512_loadu_ps(top));
  return _mm512_cmp_ps_mask(x, (__m512)bound, _CMP_NLT_UQ);
#elif defined(GRADTRACE_AVX2)
  unsigned out = 0;
  for (int j = 0; j < 2; j++) {
    const __m256 x = _mm256_mul_ps(_mm256_loadu_ps(a + 8 * j), _mm256_loadu_ps(top + 8 * j));
    const __m256 g = _mm256_cmp_ps(x, (__m256)bound, _CMP_NLT_UQ);
    out |= static_cast<unsigned>(_mm256_movemask_ps(g)) << (8 * j);
  }
  return out;
#elif defined(GRADTRACE_NEON)
  uint32x4_t less[4];
  for (int j = 0; j < 4; j++) {
    less[j] = vcltq_f32(vmulq_f32(vld1q_f32(a + 4 * j), vld1q_f32(top + 4 * j)), bound);
  }
  return bits_of_not(vuzp1q_u16(vreinterpretq_u16_u32(less[0]), vreinterpretq_u16_u32(less[1])),
                     vuzp1q_u16(vreinterpretq_u16_u32(less[2]), vreinterpretq_u16_u32(less[3])));
#else
  unsigned out = 0;
  for (int j = 0; j < BOUND_STEP; j++) out |= static_cast<unsigned>(!(a[j] * top[j] < bound[0])) << j;
  return out;
#endif
}
INLINE unsigned not_less(const double* a, const double* top, D bound) {
#if defined(GRADTRACE_AVX512)
  unsigned out = 0;
  for (int j = 0; j < 2; j++) {
    const __m512d x = _mm512_mul_pd(_mm512_loadu_pd(a + 8 * j), _mm512_loadu_pd(top + 8 * j));
    out |= static_cast<unsigned>(_mm512_cmp_pd_mask(x, (__m512d)bound, _CMP_NLT_UQ)) << (8 * j);
  }
  return out;
#elif defined(GRADTRACE_AVX2)
  unsigned out = 0;
  for (int j = 0; j < 4; j++) {
    const __m256d x = _mm256_mul_pd(_mm256_loadu_pd(a + 4 * j), _mm256_loadu_pd(top + 4 * j));
    const __m256d g = _mm256_cmp_pd(x, (__m256d)bound, _CMP_NLT_UQ);
    out |= static_cast<unsigned>(_mm256_movemask_pd(g)) << (4 * j);
  }
  return out;
#elif defined(GRADTRACE_NEON)
  uint32x4_t less[4];
  for (int j = 0; j < 4; j++) {
    const double *x = a + 4 * j, *y = top + 4 * j;
    const uint64x2_t low = vcltq_f64(vmulq_f64(vld1q_f64(x), vld1q_f64(y)), bound);
    const uint64x2_t high = vcltq_f64(vmulq_f64(vld1q_f64(x + 2), vld1q_f64(y + 2)), bound);
    less[j] = vuzp1q_u32(vreinterpretq_u32_u64(low), vreinterpretq_u32_u64(high));
  }
  return bits_of_not(vuzp1q_u16(vreinterpretq_u16_u32(less[0]), vreinterpretq_u16_u32(less[1])),
                     vuzp1q_u16(vreinterpretq_u16_u32(less[2]), vreinterpretq_u16_u32(less[3])));
#else
  unsigned out = 0;
  for (int j = 0; j < BOUND_STEP; j++) out |= static_cast<unsigned>(!(a[j] * top[j] < bound[0])) << j;
  return out;
#endif
}
