// The contraction in (max, x) on NVIDIA GPUs: value[m, n] = max_k |a[m, k] b[k, n]| in float32, and
// the lowest k that attains it. Compiled when first used, by gradtrace/kernels/gpu.py, which defines
// KB, how many k make a block, and INDEX where the winner is wanted.
//
//   pack      reads an operand wherever its numbers are, and lays their sizes out twice: k by row,
//             for contract, and row by k, for rescan. Says if any is not finite.
//   contract  128 x 128 results a thread block, 8 x 8 a thread. The maximum alone is kept at every
//             k; at the end of a block of k, results that have grown since take its number.
//   rescan    looks the winning block of each result through, for the lowest k. Also joins the
//             parts where k was split among thread blocks.
//
// Sizes are not negative, so 0 is the least. NaN would be lost in fmaxf: where there are numbers that
// are not finite, contract does nothing, and rescan goes through all k by itself, with care.

#define BM 128
#define BN 128
#define BK 16
#define STAGES 3
#define THREADS 256
#define ALONE THREADS, 1  // a block has a multiprocessor to itself, and may take its registers
#define LANES (KB / 4)   // of a warp, for each result of rescan
#define AT_ONCE (32 / LANES)

// An operand: x[i, r, k] is at batch + row + inner, each a table or a step.
struct Operand {
  const void* data;
  const i64 *batches, *rows, *inners;
  i64 batch, row, inner;
};

struct Pack {
  Operand x;
  i64 kind, R, K, Rp, Kp, first;  // rows and k that are there, and with the zeros after them
  float *turned, *straight;       // k by row; row by k, if wanted
  int* strange;
};

// Both operands, in one launch.
struct Packs {
  Pack a, b;
  i64 tiles;  // of 32 rows, that the first has
};

struct Contract {
  const float *a, *b;  // k by m, k by n
  float* parts;        // (parts of k, batches, m, n)
  u8* blocks;
  i64 M, N, K, part;
  const int* strange;
};

struct Rescan {
  const float *a, *b;  // m by k, n by k
  const float *turned, *across;  // k by m, k by n
  const float* parts;
  const u8* blocks;
  i64 splits, part, M, N, K, R, C;
  float* value;  // (batches, R, C), with gaps; each of the three may be absent
  i64* index;
  int* marks;
  Operand given;  // marks of a, or of b
  i64 ofb, first;
  i64 plane, pitch;  // from matrix to matrix and from row to row of what is written
  const int* strange;
};

__device__ __forceinline__ float read(const void* data, int kind, i64 at) {
  if (kind == 0) return ((const float*)data)[at];
  const unsigned short bits = ((const unsigned short*)data)[at];
  return kind == 3 ? of_bfloat(bits) : of_half(bits);
}

// grid: (columns of k / 32, rows of both / 32, batches), 32 x 8 threads.
KERNEL(256, pack, Packs) {
  __shared__ float tile[32][33];
  const bool second = blockIdx.y >= c.tiles;
  const Pack& p = second ? c.b : c.a;
  const Operand& x = p.x;
  const int k0 = blockIdx.x * 32, r0 = (blockIdx.y - (second ? (int)c.tiles : 0)) * 32;
  const i64 i = blockIdx.z, from = place(x.batches, x.batch, p.first + i);
  bool odd = false;
  // Neighbouring threads read along whichever dimension lies together.
  const bool along = x.inners || x.inner == 1 || x.row != 1;
#pragma unroll
  for (int step = threadIdx.y; step < 32; step += 8) {
    const int dr = along ? step : threadIdx.x, dk = along ? threadIdx.x : step;
    const int r = r0 + dr, k = k0 + dk;
    float size = 0.f;
    if (r < p.R && k < p.K)
      size = fabsf(read(x.data, p.kind, from + place(x.rows, x.row, r) + place(x.inners, x.inner, k)));
    odd |= !(size <= 3.402823466e38f);
    tile[dr][dk] = size;
  }
  if (__syncthreads_or(odd) && threadIdx.x == 0 && threadIdx.y == 0) *p.strange = 1;
#pragma unroll
  for (int step = threadIdx.y; step < 32; step += 8) {
    if (k0 + step < p.Kp && r0 + threadIdx.x < p.Rp)
      p.turned[(i * p.Kp + k0 + step) * p.Rp + r0 + threadIdx.x] = tile[threadIdx.x][step];
    if (p.straight && r0 + step < p.R && k0 + threadIdx.x < p.Kp)
      p.straight[(i * p.R + r0 + step) * p.Kp + k0 + threadIdx.x] = tile[step][threadIdx.x];
  }
}

// grid: (tiles, parts of k, batches).
KERNEL(ALONE, contract, Contract) {
  if (*c.strange) return;
  const int M = c.M, N = c.N, K = c.K, part = c.part;
  DYNAMIC(float4, memory);
  float* sa = (float*)memory;                      // [STAGES][BK][BM]
  float* sb = sa + STAGES * BK * BM;               // [STAGES][BK][BN]
  float4* before = (float4*)(sb + STAGES * BK * BN);  // [16][THREADS]: what the results were
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const int ty = (warp / 2) * 4 + lane / 8, tx = (warp % 2) * 8 + lane % 8;
  // Tiles go by groups of 8 rows of them, so that what they read stays in the cache.
  const int high = M / BM, wide = N / BN, group = blockIdx.x / (8 * wide) * 8;
  const int rest = blockIdx.x % (8 * wide), size = min(high - group, 8);
  const int m0 = (group + rest % size) * BM, n0 = (rest / size) * BN;
  const int first = blockIdx.y * part, count = min(K - first, part);  // whole blocks
  const float* __restrict__ a = c.a + (i64)blockIdx.z * K * M;
  const float* __restrict__ b = c.b + (i64)blockIdx.z * K * N;
  const i64 out = ((i64)blockIdx.y * gridDim.z + blockIdx.z) * M * N;

  float most[8][8];
#pragma unroll
  for (int i = 0; i < 8; i++)
#pragma unroll
    for (int j = 0; j < 8; j++) most[i][j] = 0.f;
#ifdef INDEX
  u32 winner[16];  // four to a word
#pragma unroll
  for (int q = 0; q < 16; q++) {
    winner[q] = 0;
    before[q * THREADS + tid] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
#endif
  auto load = [&](int stage, int k0) {
#pragma unroll
    for (int t = 0; t < BK * BM / 4 / THREADS; t++) {
      const int at = (tid + t * THREADS) * 4, k = at / BM, m = at % BM;
      fetch(sa + (stage * BK + k) * BM + m, a + (i64)(k0 + k) * M + m0 + m);
      fetch(sb + (stage * BK + k) * BN + m, b + (i64)(k0 + k) * N + n0 + m);
    }
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    if (s * BK < count) load(s, first + s * BK);
    COMMIT;
  }
  int stage = 0;
  for (int done = 0; done < count; done += BK) {
    AWAIT(STAGES - 2);
    __syncthreads();
    const int next = done + (STAGES - 1) * BK;
    if (next < count) load((stage + STAGES - 1) % STAGES, first + next);
    COMMIT;
    const float* pa = sa + stage * BK * BM + ty * 4;
    const float* pb = sb + stage * BK * BN + tx * 4;
#pragma unroll
    for (int k = 0; k < BK; k += 2) {  // two at a time: the larger of them and of what was there
      float x[2][8], y[2][8];
#pragma unroll
      for (int t = 0; t < 2; t++) {
        *(float4*)&x[t][0] = *(const float4*)(pa + (k + t) * BM);
        *(float4*)&x[t][4] = *(const float4*)(pa + (k + t) * BM + 64);
        *(float4*)&y[t][0] = *(const float4*)(pb + (k + t) * BN);
        *(float4*)&y[t][4] = *(const float4*)(pb + (k + t) * BN + 64);
      }
#pragma unroll
      for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 8; j++)
          most[i][j] = largest(most[i][j], x[0][i] * y[0][j], x[1][i] * y[1][j]);
    }
#ifdef INDEX
    if ((done + BK) % KB == 0) {
      const u32 block = done / KB;
#pragma unroll
      for (int q = 0; q < 16; q++) {
        const int i = q / 2, j = (q % 2) * 4;
        const float4 was = before[q * THREADS + tid];
        if (most[i][j] > was.x) winner[q] = __byte_perm(winner[q], block, 0x3214);
        if (most[i][j + 1] > was.y) winner[q] = __byte_perm(winner[q], block, 0x3240);
        if (most[i][j + 2] > was.z) winner[q] = __byte_perm(winner[q], block, 0x3410);
        if (most[i][j + 3] > was.w) winner[q] = __byte_perm(winner[q], block, 0x4210);
        before[q * THREADS + tid] =
            make_float4(most[i][j], most[i][j + 1], most[i][j + 2], most[i][j + 3]);
      }
    }
#endif
    stage = (stage + 1) % STAGES;
  }
#pragma unroll
  for (int q = 0; q < 16; q++) {
    const int i = q / 2, j = (q % 2) * 4;
    const i64 m = m0 + (i / 4) * 64 + ty * 4 + i % 4, n = n0 + (j / 4) * 64 + tx * 4;
    *(float4*)(c.parts + out + m * N + n) =
        make_float4(most[i][j], most[i][j + 1], most[i][j + 2], most[i][j + 3]);
#ifdef INDEX
    *(u32*)(c.blocks + out + m * N + n) = winner[q];
#endif
  }
}

__device__ __forceinline__ void put(const Rescan& c, i64 i, int m, int n, float best, int k) {
  const i64 o = i * c.plane + m * c.pitch + n;
  const bool nothing = best == 0.f;
  if (c.index) c.index[o] = nothing ? 0 : k;
  if (!c.marks) return;
  const Operand& g = c.given;
  const i64 at = place(g.batches, g.batch, c.first + i) + place(g.rows, g.row, c.ofb ? n : m);
  c.marks[o] = nothing ? 0 : ((const int*)g.data)[at + place(g.inners, g.inner, k)];
}

// All k of a result, a thread each: NaN is largest of all, the first of them stays.
__device__ void careful(const Rescan& c, int m0, int n0) {
  const i64 i = blockIdx.z;
  const int n = n0 + threadIdx.x % 32;
  if (n >= c.C) return;
  for (int m = m0 + threadIdx.x / 32; m < min((int)c.R, m0 + 32); m += 8) {
    float best = 0.f;
    int at = 0;
    for (int k = 0; k < c.K; k++) {
      const float p = c.turned[(i * c.K + k) * c.M + m] * c.across[(i * c.K + k) * c.N + n];
      if (p > best || (p != p && best == best)) { best = p; at = k; }
    }
    if (c.value) c.value[i * c.plane + m * c.pitch + n] = best;
    put(c, i, m, n, best, at);
  }
}

// grid: (tiles of 32 x 32 results, 1, batches).
KERNEL(256, rescan, Rescan) {
  const int R = c.R, C = c.C, K = c.K;
  const int wide = (C + 31) / 32, m0 = blockIdx.x / wide * 32, n0 = blockIdx.x % wide * 32;
  if (*c.strange) return careful(c, m0, n0);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, sub = lane % LANES, who = lane / LANES;
  const u32 mine = (LANES == 32 ? 0xffffffffu : ((1u << LANES) - 1)) << (who * LANES);
  const i64 i = blockIdx.z, size = (i64)gridDim.z * c.M * c.N;
  for (int m = m0 + warp; m < min(R, m0 + 32); m += 8) {
    for (int column = 0; column < 32; column += 4 * AT_ONCE) {
      // Four at a time, one stage after the other, so that many reads are under way.
      float best[4];
      int from[4];  // k
#pragma unroll
      for (int u = 0; u < 4; u++) {
        const int n = min(n0 + column + u * AT_ONCE + who, C - 1);
        const i64 at = (i * c.M + m) * c.N + n;
        best[u] = c.parts[at];
        from[u] = 0;
#ifdef INDEX
        from[u] = c.blocks[at] * KB;
#endif
      }
      for (int t = 1; t < c.splits; t++) {
#pragma unroll
        for (int u = 0; u < 4; u++) {
          const int n = min(n0 + column + u * AT_ONCE + who, C - 1);
          const i64 at = t * size + (i * c.M + m) * c.N + n;
          const float other = c.parts[at];
          if (other > best[u]) {
            best[u] = other;
#ifdef INDEX
            from[u] = t * (int)c.part + c.blocks[at] * KB;
#endif
          }
        }
      }
#ifdef INDEX
      float4 x[4], y[4];
#pragma unroll
      for (int u = 0; u < 4; u++) {
        const int n = min(n0 + column + u * AT_ONCE + who, C - 1);
        x[u] = *(const float4*)(c.a + (i * R + m) * K + from[u] + sub * 4);
        y[u] = *(const float4*)(c.b + (i * C + n) * K + from[u] + sub * 4);
      }
#endif
#pragma unroll
      for (int u = 0; u < 4; u++) {
        const int n = n0 + column + u * AT_ONCE + who;
        if (c.value && n < C && sub == 0) c.value[i * c.plane + m * c.pitch + n] = best[u];
#ifdef INDEX
        int at = x[u].w * y[u].w == best[u] ? 3 : 4;
        at = x[u].z * y[u].z == best[u] ? 2 : at;
        at = x[u].y * y[u].y == best[u] ? 1 : at;
        at = x[u].x * y[u].x == best[u] ? 0 : at;
        const u32 found = __ballot_sync(0xffffffffu, at < 4) & mine;
        if (n < C && lane == __ffs(found) - 1) put(c, i, m, n, best[u], from[u] + sub * 4 + at);
#endif
      }
    }
  }
}
