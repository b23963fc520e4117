// The mark of the larger of two terms, on NVIDIA GPUs. gradtrace/kernels/larger.py says what it does;
// the bits are those of plain torch.
//
// For float and double; half precisions are read as float.

#define DIMS 6

struct Larger {
  int* out;
  const void* first;
  const int* mine;
  const void* second;
  const int* theirs;
  i64 constants[2];  // where marks are absent
  i64 shift, loose, kinds[2], n, dims;
  i64 shape[DIMS], step[5][DIMS];  // of out, first, mine, second, theirs; innermost first
};

template <typename T>
__device__ __forceinline__ T get(const void* data, int kind, i64 at) {
  if (kind == 0) return (T)((const float*)data)[at];
  if (kind == 1) return (T)((const double*)data)[at];
  const unsigned short bits = ((const unsigned short*)data)[at];
  return (T)(kind == 3 ? of_bfloat(bits) : of_half(bits));
}

template <typename T>
__device__ void larger(const Larger& c) {
  for (i64 i = (i64)blockIdx.x * 256 + threadIdx.x; i < c.n; i += (i64)gridDim.x * 256) {
    i64 at[5] = {0, 0, 0, 0, 0}, rest = i;
#pragma unroll
    for (int d = 0; d < DIMS; d++) {
      if (d >= c.dims) break;
      i64 here = rest;
      if (d + 1 < c.dims) {
        const i64 size = c.shape[d];
        // 32 bits where they do: division is slow.
        const i64 more = (rest | size) >> 32 ? rest / size : (i64)((u32)rest / (u32)size);
        here = rest - more * size;
        rest = more;
      }
#pragma unroll
      for (int k = 0; k < 5; k++) at[k] += here * c.step[k][d];
    }
    const auto size = sized(get<T>(c.first, c.kinds[0], at[1]));
    int mark = c.mine ? c.mine[at[2]] : (int)c.constants[0];
    if (c.loose && !size) mark = 0;
    const int other = c.theirs ? c.theirs[at[4]] : (int)c.constants[1];
    if (other && sized(get<T>(c.second, c.kinds[1], at[3])) > size) mark = other + (int)c.shift;
    c.out[at[0]] = mark;
  }
}
KERNEL(256, larger_float, Larger) { larger<float>(c); }
KERNEL(256, larger_double, Larger) { larger<double>(c); }
