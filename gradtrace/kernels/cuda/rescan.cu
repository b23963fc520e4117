// Kernels that run before and after the contraction of contract.cu. Compiled on first use by
// gradtrace/kernels/cuda_contraction.py, which defines KB, the number of k per block.
//
//   pack    copies an operand of any supported dtype, strides or tables to float32, as (row, k).
//   rescan  searches the winning block of each result for the lowest k. Also combines the partial
//           results of several thread blocks for a tile.

#define LANES (KB / 4)  // of a warp, per result
#define RESULTS_PER_WARP (32 / LANES)
#define FOUR_BLOCKS 256, 4  // threads per block, and blocks per multiprocessor
#define ROUNDS 2  // in flight at the same time
#define ALONE (KB < 16)  // each lane searches by itself

// x[i, r, k] is at batch + row + inner, each from a table or a stride.
struct Operand {
  const void* data;
  const i64 *batches, *rows, *inners;
  i64 batch, row, inner;
};

struct Pack {
  Operand x;
  i64 kind, R, K, pitch;  // rows, k, and k padded with zeros
  float* out;
};

// Copies both operands, or one, in one launch.
struct Packs {
  Pack a, b;
  i64 tiles;  // tiles of 32 rows of the first operand
};

// x[i, r, k] is at i * batch + r * row + k * inner.
struct Side {
  const float* data;
  i64 batch, row, inner;
  i64 held;  // if not 0, rows are read once into shared memory, with this stride
};

struct Rescan {
  Side a, b;
  i64 M, N, K, high, wide;  // high, wide: results per thread block, powers of 2 within a tile
  float* value;             // of the thread blocks that began a tile
  i64 plane, pitch;         // strides of value from matrix to matrix and from row to row
  const u8* blocks;         // (batches, M, N up to a multiple of 4)
  const float* parts;       // of those that continued one: (thread blocks, rows, columns)
  const u8* numbers;
  i64 rows, columns, steps, share, BK;  // tile size; steps per tile, per thread block; k per step
  i64* index;               // (batches, M, N), strided; index or ids may be null
  int* ids;
  i64 plane_out, pitch_out;
  Operand given;            // provenance ids of a, or of b
  i64 ofb;
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
  const i64 i = blockIdx.z, from = place(x.batches, x.batch, i);
  // Neighbouring threads read along whichever dimension is contiguous.
  const bool along = x.inners || x.inner == 1 || x.row != 1;
#pragma unroll
  for (int step = threadIdx.y; step < 32; step += 8) {
    const int dr = along ? step : threadIdx.x, dk = along ? threadIdx.x : step;
    const int r = r0 + dr, k = k0 + dk;
    tile[dr][dk] = 0.f;
    if (r < p.R && k < p.K)
      tile[dr][dk] =
          read(x.data, p.kind, from + place(x.rows, x.row, r) + place(x.inners, x.inner, k));
  }
  __syncthreads();
#pragma unroll
  for (int step = threadIdx.y; step < 32; step += 8) {
    if (r0 + step < p.R && k0 + threadIdx.x < p.pitch)
      p.out[(i * p.R + r0 + step) * p.pitch + k0 + threadIdx.x] = tile[step][threadIdx.x];
  }
}

// Rows from the first on, and whether they can be read 4 k at a time.
struct Lines {
  const float* data;
  int row;
  bool quads;  // never past the end of k, and aligned
};

__device__ __forceinline__ Lines lines(const Side& x, float* to, int r0, int rows, int K) {
  const float* from = x.data + blockIdx.z * x.batch + r0 * x.row;
  const bool quads = (((u64)from | x.row << 2) & 15) == 0 && K % KB == 0 && x.inner == 1;
  if (!x.held) return {from, (int)x.row, quads};
  if (quads) {
    for (int at = threadIdx.x; at < rows * K / 4; at += 256) {
      const int r = at / (K / 4), k = at % (K / 4) * 4;
      fetch(to + r * x.held + k, from + r * x.row + k, 16);
    }
    return {to, (int)x.held, true};
  }
  // A warp reads 4 k of 8 rows, or 32 k of one, depending on the strides, and pads a block with
  // zeros.
  const bool along = x.inner == 1;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int dr = along ? 0 : lane % 8, dk = along ? lane : lane / 8;
  const int high = along ? 1 : 8, wide = along ? 32 : 4, held = (int)x.held - 4;
  const int across = (held + wide - 1) / wide, down = (rows + high - 1) / high;
  for (int at = warp; at < across * down; at += 8) {
    const int r = at / across * high + dr, k = at % across * wide + dk;
    if (r < rows && k < held) word(to + r * x.held + k, from + r * x.row + k * x.inner, k < K);
  }
  return {to, (int)x.held, true};
}

__device__ __forceinline__ float4 four(const Lines& x, int r, int k, int K) {
  const float* at = x.data + (r * x.row + k);
  if (x.quads) return *(const float4*)at;
  return make_float4(k < K ? at[0] : 0.f, k + 1 < K ? at[1] : 0.f, k + 2 < K ? at[2] : 0.f,
                     k + 3 < K ? at[3] : 0.f);
}

// The lowest k of a block whose product is the best value; each lane holds one result of 32, and
// gets the k of that one.
__device__ __forceinline__ int first(const Lines& a, const Lines& b, float best, int from, int top,
                                     int left, int line, int tall, int broad, int* found, int K) {
  const int lane = threadIdx.x % 32, last = (1 << line) - 1;
#if ALONE  // all rows are in shared memory
  const float* x = a.data + (min(top + (lane >> line), tall - 1) * a.row + from);
  const float* y = b.data + (min(left + (lane & last), broad - 1) * b.row + from);
  const int bits = __float_as_int(best);
  int at = 0;
#pragma unroll
  for (int q = KB - 4; q >= 0; q -= 4) {
    const float4 u = *(const float4*)(x + q), v = *(const float4*)(y + q);
    at = __float_as_int(size(u.w, v.w)) == bits ? q + 3 : at;
    at = __float_as_int(size(u.z, v.z)) == bits ? q + 2 : at;
    at = __float_as_int(size(u.y, v.y)) == bits ? q + 1 : at;
    at = __float_as_int(size(u.x, v.x)) == bits ? q : at;
  }
  return from + at;
#else  // several lanes per result, for coalesced reads
  const int sub = lane % LANES, who = lane / LANES;
  const u32 mine = (LANES == 32 ? 0xffffffffu : (1u << LANES % 32) - 1) << (who * LANES);
#pragma unroll 1
  for (int round = 0; round < LANES; round += ROUNDS) {
    float4 x[ROUNDS], y[ROUNDS];
    float size_of[ROUNDS];
    int k[ROUNDS];
#pragma unroll
    for (int u = 0; u < ROUNDS; u++) {
      const int which = (round + u) * RESULTS_PER_WARP + who;
      size_of[u] = __shfl_sync(0xffffffffu, best, which);
      k[u] = __shfl_sync(0xffffffffu, from, which) + sub * 4;
      x[u] = four(a, min(top + (which >> line), tall - 1), k[u], K);
      y[u] = four(b, min(left + (which & last), broad - 1), k[u], K);
    }
#pragma unroll
    for (int u = 0; u < ROUNDS; u++) {
      const int bits = __float_as_int(size_of[u]);
      int at = __float_as_int(size(x[u].w, y[u].w)) == bits ? 3 : 4;
      at = __float_as_int(size(x[u].z, y[u].z)) == bits ? 2 : at;
      at = __float_as_int(size(x[u].y, y[u].y)) == bits ? 1 : at;
      at = __float_as_int(size(x[u].x, y[u].x)) == bits ? 0 : at;
      const u32 those = __ballot_sync(0xffffffffu, at < 4) & mine;
      if (lane == __ffs(those) - 1) found[(round + u) * RESULTS_PER_WARP + who] = k[u] + at;
    }
  }
  __syncwarp();
  const int k = found[lane];
  __syncwarp();
  return k;
#endif
}

// grid: (tiles of results, 1, batches). The 32 lanes of a warp take 32 results: each lane reads one
// value, then several lanes search its block cooperatively, then each lane writes one result.
KERNEL(FOUR_BLOCKS, rescan, Rescan) {
  __shared__ int found[8][32];
  DYNAMIC(float4, memory);
  const int M = c.M, N = c.N, K = c.K, high = c.high, wide = c.wide;
  const int over = (N + wide - 1) / wide, m0 = blockIdx.x / over * high, n0 = blockIdx.x % over * wide;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tall = min(high, M - m0), broad = min(wide, N - n0);
  float* second = (float*)memory + (c.a.held ? high * c.a.held : 0);
  const Lines a = lines(c.a, (float*)memory, m0, tall, K);
  const Lines b = lines(c.b, second, n0, broad, K);
  if (c.a.held || c.b.held) {
    COMMIT;
    AWAIT(0);
    __syncthreads();
  }
  // These results are of one tile. One thread block of contract has begun it; the following ones
  // may have continued it.
  const int rows = c.rows, columns = c.columns, share = c.share, across = (N + columns - 1) / columns;
  const int tile = (blockIdx.z * ((M + rows - 1) / rows) + m0 / rows) * across + n0 / columns;
  const int begin = tile * (int)c.steps, end = begin + (int)c.steps, heir = begin / share + 1;
  const i64 z = blockIdx.z;
  const int pitch = c.pitch, padded = (N + 3) / 4 * 4, pitch_out = c.pitch_out;
  float* value = c.value + z * c.plane + m0 * c.pitch + n0;
  const u8* blocks = c.blocks + ((z * M + m0) * padded + n0);
  const i64 corner = z * c.plane_out + m0 * c.pitch_out + n0;
  // 32 results: of one row, or 8 each of four rows. Sizes are powers of 2: shifts and masks. Where each
  // lane searches alone, what the next results begin with is read before these are searched, and ids
  // are written after the next search: both take as long as one. Others lack the registers.
  const int line = wide < 32 ? 3 : 5, groups = 31 - __clz(wide) - line, last = (1 << line) - 1;
  float best_next = 0.f;
  int from_next = 0, id = 0, id_at = -1;  // -1: none waits to be written
  auto begun = [&](int g) {
    const int top = (g >> groups) << (5 - line), left = (g - (g >> groups << groups)) << line;
    const int dm = min(top + (lane >> line), tall - 1), dn = min(left + (lane & last), broad - 1);
    best_next = value[dm * pitch + dn];
    if (c.blocks) from_next = blocks[dm * padded + dn] * KB;
  };
  if (ALONE) begun(warp);
  for (int g = warp; g < high * wide / 32; g += 8) {
    const int top = (g >> groups) << (5 - line), left = (g - (g >> groups << groups)) << line;
    if (!ALONE && (top >= tall || left >= broad)) continue;
    if (!ALONE) begun(g);
    float best = best_next;
    int from = from_next;
    if (ALONE) begun(g + 8);
    if (top >= tall || left >= broad) continue;
    const int dm = min(top + (lane >> line), tall - 1), dn = min(left + (lane & last), broad - 1);
    const bool there = top + (lane >> line) < tall && left + (lane & last) < broad;
    const int m = m0 + dm, n = n0 + dn;
    const float was = best;
    for (int by = heir; by * share < end; by++) {
      const i64 at = ((i64)by * rows + (m & (rows - 1))) * columns + (n & (columns - 1));
      const float other = c.parts[at];
      if (!larger(other, best)) continue;
      best = other;
      if (c.blocks) from = (by * share - begin) * (int)c.BK + c.numbers[at] * KB;
    }
    if (there && larger(best, was)) value[dm * pitch + dn] = best;
    if (!c.blocks) continue;
    const int k = first(a, b, best, from, top, left, line, tall, broad, found[warp], K);
    if (id_at >= 0) c.ids[corner + id_at] = id;
    id_at = -1;
    if (!there) continue;
    const int o = dm * pitch_out + dn;
    if (c.index) c.index[corner + o] = best == 0.f ? 0 : k;
    if (!c.ids) continue;
    const Operand& t = c.given;
    const i64 at = place(t.batches, t.batch, z) + place(t.rows, t.row, c.ofb ? n : m);
    id = best == 0.f ? 0 : ((const int*)t.data)[at + place(t.inners, t.inner, k)];
    if (ALONE)
      id_at = o;
    else
      c.ids[corner + o] = id;
  }
  if (id_at >= 0) c.ids[corner + id_at] = id;
}
