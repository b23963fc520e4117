// The (max, x) contraction on NVIDIA GPUs: value[m, n] = max_k |a[m, k] b[k, n]| in float32, and
// the block of k in which it is first attained; rescan.cu finds the k. Compiled on first use by
// gradtrace/kernels/cuda_contraction.py, which defines BM and BN, the rows and columns of a tile;
// KB, the number of k per block; and INDEX if the argmax is requested.
//
// Operands are read in place, by their strides. 256 threads compute a tile, 8 x 8 results each.
// Only the maximum is updated at every k; at the end of a block of k, results that have increased
// since its start record its number.
//
// The work of all tiles, in steps of BK, is cut into equal shares, one per thread block; a share
// may begin in the middle of a tile. The thread block that begins a tile writes to the results. A
// thread block that continues a tile, which each does at most once and first, writes to its own
// part of the workspace; rescan combines them.
//
// Products are compared by their bits: they are nonnegative, and a GPU's only NaN, 0x7fffffff, is
// the largest, so that it stays, and the first of them wins.

#define BK 16
#define STAGES 3
#define THREADS 256
#define ONE_BLOCK THREADS, 1  // one block per multiprocessor, which may use all registers
#define PITCH_A (BM + 4)      // stride of k in shared memory: 8 k of 4 rows are in different banks
#define PITCH_B (BN + 4)

// x[i, r, k] is at i * batch + r * row + k * inner; offsets within a tile are less than 2^31.
struct Side {
  const float* data;
  i64 batch, row, inner;
};

struct Contract {
  Side a, b;
  float* value;        // of the thread blocks that begin a tile
  i64 plane, pitch;    // strides of value from matrix to matrix and from row to row
  u8* blocks;          // (batches, M, N up to a multiple of 4)
  float* parts;        // of those that continue one: (thread blocks, BM, BN)
  u8* numbers;
  i64 M, N, K;
  i64 steps, share, total;  // steps of BK: per tile, per thread block, in total
};

// How an operand is fetched: along contiguous and aligned rows, 16 bytes at a time; along
// contiguous rows, 4 bytes at a time; or along k.
enum Layout { QUADS, ROWS, INNER };

__device__ __forceinline__ Layout layout_of(const Side& x) {
  if (x.row != 1 || x.inner == 1) return INNER;
  return (((u64)x.data | x.inner << 2 | x.batch << 2) & 15) == 0 ? QUADS : ROWS;
}

// The first element that a thread fetches of BK k and COUNT rows; the others are at fixed strides.
template <int COUNT>
__device__ __forceinline__ void place(Layout how, int& r, int& k) {
  int tid = threadIdx.x;
  RECOMPUTE(tid);
  const int warp = tid / 32, lane = tid % 32;
  if (how == QUADS) {
    r = tid * 4 % COUNT;
    k = tid * 4 / COUNT;
  } else if (how == ROWS) {
    r = lane;
    k = warp * 2;
  } else {
    r = warp * (COUNT / 8) + lane / 8;
    k = lane % 8;
  }
}

// Load BK k of COUNT rows into shared memory, as [k][row]; zeros outside the operand.
template <int COUNT, bool WHOLE>
__device__ __forceinline__ void load(float* to, const float* from, Layout how, int row, int inner, int rows,
                                     int inners) {
  const int pitch = COUNT + 4;
  int r, k;
  place<COUNT>(how, r, k);
  to += k * pitch + r;
  if (how == QUADS) {
#pragma unroll
    for (int t = 0; t < COUNT / 64; t++) {
      const int dk = t * (BK * 64 / COUNT);
      const int size = WHOLE ? 16 : k + dk < inners ? max(min(rows - r, 4), 0) * 4 : 0;
      fetch(to + dk * pitch, from + (i64)dk * inner, size);
    }
  } else if (how == ROWS) {
#pragma unroll
    for (int t = 0; t < COUNT / 16; t++) {
      const int dk = t / (COUNT / 32), dr = t % (COUNT / 32) * 32;
      word(to + dk * pitch + dr, from + (i64)dk * inner + dr, WHOLE || (k + dk < inners && r + dr < rows));
    }
  } else {
#pragma unroll
    for (int t = 0; t < COUNT / 16; t++) {
      const int dk = t % 2 * 8, dr = t / 2 * 4;
      word(to + dk * pitch + dr, from + (i64)dk * inner + (i64)dr * row,
           WHOLE || (k + dk < inners && r + dr < rows));
    }
  }
}

// What a thread fetches next. Kept in shared memory, because registers are scarce.
struct State {
  const float *a, *b;
  int rows, columns;  // left, from the tile's first
  int tile, ahead;    // the tile, and the steps done in it
};

template <int COUNT>
__device__ __forceinline__ const float* start(const Side& x, Layout how, i64 i, int r0, int k0) {
  int r, k;
  place<COUNT>(how, r, k);
  return x.data + i * x.batch + (r0 + r) * x.row + (k0 + k) * x.inner;
}

__device__ __forceinline__ State start(const Contract& c, Layout layout_a, Layout layout_b, int tile,
                                       int ahead) {
  const int wide = ((int)c.N + BN - 1) / BN, tiles = ((int)c.M + BM - 1) / BM * wide;
  const int m0 = tile % tiles / wide * BM, n0 = tile % tiles % wide * BN, k0 = ahead * BK;
  return {start<BM>(c.a, layout_a, tile / tiles, m0, k0), start<BN>(c.b, layout_b, tile / tiles, n0, k0),
          (int)c.M - m0, (int)c.N - n0, tile, ahead};
}

// Position of a thread's results in a tile: these 4 rows and columns, and those half a tile
// further.
__device__ __forceinline__ int row(int tid) { return (tid / 32 / (BN / 64) * 4 + tid % 32 / 8) * 4; }
__device__ __forceinline__ int column(int tid) { return (tid / 32 % (BN / 64) * 8 + tid % 8) * 4; }

// grid: thread blocks.
KERNEL(ONE_BLOCK, contract, Contract) {
  const int M = c.M, N = c.N, steps = c.steps;
  DYNAMIC(float4, memory);
  State* state = (State*)memory;                      // [THREADS]
  float* sa = (float*)(state + THREADS);                   // [STAGES][BK][PITCH_A]
  float* sb = sa + STAGES * BK * PITCH_A;                  // [STAGES][BK][PITCH_B]
  float4* before = (float4*)(sb + STAGES * BK * PITCH_B);  // [16][THREADS]: results before the block
  const int tid = threadIdx.x;
  const Layout layout_a = layout_of(c.a), layout_b = layout_of(c.b);
  const int first = blockIdx.x * (int)c.share, last = (int)min(c.total, first + c.share);

  int wanted = last - first;
  state[tid] = start(c, layout_a, layout_b, first / steps, first % steps);
  auto next = [&](int stage) {
    if (wanted-- > 0) {
      State s = state[tid];
      const int inners = (int)c.K - s.ahead * BK;
      float *to_a = sa + stage * BK * PITCH_A, *to_b = sb + stage * BK * PITCH_B;
      if (s.rows >= BM && s.columns >= BN && inners >= BK) {
        load<BM, true>(to_a, s.a, layout_a, (int)c.a.row, (int)c.a.inner, 0, 0);
        load<BN, true>(to_b, s.b, layout_b, (int)c.b.row, (int)c.b.inner, 0, 0);
      } else {
        load<BM, false>(to_a, s.a, layout_a, (int)c.a.row, (int)c.a.inner, s.rows, inners);
        load<BN, false>(to_b, s.b, layout_b, (int)c.b.row, (int)c.b.inner, s.columns, inners);
      }
      s.a += BK * c.a.inner;
      s.b += BK * c.b.inner;
      if (++s.ahead == steps) s = start(c, layout_a, layout_b, s.tile + 1, 0);
      state[tid] = s;
    }
    COMMIT;
  };
#pragma unroll 1
  for (int s = 0; s < STAGES - 1; s++) next(s);

  float most[8][8];
#ifdef INDEX
  u32 winner[16];  // numbers of k blocks, four per word
#endif
  int stage = 0;
  for (int here = first; here < last;) {  // a tile, or this thread block's share of it
    const int begun = here % steps, count = min(steps - begun, last - here);
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int j = 0; j < 8; j++) most[i][j] = 0.f;
#ifdef INDEX
#pragma unroll
    for (int q = 0; q < 16; q++) {
      winner[q] = 0;
      before[q * THREADS + tid] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
#endif
    for (int done = 0; done < count; done++) {
      AWAIT(STAGES - 2);
      __syncthreads();
      next((stage + STAGES - 1) % STAGES);
      const float* pa = sa + stage * BK * PITCH_A + row(tid);
      const float* pb = sb + stage * BK * PITCH_B + column(tid);
#pragma unroll
      for (int k = 0; k < BK; k += 2) {  // two products at a time, and the maximum so far
        float x[2][8], y[2][8];
#pragma unroll
        for (int t = 0; t < 2; t++) {
          *(float4*)&x[t][0] = *(const float4*)(pa + (k + t) * PITCH_A);
          *(float4*)&x[t][4] = *(const float4*)(pa + (k + t) * PITCH_A + BM / 2);
          *(float4*)&y[t][0] = *(const float4*)(pb + (k + t) * PITCH_B);
          *(float4*)&y[t][4] = *(const float4*)(pb + (k + t) * PITCH_B + BN / 2);
        }
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
          for (int j = 0; j < 8; j++)
            most[i][j] = largest(most[i][j], size(x[0][i], y[0][j]), size(x[1][i], y[1][j]));
#ifdef INDEX
        if (KB < BK ? (k + 2) % KB == 0 : k + 2 == BK && (done + 1) % (KB / BK) == 0) {
          const u32 block = (done * BK + k) / KB;
          int me = tid;
          RECOMPUTE(me);
#pragma unroll
          for (int q = 0; q < 16; q++) {
            const int i = q / 2, j = (q % 2) * 4;
            const float4 was = before[q * THREADS + me];
            if (larger(most[i][j], was.x)) winner[q] = __byte_perm(winner[q], block, 0x3214);
            if (larger(most[i][j + 1], was.y)) winner[q] = __byte_perm(winner[q], block, 0x3240);
            if (larger(most[i][j + 2], was.z)) winner[q] = __byte_perm(winner[q], block, 0x3410);
            if (larger(most[i][j + 3], was.w)) winner[q] = __byte_perm(winner[q], block, 0x4210);
            before[q * THREADS + me] =
                make_float4(most[i][j], most[i][j + 1], most[i][j + 2], most[i][j + 3]);
          }
        }
#endif
      }
      stage = (stage + 1) % STAGES;
    }
    int me = tid;
    RECOMPUTE(me);
    const int down = row(me), over = column(me);
    if (begun) {  // by another thread block
#pragma unroll
      for (int q = 0; q < 16; q++) {
        const int i = q / 2, j = (q % 2) * 4;
        const int o = (i / 4 * (BM / 2) + down + i % 4) * BN + j / 4 * (BN / 2) + over;
        *(float4*)(c.parts + (i64)blockIdx.x * BM * BN + o) =
            make_float4(most[i][j], most[i][j + 1], most[i][j + 2], most[i][j + 3]);
#ifdef INDEX
        *(u32*)(c.numbers + (i64)blockIdx.x * BM * BN + o) = winner[q];
#endif
      }
    } else {
      const int wide = (N + BN - 1) / BN, tiles = (M + BM - 1) / BM * wide;
      const int tile = here / steps, m0 = tile % tiles / wide * BM, n0 = tile % tiles % wide * BN;
      const i64 z = tile / tiles;
      const bool quads = (((u64)c.value | c.plane << 2 | c.pitch << 2) & 15) == 0;
#pragma unroll
      for (int q = 0; q < 16; q++) {
        const int i = q / 2, j = (q % 2) * 4;
        const int m = m0 + i / 4 * (BM / 2) + down + i % 4, n = n0 + j / 4 * (BN / 2) + over;
        if (m >= M || n >= N) continue;
        float* o = c.value + z * c.plane + m * c.pitch + n;
        if (quads && n + 3 < N) {
          *(float4*)o = make_float4(most[i][j], most[i][j + 1], most[i][j + 2], most[i][j + 3]);
        } else {
#pragma unroll
          for (int e = 0; e < 4; e++)
            if (n + e < N) o[e] = most[i][j + e];
        }
#ifdef INDEX
        *(u32*)(c.blocks + (z * M + m) * ((N + 3) / 4 * 4) + n) = winner[q];
#endif
      }
    }
    here += count;
  }
}
