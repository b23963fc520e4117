// The (max, x) contraction of bfloat16 operands with argmax, on GPUs since Hopper: value[m, n] =
// max_k |a[m, k] b[k, n]| in float32, and the lowest k where it is attained. Compiled on first use
// by gradtrace/kernels/cuda_pair_contraction.py.
//
//   pack_pairs      copies |x| as (row, k).
//   contract_pairs  multiplies two k at a time, with products rounded to bfloat16, and finds the
//                   largest per result, and the first and the last block of k where it is attained.
//   rescan_pairs    searches these blocks, and those between them, with exact products.
//
// Rounding keeps the order of products, so that the largest of them is among those whose rounded
// value is the largest. The exception is 0: where products may be too small for bfloat16, results
// of 0 are searched from the first to the last k.
//
// Work is divided as in contract.cu: equal shares of steps of BK, which may begin in the middle of a
// tile; a thread block that continues a tile, which each does at most once and first, writes to its
// own part of the workspace, and rescan_pairs combines them.

#define BM 128
#define BN 128
#define BK 32
#define STAGES 2
#define THREADS 256
#define TWO_BLOCKS THREADS, 2    // blocks per multiprocessor: with 16 warps 8% faster than with 8
#define PITCH 5                  // stride of rows in shared memory, in 16 bytes: no bank conflicts
#define LANES (BK / 8)           // of a warp, per result
#define RESULTS_PER_WARP (32 / LANES)
#define SEARCHERS 512
#define SEARCH_BLOCKS SEARCHERS, 2

// x[i, r, k] is at batch + row + inner, each from a table or a stride.
struct Operand {
  const void* data;
  const i64 *batches, *rows, *inners;
  i64 batch, row, inner;
};

struct Pack {
  Operand x;
  i64 R, K, pitch;  // rows, k, and k padded with zeros
  unsigned short* out;
};

// Smallest numbers other than 0, as 0xffff less their bits, of a and b: while they are packed, and
// then for the search.
struct Smallest {
  u32 packed[2], found[2];
};

struct Packs {
  Pack a, b;
  i64 tiles;  // tiles of 32 rows of the first operand
  Smallest* smallest;
};

struct Contract {
  const uint4 *a, *b;  // (batches, rows, K), eight k each
  u32* keys;           // (batches, M, N): rounded value, first and last block
  u32* parts;          // of the thread blocks that continue a tile: (thread blocks, BM, BN)
  Smallest* smallest;
  i64 M, N, K;
  i64 steps, share, total;  // steps of BK: per tile, per thread block, in total
};

struct Rescan {
  const uint4 *a, *b;
  const u32 *keys, *parts;
  const Smallest* smallest;
  i64 M, N, K, steps, share;
  float* value;  // (batches, M, N), strided, as are index and ids; each may be null
  i64* index;
  int* ids;
  i64 plane, pitch;
  Operand given;  // provenance ids of a, or of b
  i64 ofb;
};

// Products of two pairs, and the maximum of three pairs of nonnegative numbers; NaN is the largest.
#ifdef EMULATED
__device__ __forceinline__ u32 product(u32 x, u32 y) {
  u32 both = 0;
  for (int at = 0; at < 32; at += 16) {
    const float p = __fmul_rn(of_bfloat(x >> at & 0xffff), of_bfloat(y >> at & 0xffff));
    const u32 bits = (u32)__float_as_int(p);
    both |= (bits == 0x7fffffff ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16) << at;
  }
  return both;
}
__device__ __forceinline__ u32 largest_pair(u32 a, u32 b, u32 c) {
  return max(max(a >> 16, b >> 16), c >> 16) << 16 | max(max(a & 0xffff, b & 0xffff), c & 0xffff);
}
#else
__device__ __forceinline__ u32 product(u32 x, u32 y) {
  u32 p;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(p) : "r"(x), "r"(y));
  return p;
}
__device__ __forceinline__ u32 largest_pair(u32 a, u32 b, u32 c) { return __vimax3_s16x2(a, b, c); }
#endif

// grid: (columns of k / 32, rows of both / 32, batches), 32 x 8 threads.
KERNEL(256, pack_pairs, Packs) {
  __shared__ unsigned short tile[32][34];
  const bool second = blockIdx.y >= c.tiles;
  const Pack& p = second ? c.b : c.a;
  const Operand& x = p.x;
  const int k0 = blockIdx.x * 32, r0 = (blockIdx.y - (second ? (int)c.tiles : 0)) * 32;
  const i64 i = blockIdx.z, from = place(x.batches, x.batch, i);
  // Neighbouring threads read along whichever dimension is contiguous.
  const bool along = x.inners || x.inner == 1 || x.row != 1;
  u32 smallest = 0;
#pragma unroll
  for (int step = threadIdx.y; step < 32; step += 8) {
    const int dr = along ? step : threadIdx.x, dk = along ? threadIdx.x : step;
    const int r = r0 + dr, k = k0 + dk;
    u32 bits = 0;
    if (r < p.R && k < p.K) {
      const i64 at = from + place(x.rows, x.row, r) + place(x.inners, x.inner, k);
      bits = ((const unsigned short*)x.data)[at] & 0x7fff;
    }
    tile[dr][dk] = bits;
    if (bits) smallest = max(smallest, 0xffff - bits);
  }
  smallest = __syncthreads_or(smallest > 0xffff - 0x2000) ? smallest : 0;  // below 2^-63: rare
#pragma unroll
  for (int step = threadIdx.y; step < 32; step += 8) {
    if (r0 + step < p.R && k0 + threadIdx.x < p.pitch)
      p.out[(i * p.R + r0 + step) * p.pitch + k0 + threadIdx.x] = tile[step][threadIdx.x];
  }
  if (smallest) atomicMax(&c.smallest->packed[second], smallest);
}

// Position of a thread's results in a tile: this row and every 4th, this column and every 8th.
__device__ __forceinline__ int row(int tid) { return tid / 64 * 32 + tid % 32 / 8; }
__device__ __forceinline__ int column(int tid) { return tid / 32 % 2 * 64 + tid % 8; }

// The key of a result after a block with this largest value (in the upper half): an equal value
// makes it the last block, a larger one also the first.
__device__ __forceinline__ int joined(int key, u32 value, u32 since, u32 block) {
  const int other = max(key, (int)(value | since));
  return (int)(value | 0xffff) >= key ? (other & ~0xff) | (int)block : other;
}

// grid: thread blocks.
KERNEL(TWO_BLOCKS, contract_pairs, Contract) {
  const int steps = c.steps;
  DYNAMIC(uint4, memory);
  uint4* sa = memory;                            // [STAGES][BM][PITCH]
  uint4* sb = sa + STAGES * BM * PITCH;          // [STAGES][BN][PITCH]
  int4* keys = (int4*)(sb + STAGES * BN * PITCH);  // [16][THREADS]: value, 255 less first, last
  const int tid = threadIdx.x;
  const int first = blockIdx.x * (int)c.share, last = (int)min(c.total, first + c.share);
  if (blockIdx.x == 0 && tid < 2) {
    c.smallest->found[tid] = c.smallest->packed[tid];
    c.smallest->packed[tid] = 0;
  }

  // Registers are scarce: what follows from these numbers is recomputed at every step.
  auto fetched = [&](int step, int stage) {
    int me = threadIdx.x;
    RECOMPUTE(me);
    RECOMPUTE(step);
    const int N = c.N, M = c.M, line = (int)c.K / 8, wide = (N + BN - 1) / BN;
    const int tiles = (M + BM - 1) / BM * wide, tile = step / (int)c.steps;
    const int k = (step - tile * (int)c.steps) * (BK / 8) + me % 4;
    const int z = tile / tiles, down = tile - z * tiles;
    const int m0 = down / wide * BM, n0 = down % wide * BN;
#pragma unroll
    for (int r = me / 4; r < BM; r += THREADS / 4) {
      const int size = m0 + r < M ? 16 : 0;
      fetch(sa + (stage * BM + r) * PITCH + me % 4, c.a + ((i64)z * M + min(m0 + r, M - 1)) * line + k,
            size);
    }
#pragma unroll
    for (int r = me / 4; r < BN; r += THREADS / 4) {
      const int size = n0 + r < N ? 16 : 0;
      fetch(sb + (stage * BN + r) * PITCH + me % 4, c.b + ((i64)z * N + min(n0 + r, N - 1)) * line + k,
            size);
    }
  };
  fetched(first, 0);
  COMMIT;

  u32 most[8][8];  // of even k and of odd k
  int stage = 0;
  for (int here = first; here < last;) {  // a tile, or this thread block's share of it
    const int begun = here % steps, count = min(steps - begun, last - here);
#pragma unroll
    for (int q = 0; q < 16; q++) keys[q * THREADS + tid] = {0, 0, 0, 0};
    for (int done = 0; done < count; done++) {
      AWAIT(0);
      __syncthreads();
      if (here + done + 1 < last) fetched(here + done + 1, stage ^ 1);
      COMMIT;
      int me = threadIdx.x;
      RECOMPUTE(me);
      const uint2* pa = (const uint2*)(sa + (stage * BM + row(me)) * PITCH);
      const uint2* pb = (const uint2*)(sb + (stage * BN + column(me)) * PITCH);
#pragma unroll
      for (int k = 0; k < BK / 4; k++) {
        uint2 x[8];
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = pa[i * 8 * PITCH + k];
#pragma unroll
        for (int j = 0; j < 8; j++) {
          const uint2 y = pb[j * 16 * PITCH + k];
#pragma unroll
          for (int i = 0; i < 8; i++) {
            const u32 was = k == 0 ? 0 : most[i][j];
            most[i][j] = largest_pair(was, product(x[i].x, y.x), product(x[i].y, y.y));
          }
        }
      }
      const u32 block = done, since = (255 - block) << 8;
#pragma unroll
      for (int q = 0; q < 16; q++) {
        const int4 was = keys[q * THREADS + me];
        int key[4] = {was.x, was.y, was.z, was.w};
#pragma unroll
        for (int t = 0; t < 4; t += 2) {
          const u32 u = most[q / 2][q % 2 * 4 + t], v = most[q / 2][q % 2 * 4 + t + 1];
          const u32 both = largest_pair(__byte_perm(u, v, 0x5410), __byte_perm(u, v, 0x7632), 0);
          key[t] = joined(key[t], both << 16, since, block);
          key[t + 1] = joined(key[t + 1], both & 0xffff0000, since, block);
        }
        keys[q * THREADS + me] = {key[0], key[1], key[2], key[3]};
      }
      stage ^= 1;
    }
    int me = tid;
    RECOMPUTE(me);
    const int M = c.M, N = c.N, wide = (N + BN - 1) / BN, tiles = (M + BM - 1) / BM * wide;
    const int tile = here / steps, down = tile % tiles;
    const int m0 = down / wide * BM, n0 = down % wide * BN;
    const i64 z = tile / tiles;
#pragma unroll
    for (int q = 0; q < 16; q++) {
      const int4 was = keys[q * THREADS + me];
      const int found[4] = {was.x, was.y, was.z, was.w};
#pragma unroll
      for (int t = 0; t < 4; t++) {
        const u32 key = found[t] ^ 0xff00;
        const int dm = row(me) + q / 2 * 4, dn = column(me) + (q % 2 * 4 + t) * 8;
        if (begun)  // by another thread block
          c.parts[((i64)blockIdx.x * BM + dm) * BN + dn] = key;
        else if (m0 + dm < M && n0 + dn < N)
          c.keys[(z * M + m0 + dm) * N + n0 + dn] = key;
      }
    }
    here += count;
  }
}

// The largest product of 8 k, and the lowest k where it is attained, if it exceeds the one so far.
__device__ __forceinline__ void search(const uint4& x, const uint4& y, int from, int& best, int& k) {
  const u32 u[4] = {x.x, x.y, x.z, x.w}, v[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
  for (int w = 0; w < 4; w++) {
    const int even = __float_as_int(__fmul_rn(__uint_as_float(u[w] << 16), __uint_as_float(v[w] << 16)));
    const int odd = __float_as_int(
        __fmul_rn(__uint_as_float(u[w] & 0xffff0000), __uint_as_float(v[w] & 0xffff0000)));
    if (even > best) best = even, k = from + 2 * w;
    if (odd > best) best = odd, k = from + 2 * w + 1;
  }
}

// The best of so many lanes, neighbours of each other; of equal ones the lowest k.
template <int COUNT>
__device__ __forceinline__ void join(int& best, int& k) {
#pragma unroll
  for (int with = 1; with < COUNT; with *= 2) {
    const int theirs = __shfl_xor_sync(0xffffffffu, best, with);
    const int there = __shfl_xor_sync(0xffffffffu, k, with);
    if (theirs > best || (theirs == best && there < k)) best = theirs, k = there;
  }
}

// grid: (tiles of 64 x 32 results, 1, batches). The lanes of a warp take 32 results of a row: each
// reads one key, then several lanes search a block cooperatively, then each writes one result.
KERNEL(SEARCH_BLOCKS, rescan_pairs, Rescan) {
  const int M = c.M, N = c.N, line = (int)c.K / 8, share = c.share;
  const int over = (N + 31) / 32, m0 = (int)blockIdx.x / over * 64, n0 = (int)blockIdx.x % over * 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const i64 z = blockIdx.z;
  const int wide = (N + BN - 1) / BN;
  const int tile = ((int)blockIdx.z * ((M + BM - 1) / BM) + m0 / BM) * wide + n0 / BN;
  const int begin = tile * (int)c.steps, end = begin + (int)c.steps, heir = begin / share + 1;
  const u32 tiny_a = 0xffff - c.smallest->found[0], tiny_b = 0xffff - c.smallest->found[1];
  // Products below 2^-126 lose digits, then all. Numbers from 2^-63 on are not told from each other.
  const float least = __fmul_rn(of_bfloat(min(tiny_a, 0x2000u)), of_bfloat(min(tiny_b, 0x2000u)));
  const bool vanish = __float_as_int(least) < 0x00800000;
  const int n = min(n0 + lane, N - 1);
  for (int m = m0 + warp; m < min(m0 + 64, M); m += SEARCHERS / 32) {
    const u32 key = c.keys[(z * M + m) * N + n];
    u32 rounded = key >> 16;
    int from = (int)(key >> 8 & 0xff) * BK, to = (int)(key & 0xff) * BK;
    for (int by = heir; by * share < end; by++) {
      const u32 other = c.parts[((i64)by * BM + m % BM) * BN + n % BN];
      const int base = (by * share - begin) * BK;
      if (other >> 16 > rounded) {
        rounded = other >> 16;
        from = base + (int)(other >> 8 & 0xff) * BK;
        to = base + (int)(other & 0xff) * BK;
      } else if (other >> 16 == rounded) {
        to = base + (int)(other & 0xff) * BK;
      }
    }
    if (!rounded) from = 0, to = vanish ? (int)c.K - BK : 0;
    const uint4* a = c.a + (z * M + m) * line;
    const uint4* b = c.b + z * N * line;
    int best = 0, k = 0;
#pragma unroll 2
    for (int round = 0; round < LANES; round++) {
      const int which = round * RESULTS_PER_WARP + lane / LANES;
      const int at = __shfl_sync(0xffffffffu, from, which) + lane % LANES * 8;
      int most = 0, where = at;
      search(a[at / 8], b[(i64)min(n0 + which, N - 1) * line + at / 8], at, most, where);
      join<LANES>(most, where);
      const int source = lane % RESULTS_PER_WARP * LANES;
      const int theirs = __shfl_sync(0xffffffffu, most, source);
      const int there = __shfl_sync(0xffffffffu, where, source);
      if (lane / RESULTS_PER_WARP == round) best = theirs, k = there;
    }
    for (u32 several = __ballot_sync(0xffffffffu, to > from); several; several &= several - 1) {
      const int which = __ffs(several) - 1;
      const int start = __shfl_sync(0xffffffffu, from, which);
      const int stop = __shfl_sync(0xffffffffu, to, which) + BK;
      int most = 0, where = start;
      for (int at = start + lane * 8; at < stop; at += 256)
        search(a[at / 8], b[(i64)min(n0 + which, N - 1) * line + at / 8], at, most, where);
      join<32>(most, where);
      if (lane == which) best = most, k = where;
    }
    if (n0 + lane >= N) continue;
    const i64 o = z * c.plane + m * c.pitch + n;
    if (c.value) c.value[o] = __int_as_float(best);
    if (c.index) c.index[o] = best ? k : 0;
    if (!c.ids) continue;
    const Operand& t = c.given;
    const i64 at = place(t.batches, t.batch, z) + place(t.rows, t.row, c.ofb ? n : m);
    c.ids[o] = best ? ((const int*)t.data)[at + place(t.inners, t.inner, k)] : 0;
  }
}
