// The TopK contraction on NVIDIA GPUs: the TOP largest of all x[p][m, k] w[k, n], over k and over
// the TOP parts p of x, in descending order. Parts descend too, so that the first p whose product
// is not among the largest ends the loop for its k. A product with 0 is 0, even 0 * NaN; NaN is the
// largest.

#define ROWS 16
#define COLUMNS 64
#define COLUMNS_PER_THREAD 4
#define DEPTH 16
#define ONE_BLOCK 256, 1  // threads per block, and one block, for the most registers

struct Part {
  const void* data;
  i64 batch, row, inner;
};

struct Top {
  Part x[8], w;  // the rows of w are its columns n
  i64 M, N, K, plane;
  void* out;  // (TOP, batches, M, N)
};

template <typename T>
__device__ __forceinline__ bool larger(T a, T b) { return a > b || (a != a && b == b); }

template <typename T>
__device__ __forceinline__ T at(const Part& x, i64 batch, i64 row, i64 inner) {
  return ((const T*)x.data)[batch * x.batch + row * x.row + inner * x.inner];
}

// grid: (tiles of results, 1, batches), 16 x 16 threads.
template <typename T>
__device__ void top(const Top& c) {
  __shared__ T xs[TOP][DEPTH][ROWS + 1], ws[DEPTH][COLUMNS + 1];
  const i64 wide = (c.N + COLUMNS - 1) / COLUMNS;
  const i64 m0 = blockIdx.x / wide * ROWS, n0 = blockIdx.x % wide * COLUMNS, batch = blockIdx.z;
  const int tx = threadIdx.x, ty = threadIdx.y, tid = ty * 16 + tx;
  T best[COLUMNS_PER_THREAD][TOP];
#pragma unroll
  for (int e = 0; e < COLUMNS_PER_THREAD; e++)
#pragma unroll
    for (int t = 0; t < TOP; t++) best[e][t] = T(0);
  for (i64 k0 = 0; k0 < c.K; k0 += DEPTH) {
    __syncthreads();
#pragma unroll
    for (int p = 0; p < TOP; p++) {  // k is usually contiguous in x
      const i64 m = m0 + ty, k = k0 + tx;
      xs[p][tx][ty] = m < c.M && k < c.K ? at<T>(c.x[p], batch, m, k) : T(0);
    }
    for (int i = tid; i < DEPTH * COLUMNS; i += 256) {
      const i64 n = n0 + i % COLUMNS, k = k0 + i / COLUMNS;
      ws[i / COLUMNS][i % COLUMNS] = n < c.N && k < c.K ? at<T>(c.w, batch, n, k) : T(0);
    }
    __syncthreads();
    for (int k = 0; k < DEPTH; k++) {
#pragma unroll
      for (int e = 0; e < COLUMNS_PER_THREAD; e++) {
        const T w = ws[k][e * 16 + tx];
        for (int p = 0; p < TOP; p++) {
          const T x = xs[p][k][ty];
          T here = x == T(0) || w == T(0) ? T(0) : x * w;
          if (!larger(here, best[e][TOP - 1])) break;
#pragma unroll
          for (int t = 0; t < TOP; t++) {  // insert, moving the smaller ones down
            const T there = best[e][t];
            const bool wins = larger(here, there);
            best[e][t] = wins ? here : there;
            here = wins ? there : here;
          }
        }
      }
    }
  }
#pragma unroll
  for (int e = 0; e < COLUMNS_PER_THREAD; e++) {
    const i64 m = m0 + ty, n = n0 + e * 16 + tx;
    if (m >= c.M || n >= c.N) continue;
#pragma unroll
    for (int t = 0; t < TOP; t++)
      ((T*)c.out)[t * c.plane + (batch * c.M + m) * c.N + n] = best[e][t];
  }
}
KERNEL(ONE_BLOCK, top_float, Top) { top<float>(c); }
KERNEL(ONE_BLOCK, top_double, Top) { top<double>(c); }
