// What tallies and sizes need to know of up to 1024 floats, in one pass; compiled once for each instruction
// set, in its namespace.
namespace {

typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef uint32_t Unsigned __attribute__((vector_size(32)));
typedef double Doubles __attribute__((vector_size(64)));

// n is a multiple of 8. The sum is exact if Magnitudes::exact.
void magnitudes(const float* x, int64_t n, Magnitudes* out) {
  Unsigned low = ~Unsigned{}, zeros = {};
  Ints high = {};
  Doubles sum = {}, squares = {};
  for (int64_t i = 0; i < n; i += 8) {
    Ints bits;
    __builtin_memcpy(&bits, x + i, sizeof bits);
    bits &= 0x7fffffff;
    Floats size;
    __builtin_memcpy(&size, &bits, sizeof size);
    const Doubles wide = __builtin_convertvector(size, Doubles);
    sum += wide;
    squares += wide * wide;
    const Unsigned below = (Unsigned)bits - 1;
    low = below < low ? below : low;
    high = bits > high ? bits : high;
    zeros -= (Unsigned)(bits == 0);
  }
  *out = Magnitudes{~uint32_t(0), 0, 0, 0.0, 0.0};
  for (int lane = 0; lane < 8; lane++) {
    out->least = low[lane] < out->least ? low[lane] : out->least;
    out->most = high[lane] > out->most ? high[lane] : out->most;
    out->zeros += zeros[lane];
    out->sum += sum[lane];
    out->squares += squares[lane];
  }
}

}  // namespace
