// Elementwise, index and reduction kernels on NVIDIA GPUs: value and provenance id of every element
// in one pass over memory. gradtrace/kernels/steps.py defines what each computes; the bits are the
// same.
//
// For float and double; half precisions are read as float.

#define FULL 0xffffffffu

template <typename T> struct Kind;
template <> struct Kind<float> { typedef int Bits; };
template <> struct Kind<double> { typedef i64 Bits; };

// Element `at` as T; kinds are those of cuda_steps.py: float, double, half, bfloat16.
template <typename T>
__device__ __forceinline__ T get(const void* data, int kind, i64 at) {
  if (kind == 0) return (T)((const float*)data)[at];
  if (kind == 1) return (T)((const double*)data)[at];
  const unsigned short bits = ((const unsigned short*)data)[at];
  return (T)(kind == 3 ? of_bfloat(bits) : of_half(bits));
}

// Products and sums that are rounded separately: the compiler must not fuse them.
__device__ __forceinline__ float mul(float x, float y) { return __fmul_rn(x, y); }
__device__ __forceinline__ double mul(double x, double y) { return __dmul_rn(x, y); }
__device__ __forceinline__ float add(float x, float y) { return __fadd_rn(x, y); }
__device__ __forceinline__ double add(double x, double y) { return __dadd_rn(x, y); }
__device__ __forceinline__ float most_of(float x, float y) { return fmaxf(x, fabsf(y)); }
__device__ __forceinline__ double most_of(double x, double y) { return fmax(x, fabs(y)); }

// Several leaves per launch: the number of jobs, and a job for each leaf. The thread blocks of a
// job follow those of the job before; a block finds its job by binary search for their first.
template <typename Job, int MOST>
struct Jobs {
  i64 count;
  Job job[MOST];  // MOST: a power of two

  __device__ __forceinline__ const Job& mine() const {
    int found = 0;
#pragma unroll
    for (int step = MOST / 2; step; step /= 2) {
      if (found + step < count && job[found + step].first <= blockIdx.x) found += step;
    }
    return job[found];
  }
};

// Maximum of terms ----------------------------------------------------------------------------

#define DIMS 6

// Offset of element i in each of N tensors of one shape; dimensions and strides innermost first.
template <typename Given, int N>
__device__ __forceinline__ void find(const Given& c, i64 i, i64 (&at)[N]) {
  i64 rest = i;
#pragma unroll
  for (int k = 0; k < N; k++) at[k] = 0;
#pragma unroll
  for (int d = 0; d < DIMS; d++) {
    if (d >= c.dims) break;
    i64 here = rest;
    if (d + 1 < c.dims) {
      const i64 size = c.shape[d];
      // Divide in 32 bits where possible: 64-bit division is slow.
      const i64 more = (rest | size) >> 32 ? rest / size : (i64)((u32)rest / (u32)size);
      here = rest - more * size;
      rest = more;
    }
#pragma unroll
    for (int k = 0; k < N; k++) at[k] += here * c.step[k][d];
  }
}

struct Merge {
  void* size;
  int* ids;
  const void* value;
  const int* other;  // if null, the constant
  i64 constant, shift, kind, n, dims;
  i64 shape[DIMS], step[4][DIMS];  // strides of size, ids, value, other; innermost first
};

template <typename T>
__device__ void merge(const Merge& c) {
  for (i64 i = (i64)blockIdx.x * 256 + threadIdx.x; i < c.n; i += (i64)gridDim.x * 256) {
    i64 at[4];
    find(c, i, at);
    const int id = c.other ? c.other[at[3]] : (int)c.constant;
    const T value = get<T>(c.value, c.kind, at[2]);
    T* size = (T*)c.size + at[0];
    if (id && sized(value) > sized(*size)) {
      *size = number(sized(value));
      c.ids[at[1]] = id + (int)c.shift;
    }
  }
}
KERNEL(256, merge_float, Merge) { merge<float>(c); }
KERNEL(256, merge_double, Merge) { merge<double>(c); }

// Provenance id of the larger of two terms; SIZED: and its size.
template <bool SIZED>
struct Larger {
  int* out;
  const void* first;
  const int* mine;
  const void* second;
  const int* theirs;
  void* size;  // null if not SIZED
  i64 constants[2];  // ids where mine or theirs is null
  i64 shift, unmasked, kinds[2], n, dims;
  i64 shape[DIMS], step[5 + SIZED][DIMS];  // strides of out, first, mine, second, theirs, size
};

template <typename T, bool SIZED>
__device__ void larger(const Larger<SIZED>& c) {
  for (i64 i = (i64)blockIdx.x * 256 + threadIdx.x; i < c.n; i += (i64)gridDim.x * 256) {
    i64 at[5 + SIZED];
    find(c, i, at);
    auto size = sized(get<T>(c.first, c.kinds[0], at[1]));
    int id = c.mine ? c.mine[at[2]] : (int)c.constants[0];
    if (c.unmasked && !size) id = 0;
    const int other = c.theirs ? c.theirs[at[4]] : (int)c.constants[1];
    if (other) {
      const auto theirs = sized(get<T>(c.second, c.kinds[1], at[3]));
      if (theirs > size) {
        id = other + (int)c.shift;
        size = theirs;
      }
    }
    c.out[at[0]] = id;
    if (SIZED) ((T*)c.size)[at[4 + SIZED]] = number(size);
  }
}
KERNEL(256, larger_float, Larger<false>) { larger<float>(c); }
KERNEL(256, larger_double, Larger<false>) { larger<double>(c); }
KERNEL(256, larger_sized_float, Larger<true>) { larger<float>(c); }
KERNEL(256, larger_sized_double, Larger<true>) { larger<double>(c); }

// Provenance ids, 0 where weight * x is 0 in float; for x and weight in float or half precision.
struct Scaled {
  int* out;
  const void* x;
  const void* weight;  // if null, the constant
  const int* ids;      // if null, all are 1
  i64 constant;        // the bits of a float
  i64 kinds[2], n, dims;
  i64 shape[DIMS], step[4][DIMS];  // strides of out, x, weight, ids
};

KERNEL(256, scaled_ids, Scaled) {
  for (i64 i = (i64)blockIdx.x * 256 + threadIdx.x; i < c.n; i += (i64)gridDim.x * 256) {
    i64 at[4];
    find(c, i, at);
    const float x = get<float>(c.x, c.kinds[0], at[1]);
    const float weight =
        c.weight ? get<float>(c.weight, c.kinds[1], at[2]) : __int_as_float((int)c.constant);
    c.out[at[0]] = mul(x, weight) != 0 ? (c.ids ? c.ids[at[3]] : 1) : 0;
  }
}

// Counts and sums by provenance id ------------------------------------------------------------

// Sums are exact and rounded once, at the end, so that the order of additions does not matter: a
// value is an integer number of units (the smallest positive number), cut into one or two pieces of
// 32 bits, and each piece is added to the bin of its exponent; bins are 8 bits apart. A thread
// block has its own bins in shared memory, of 32 bits and a count of carries, for the range of
// exponents that most values fall in; other values are added to global memory directly.

#define TALLY_THREADS 512  // threads per block
#define BATCH 8            // elements that a thread reads at a time
#define HEAD 16            // words before the bins: number of finished blocks, bitmap of used bins

template <typename T> struct Cut;
template <> struct Cut<float> {
  static const int BINS = 40, WINDOW = 8, ABOVE = 0, UNIT = -149;
};
template <> struct Cut<double> {
  static const int BINS = 264, WINDOW = 12, ABOVE = 4, UNIT = -1074;
};

// A value in units: mantissa bits and their left shift. An exponent field of 255 or 2047 means
// infinity or NaN.
struct Parts {
  u64 bits;
  int shift;
  bool finite;
};

__device__ __forceinline__ Parts parts(int size) {
  const int field = size >> 23;
  return {(u64)(u32)((size & 0x7fffff) | (field ? 0x800000 : 0)), field ? field - 1 : 0, field < 255};
}

__device__ __forceinline__ Parts parts(i64 size) {
  const int field = (int)(size >> 52);
  const u64 rest = (u64)size & 0xfffffffffffffULL;
  return {field ? rest | 1ULL << 52 : rest, field ? field - 1 : 0, field < 2047};
}

struct Tally {
  const int* ids;
  const void* gradient;
  i64 kind, n, count, low;  // ids from low to low + count
  i64 slots, length;        // ids in shared memory, elements per block
  u64* work;                // left zeroed: HEAD, then [count] counts, non-finite flags, bins
  double* sums;
  i64* counts;
  i64 first, blocks;  // thread blocks of this job
};
typedef Jobs<Tally, 32> Tallies;

#define INFINITE 1ULL
#define NOT_A_NUMBER 2ULL

// |x| as bits of BATCH elements of a thread; 0 past the end.
template <typename T>
__device__ __forceinline__ void read(const void* data, int kind, int at, int end,
                                     typename Kind<T>::Bits* size) {
  if (kind == (sizeof(T) == 4 ? 0 : 1)) {
#pragma unroll
    for (int u = 0; u < BATCH; u++) {
      const int i = at + u * TALLY_THREADS;
      size[u] = i < end ? sized(((const T*)data)[i]) : 0;
    }
  } else {
#pragma unroll
    for (int u = 0; u < BATCH; u++) {
      const int i = at + u * TALLY_THREADS;
      const unsigned short bits = i < end ? ((const unsigned short*)data)[i] : 0;
      size[u] = sized((T)(kind == 3 ? of_bfloat(bits) : of_half(bits)));
    }
  }
}

template <typename T>
struct Work {
  u64* rows;
  i64 count;
  u32* used;  // bitmap of the bins that this block has used

  __device__ __forceinline__ u64* bin(int b, int id) const { return rows + (2 + b) * count + id; }

  __device__ __forceinline__ void use(int b) const {
    if (!(used[b / 32] >> b % 32 & 1)) atomicOr(used + b / 32, 1u << b % 32);
  }

  __device__ __forceinline__ void add(int b, int id, u64 units) const {
    use(b);
    atomicAdd(bin(b, id), units);
  }

  // Adds a value to global memory directly.
  __device__ __forceinline__ void take(int id, typename Kind<T>::Bits size) const {
    const Parts number = parts(size);
    if (!number.finite) {
      const bool infinite = !(size & (((typename Kind<T>::Bits)1 << (sizeof(T) == 4 ? 23 : 52)) - 1));
      atomicOr(rows + count + id, infinite ? INFINITE : NOT_A_NUMBER);
      return;
    }
    const u64 units = number.bits << (number.shift & 7);
    if ((u32)units) add(number.shift >> 3, id, (u32)units);
    if (units >> 32) add((number.shift >> 3) + 4, id, units >> 32);
  }
};

// The bins of an id as a double, rounded to nearest, ties to even: the highest 64 bits form two
// exact doubles; the bits below are reduced to a sticky bit.
template <typename T>
__device__ __forceinline__ double rounded(const Work<T>& work, int id, int first, int last) {
  u64 carry = 0, window = 0, held = 0;
  bool lost = false, below = false;
  int top = 0;
#pragma unroll 4
  for (int b = first; b <= last; b++) {
    if (work.used[b / 32] >> b % 32 & 1) carry += __ldcg(work.bin(b, id));
    const u64 digit = carry & 255;
    carry >>= 8;
    lost |= (window & 255) != 0;
    window = window >> 8 | digit << 56;
    if (digit) {
      held = window;
      below = lost;
      top = b;
    }
  }
  for (int b = last + 1; carry; b++) {
    const u64 digit = carry & 255;
    carry >>= 8;
    lost |= (window & 255) != 0;
    window = window >> 8 | digit << 56;
    if (digit) {
      held = window;
      below = lost;
      top = b;
    }
  }
  const double high = (double)(u32)(held >> 32) * 0x1p32, low = (double)((u32)held | (u32)below);
  const int power = 8 * (top - 7) + Cut<T>::UNIT, some = max(power, -1000);
  return __dadd_rn(high, low) * __longlong_as_double((i64)(some + 1023) << 52) *
         __longlong_as_double((i64)(power - some + 1023) << 52);
}

// The last block to finish rounds the sums of all blocks, and resets the workspace to 0.
template <typename T>
__device__ void finish(const Tally& c, const Work<T>& work) {
  const int tid = threadIdx.x, words = (Cut<T>::BINS + 31) / 32;
  const u32 blocks = c.blocks;
  u64* head = c.work;
  __syncthreads();
  if (blocks > 1) {
    __shared__ bool last;
    if (tid < words && work.used[tid]) atomicOr((u32*)(head + 1) + tid, work.used[tid]);
    __threadfence();
    __syncthreads();
    if (tid == 0) last = atomicAdd((u32*)head, 1u) == blocks - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    if (tid < words) work.used[tid] = __ldcg((u32*)(head + 1) + tid);
    __syncthreads();
  }
  int lowest = Cut<T>::BINS, highest = -1;
  for (int w = 0; w < words; w++) {
    const u32 here = work.used[w];
    if (!here) continue;
    lowest = min(lowest, 32 * w + __ffs(here) - 1);
    highest = 32 * w + 31 - __clz(here);
  }
  for (int id = tid; id < work.count; id += TALLY_THREADS) {
    u64* at = work.rows + id;
    const u64 number = __ldcg(at);
    double sum = 0.0;
    if (number) {
      const u64 odd = __ldcg(at + work.count);
      sum = rounded<T>(work, id, lowest, highest);
      if (odd) sum = __longlong_as_double(odd & NOT_A_NUMBER ? 0x7ff8000000000000LL : 0x7ff0000000000000LL);
      at[0] = at[work.count] = 0;
      for (int b = lowest; b <= highest; b++) {
        if (work.used[b / 32] >> b % 32 & 1) *work.bin(b, id) = 0;
      }
    }
    c.counts[id] = number;
    c.sums[id] = sum;
  }
  if (blocks > 1 && tid < HEAD) head[tid] = 0;
}

// The largest bin of the first elements that the block reads, and one more.
template <typename T>
__device__ __forceinline__ int highest_bin(typename Kind<T>::Bits most, int* top) {
  int bin = (parts(most).shift >> 3) + Cut<T>::ABOVE;
  for (int half = 16; half; half /= 2) bin = max(bin, __shfl_xor_sync(FULL, bin, half));
  if (threadIdx.x % 32 == 0) atomicMax(top, bin);
  __syncthreads();
  return min(*top + 1, Cut<T>::BINS - 1);
}

// grid: (n / length of each job), TALLY_THREADS threads; shared memory: the words of `table`.
template <typename T>
__device__ void tally(const Tallies& all) {
  typedef typename Kind<T>::Bits B;
  const Tally& c = all.mine();
  const int WINDOW = Cut<T>::WINDOW;
  DYNAMIC(u32, table);  // counts, [WINDOW] bins, [WINDOW] carries, owners; [slots] each
  __shared__ u32 used[(Cut<T>::BINS + 31) / 32];
  __shared__ int top;
  const int tid = threadIdx.x, slots = c.slots, count = c.count, low = c.low;
  const bool shares = count > slots;  // several ids map to one slot: the first owns it
  u32* bins = table + slots;
  int* owners = (int*)(table + (1 + 2 * WINDOW) * slots);
  const Work<T> work = {c.work + HEAD, c.count, used};
  const int first = (int)(blockIdx.x - c.first) * (int)c.length, end = min((int)c.n, first + (int)c.length);
  for (int k = tid; k < (1 + 2 * WINDOW) * slots; k += TALLY_THREADS) table[k] = 0;
  if (shares) {
    for (int k = tid; k < slots; k += TALLY_THREADS) owners[k] = -1;
  }
  if (tid < (Cut<T>::BINS + 31) / 32) used[tid] = 0;
  if (tid == 0) top = 0;

  int id[BATCH];
  B size[BATCH];
  int base = 0;
  for (int i = first; i < end; i += TALLY_THREADS * BATCH) {
#pragma unroll
    for (int u = 0; u < BATCH; u++) {  // many reads in flight
      const int at = i + tid + u * TALLY_THREADS;
      id[u] = at < end ? c.ids[at] - low : -1;
    }
    read<T>(c.gradient, c.kind, i + tid, end, size);
    if (i == first) {
      __syncthreads();
      B most = 0;
#pragma unroll
      for (int u = 0; u < BATCH; u++) most = max(most, size[u]);
      base = highest_bin<T>(most, &top) - (WINDOW - 1);
    }
    u32 rest = 0;  // elements that do not fit into shared memory
#pragma unroll
    for (int u = 0; u < BATCH; u++) {
      if ((u32)id[u] >= (u32)count) {
        id[u] = -1;
        continue;
      }
      int slot = id[u];
      bool fits = true;
      if (shares) {
        slot = id[u] % slots;
        int owner = owners[slot];
        if (owner < 0) owner = atomicCAS(owners + slot, -1, id[u]);
        fits = owner < 0 || owner == id[u];
      }
      const Parts number = parts(size[u]);
      const u64 units = number.bits << (number.shift & 7);
      const int bin = (number.shift >> 3) - base;
      const u32 near = (u32)units, far = (u32)(units >> 32);
      fits &= number.finite && (!near || (u32)bin < (u32)WINDOW) && (!far || (u32)(bin + 4) < (u32)WINDOW);
      rest |= fits ? 0 : 1u << u;
      if (fits) atomicAdd(table + slot, 1u);
      id[u] = fits && units ? bin * slots + slot : -1;  // from here on, the index of its bin
      size[u] = (B)units;
    }
    // All additions are issued before any of their results is used.
#pragma unroll
    for (int k = 0; k <= (Cut<T>::ABOVE ? 1 : 0); k++) {
      u32 was[BATCH];
#pragma unroll
      for (int u = 0; u < BATCH; u++) {
        const u32 piece = (u32)((u64)size[u] >> 32 * k);
        was[u] = id[u] >= 0 && piece ? atomicAdd(bins + id[u] + 4 * k * slots, piece) : 0;
      }
#pragma unroll
      for (int u = 0; u < BATCH; u++) {
        const u32 piece = (u32)((u64)size[u] >> 32 * k);
        if (was[u] > ~piece) atomicAdd(bins + id[u] + (4 * k + WINDOW) * slots, 1u);
      }
    }
    for (; rest; rest &= rest - 1) {
      const int at = i + tid + (__ffs(rest) - 1) * TALLY_THREADS;
      const int mine = c.ids[at] - low;
      atomicAdd(work.rows + mine, 1ULL);
      work.take(mine, sized(get<T>(c.gradient, c.kind, at)));
    }
  }
  __syncthreads();
  for (int slot = tid; slot < slots; slot += TALLY_THREADS) {
    const u32 number = table[slot];
    if (!number) continue;
    const int mine = shares ? owners[slot] : slot;
    atomicAdd(work.rows + mine, (u64)number);
#pragma unroll
    for (int w = 0; w < WINDOW; w++) {
      const u32* at = bins + w * slots + slot;
      const u64 units = (u64)at[WINDOW * slots] << 32 | at[0];
      if (units) work.add(base + w, mine, units);
    }
  }
  finish<T>(c, work);
}
KERNEL(512, tally_float, Tallies) { tally<float>(c); }
KERNEL(512, tally_double, Tallies) { tally<double>(c); }

__device__ __forceinline__ u32 counted(u32 x) {
  for (int half = 16; half; half /= 2) x += __shfl_xor_sync(FULL, x, half);
  return x;
}

// A 128-bit integer.
struct Long {
  u64 low, high;
  __device__ __forceinline__ void add(u64 l, u64 h) {
    low += l;
    high += h + (low < l);
  }
};

// Tally of all nonzero elements as one id: each thread sums in 128 bits over the range of exponents
// that most values fall in.
// grid: (n / length of each job), TALLY_THREADS threads.
template <typename T>
__device__ void measure(const Tallies& all) {
  typedef typename Kind<T>::Bits B;
  const Tally& c = all.mine();
  const int REACH = sizeof(T) == 4 ? 64 : 48;  // 24 more bits allow for the number of elements
  __shared__ u32 used[(Cut<T>::BINS + 31) / 32];
  __shared__ int top;
  __shared__ Long sums[TALLY_THREADS / 32];
  __shared__ u32 numbers[TALLY_THREADS / 32];
  const int tid = threadIdx.x;
  const Work<T> work = {c.work + HEAD, 1, used};
  const int first = (int)(blockIdx.x - c.first) * (int)c.length, end = min((int)c.n, first + (int)c.length);
  if (tid < (Cut<T>::BINS + 31) / 32) used[tid] = 0;
  if (tid == 0) top = 0;
  B size[BATCH];
  Long sum = {0, 0};
  u32 number = 0;
  int base = 0;
  for (int i = first; i < end; i += TALLY_THREADS * BATCH) {
    read<T>(c.gradient, c.kind, i + tid, end, size);
    if (i == first) {
      __syncthreads();
      B most = 0;
#pragma unroll
      for (int u = 0; u < BATCH; u++) most = max(most, size[u]);
      base = max(0, highest_bin<T>(most, &top) - Cut<T>::ABOVE - REACH / 8 + 1);
    }
    u32 rest = 0;
#pragma unroll
    for (int u = 0; u < BATCH; u++) {
      number += size[u] != 0;
      const Parts part = parts(size[u]);
      const int shift = part.shift - 8 * base;
      if ((u32)shift < (u32)REACH && part.finite) {
        sum.add(part.bits << shift, shift ? part.bits >> (64 - shift) : 0);
      } else if (size[u]) {
        rest |= 1u << u;
      }
    }
    for (; rest; rest &= rest - 1) {
      const int at = i + tid + (__ffs(rest) - 1) * TALLY_THREADS;
      work.take(0, sized(get<T>(c.gradient, c.kind, at)));
    }
  }
  for (int half = 16; half; half /= 2) {
    const u64 l = __shfl_xor_sync(FULL, sum.low, half), h = __shfl_xor_sync(FULL, sum.high, half);
    sum.add(l, h);
  }
  number = counted(number);
  if (tid % 32 == 0) {
    sums[tid / 32] = sum;
    numbers[tid / 32] = number;
  }
  __syncthreads();
  if (tid == 0) {
    u64 total = number;
    for (int w = 1; w < TALLY_THREADS / 32; w++) {
      sum.add(sums[w].low, sums[w].high);
      total += numbers[w];
    }
    if (total) atomicAdd(work.rows, total);
    const u64 pieces[4] = {sum.low & 0xffffffff, sum.low >> 32, sum.high & 0xffffffff, sum.high >> 32};
    for (int k = 0; k < 4; k++) {
      if (pieces[k]) work.add(base + 4 * k, 0, pieces[k]);
    }
  }
  finish<T>(c, work);
}
KERNEL(512, measure_float, Tallies) { measure<float>(c); }
KERNEL(512, measure_double, Tallies) { measure<double>(c); }

// Maximum along dimensions --------------------------------------------------------------------

// Dimensions as four levels, from the outermost: reduced, kept, reduced, kept.
struct Reduce {
  const void* x;
  const int* ids;
  i64 kind, size[4], step[4], along[4];
  i64 beside, columns, rows;  // a block computes `columns` results with `rows` threads each
  i64 cuts, length;           // parts of each reduced line, and elements per part
  i64 *most, *places;         // (cuts, results), if there is more than one part
  void* value;                // null if only ids are requested
  int* out;
  i64 first;
};
typedef Jobs<Reduce, 16> Reductions;

template <typename T>
__device__ __forceinline__ void put(const Reduce& c, i64 k, typename Kind<T>::Bits most, i64 r) {
  if (c.value) ((T*)c.value)[k] = number(most);
  const i64 r1 = r / c.size[2], r2 = r % c.size[2], k1 = k / c.size[3], k2 = k % c.size[3];
  const i64 from = r1 * c.along[0] + k1 * c.along[1] + r2 * c.along[2] + k2 * c.along[3];
  c.out[k] = most ? c.ids[from] : 0;
}

// The maximum of every rows-th element of a line, and its first place. OWN: elements are T already,
// so that many reads are in flight without conversions between them.
template <typename T, bool OWN>
__device__ __forceinline__ void scan(const Reduce& c, i64 base, i64 first, i64 high,
                                     typename Kind<T>::Bits& most, i64& place) {
  typedef typename Kind<T>::Bits B;
  const int rows = c.rows;
  const bool whole = c.size[0] == 1;  // saves a division
  for (i64 r0 = first; r0 < high; r0 += 8 * rows) {
    T x[8];
#pragma unroll
    for (int u = 0; u < 8; u++) {
      const i64 r = min(r0 + u * rows, high - 1);
      const i64 at = whole ? r * c.step[2] : r / c.size[2] * c.step[0] + r % c.size[2] * c.step[2];
      x[u] = OWN ? ((const T*)c.x)[base + at] : get<T>(c.x, c.kind, base + at);
    }
#pragma unroll
    for (int u = 0; u < 8; u++) {
      const B size = sized(x[u]);
      const bool wins = size > most && r0 + u * rows < high;
      most = wins ? size : most;
      place = wins ? r0 + u * rows : place;
    }
  }
}

// Neighbouring threads read along the contiguous dimension: results (beside), or reduced elements.
// grid: (cuts x results / columns of each job), 256 threads.
template <typename T>
__device__ void reduce(const Reductions& all) {
  typedef typename Kind<T>::Bits B;
  const Reduce& c = all.mine();
  __shared__ B mosts[256];
  __shared__ i64 places[256];
  const int columns = c.columns, rows = c.rows, tid = threadIdx.x;
  const int column = c.beside ? tid % columns : tid / rows;
  const int row = c.beside ? tid / columns : tid % rows;
  const i64 results = c.size[1] * c.size[3], reduced = c.size[0] * c.size[2];
  const u32 across = (results + columns - 1) / columns, block = blockIdx.x - (u32)c.first;
  const i64 cut = block / across, k = (i64)(block % across) * columns + column;
  const i64 low = cut * c.length, high = min(reduced, low + c.length);
  B most = 0;
  i64 place = low;
  if (k < results) {
    const i64 base = k / c.size[3] * c.step[1] + k % c.size[3] * c.step[3];
    if (c.kind == (sizeof(T) == 4 ? 0 : 1)) {
      scan<T, true>(c, base, low + row, high, most, place);
    } else {
      scan<T, false>(c, base, low + row, high, most, place);
    }
  }
  const int mine = row * columns + column;
  mosts[mine] = most;
  places[mine] = place;
  __syncthreads();
  for (int half = rows / 2; half; half /= 2) {
    if (row < half) {
      const int other = mine + half * columns;
      const bool wins = mosts[other] > mosts[mine] ||
                        (mosts[other] == mosts[mine] && places[other] < places[mine]);
      if (wins) {
        mosts[mine] = mosts[other];
        places[mine] = places[other];
      }
    }
    __syncthreads();
  }
  if (row || k >= results) return;
  if (c.cuts == 1) {
    put<T>(c, k, mosts[mine], places[mine]);
  } else {
    c.most[cut * results + k] = mosts[mine];
    c.places[cut * results + k] = places[mine];
  }
}
KERNEL(256, reduce_float, Reductions) { reduce<float>(c); }
KERNEL(256, reduce_double, Reductions) { reduce<double>(c); }

// Second pass: combines the parts of cut lines, in order. grid: (the most results / 256 of a job
// with cuts, jobs), 256 threads.
template <typename T>
__device__ void combine(const Reductions& all) {
  const Reduce& c = all.job[blockIdx.y];
  const i64 k = (i64)blockIdx.x * 256 + threadIdx.x, results = c.size[1] * c.size[3];
  if (c.cuts == 1 || k >= results) return;
  i64 most = c.most[k], place = c.places[k];
  for (i64 cut = 1; cut < c.cuts; cut++) {
    const i64 other = c.most[cut * results + k];
    if (other > most) {
      most = other;
      place = c.places[cut * results + k];
    }
  }
  put<T>(c, k, (typename Kind<T>::Bits)most, place);
}
KERNEL(256, combine_float, Reductions) { combine<float>(c); }
KERNEL(256, combine_double, Reductions) { combine<double>(c); }

struct Scatter {
  const void* x;
  const i64* target;
  i64 kind, n, size;
  void* value;  // initially 0
  i64* first;   // initially n
};

// Scatter-max: |x| as bits orders as integers do.
template <typename T>
__device__ void scatter_max(const Scatter& c) {
  typedef typename Kind<T>::Bits B;
  for (i64 j = (i64)blockIdx.x * 256 + threadIdx.x; j < c.n; j += (i64)gridDim.x * 256) {
    const i64 i = c.target[j];
    if (i < 0 || i >= c.size) continue;
    const B size = sized(get<T>(c.x, c.kind, j));
    if (size) atomicMax((B*)c.value + i, size);
  }
}
KERNEL(256, scatter_max_float, Scatter) { scatter_max<float>(c); }
KERNEL(256, scatter_max_double, Scatter) { scatter_max<double>(c); }

// The first source that attains the maximum of its target.
template <typename T>
__device__ void scatter_first(const Scatter& c) {
  typedef typename Kind<T>::Bits B;
  for (i64 j = (i64)blockIdx.x * 256 + threadIdx.x; j < c.n; j += (i64)gridDim.x * 256) {
    const i64 i = c.target[j];
    if (i < 0 || i >= c.size) continue;
    const B size = sized(get<T>(c.x, c.kind, j));
    if (size && size == ((const B*)c.value)[i]) atomicMin(c.first + i, j);
  }
}
KERNEL(256, scatter_first_float, Scatter) { scatter_first<float>(c); }
KERNEL(256, scatter_first_double, Scatter) { scatter_first<double>(c); }

struct Gather {
  const int* ids;
  const i64* source;
  i64 n, most;  // the result is 0 for a source outside 0 .. most - 1
  int* out;
};

KERNEL(256, gather, Gather) {
  for (i64 j = (i64)blockIdx.x * 256 + threadIdx.x; j < c.n; j += (i64)gridDim.x * 256) {
    const i64 from = c.source[j];
    c.out[j] = from >= 0 && from < c.most ? c.ids[from] : 0;
  }
}

// Diagonal plus low rank ----------------------------------------------------------------------

// A strided matrix: `line` is the stride of lines, `step` that of elements.
template <typename T>
struct Lines {
  const T* data;
  i64 line, step;
  __device__ __forceinline__ T at(i64 l, i64 i) const { return data[l * line + i * step]; }
};

template <typename T>
struct Normalise {
  Lines<T> d, x, u0, u1, v0, v1;
  Lines<int> ids;
  i64 lines, n, rows;
  T* value;  // null if not requested
  i64* place;  // this, or out
  int* out;
  int* left;  // flags of the lines that are left to paired; null: all lines
};

// The diagonal element i = j wins ties only against later ones.
template <typename T, int RANK>
__device__ __forceinline__ void chosen(const Normalise<T>& c, i64 line, int i,
                                       typename Kind<T>::Bits most, int at) {
  typedef typename Kind<T>::Bits B;
  T weight = add(c.d.at(line, i), mul(c.u0.at(line, i), c.v0.at(line, i)));
  if (RANK == 2) weight = add(weight, mul(c.u1.at(line, i), c.v1.at(line, i)));
  const B own = sized(mul(weight, c.x.at(line, i)));
  if (own > most || (own == most && i < at) || at < 0) {
    most = own;
    at = i;
  }
  const i64 to = line * c.n + i;
  if (c.value) c.value[to] = number(most);
  if (c.place) c.place[to] = most ? at : -1;
  if (c.out) c.out[to] = most ? c.ids.at(line, at) : 0;
}

// The two largest of a line, the lowest index among equals; -1 for none.
template <typename B>
struct TwoLargest {
  B first, second;
  int i, j;

  __device__ __forceinline__ static bool before(B a, int i, B b, int j) {
    return a > b || (a == b && i < j);
  }

  __device__ __forceinline__ void take(const TwoLargest& other) {
    if (before(other.first, other.i, first, i)) {
      const bool mine = before(first, i, other.second, other.j);
      second = mine ? first : other.second;
      j = mine ? i : other.j;
      first = other.first;
      i = other.i;
    } else if (before(other.first, other.i, second, j)) {
      second = other.first;
      j = other.i;
    }
  }
};

// The two largest of a warp, in all lanes.
template <typename B>
__device__ __forceinline__ void merge_in_warp(TwoLargest<B>& two) {
  for (int half = 16; half; half /= 2) {
    TwoLargest<B> other;
    other.first = __shfl_xor_sync(FULL, two.first, half);
    other.second = __shfl_xor_sync(FULL, two.second, half);
    other.i = __shfl_xor_sync(FULL, two.i, half);
    other.j = __shfl_xor_sync(FULL, two.j, half);
    two.take(other);
  }
}

// One line; where elements are contiguous, or all the same (stride 0), offsets are cheap.
template <typename T, bool FLAT>
struct Line {
  const T* data;
  i64 step;
  __device__ __forceinline__ Line(const Lines<T>& all, i64 line) : data(all.data + line * all.line), step(all.step) {}
  __device__ __forceinline__ T at(int i) const { return data[FLAT ? (i64)(i & -(int)step) : i * step]; }
};

#define READ_AHEAD 8  // elements that a thread reads at a time

template <typename T, bool FLAT>
__device__ __forceinline__ void ranked(const Normalise<T>& c) {
  typedef typename Kind<T>::Bits B;
  __shared__ TwoLargest<B> found[8];
  const int rows = c.rows, row = threadIdx.x % rows, n = c.n;
  const i64 line = (i64)blockIdx.x * (256 / rows) + threadIdx.x / rows;
  const bool there = line < c.lines;
  const i64 mine = there ? line : 0;
  const Line<T, FLAT> d(c.d, mine), x(c.x, mine), u(c.u0, mine), v(c.v0, mine);
  const Line<int, FLAT> ids(c.ids, mine);
  TwoLargest<B> two = {-1, -1, -1, -1};
  for (int j0 = row; there && j0 < n; j0 += READ_AHEAD * rows) {
    T xs[READ_AHEAD], vs[READ_AHEAD];
#pragma unroll
    for (int k = 0; k < READ_AHEAD; k++) {
      const int j = min(j0 + k * rows, n - 1);
      xs[k] = x.at(j);
      vs[k] = v.at(j);
    }
#pragma unroll
    for (int k = 0; k < READ_AHEAD; k++) {
      const int j = j0 + k * rows;
      const B size = j < n ? sized(mul(vs[k], xs[k])) : -1;
      const bool first = size > two.first, second = size > two.second;
      two.second = first ? two.first : second ? size : two.second;
      two.j = first ? two.i : second ? j : two.j;
      two.first = first ? size : two.first;
      two.i = first ? j : two.i;
    }
  }
  merge_in_warp(two);
  if (rows > 32) {  // all warps of the block share a line
    if (row % 32 == 0) found[row / 32] = two;
    __syncthreads();
    two = found[0];
#pragma unroll
    for (int w = 1; w < 8; w++) two.take(found[w]);
  }
  if (!there) return;
  for (int i0 = row; i0 < n; i0 += READ_AHEAD / 2 * rows) {
    T xs[READ_AHEAD / 2], vs[READ_AHEAD / 2], us[READ_AHEAD / 2], ds[READ_AHEAD / 2];
#pragma unroll
    for (int k = 0; k < READ_AHEAD / 2; k++) {
      const int i = min(i0 + k * rows, n - 1);
      xs[k] = x.at(i);
      vs[k] = v.at(i);
      us[k] = u.at(i);
      ds[k] = d.at(i);
    }
#pragma unroll
    for (int k = 0; k < READ_AHEAD / 2; k++) {
      const int i = i0 + k * rows;
      if (i >= n) break;
      const bool own = i == two.i;
      const B other = own ? two.second : two.first;
      B most = other < 0 ? 0 : sized(mul(us[k], number(other)));
      int at = own ? two.j : two.i;
      const B mine = sized(mul(add(ds[k], mul(us[k], vs[k])), xs[k]));
      if (mine > most || (mine == most && i < at) || at < 0) {
        most = mine;
        at = i;
      }
      const i64 to = line * n + i;
      if (c.value) c.value[to] = number(most);
      if (c.place) c.place[to] = most ? at : -1;
      if (c.out) c.out[to] = most ? ids.at(at) : 0;
    }
  }
}

// Rank one: the largest of the line, or the second largest where the largest is the diagonal one.
// grid: (lines / (256 / rows)), 256 threads, rows of them for each line: 32, or all.
template <typename T>
__device__ void ranked(const Normalise<T>& c) {
  const i64 steps = c.d.step | c.x.step | c.u0.step | c.v0.step | c.ids.step;
  if ((u64)steps <= 1) {
    ranked<T, true>(c);
  } else {
    ranked<T, false>(c);
  }
}

KERNEL(256, ranked_float, Normalise<float>) { ranked<float>(c); }
KERNEL(256, ranked_double, Normalise<double>) { ranked<double>(c); }

#define ELEMENTS_PER_THREAD 4  // i
#define STRETCH 16             // j that are compared before checking for a new maximum
#define TILE 1024              // j in shared memory at a time

template <typename T>
struct alignas(16) Point {
  T v0, v1, x, none;
};

template <typename T> struct Far;  // beyond it, a product of two may not be finite
template <> struct Far<float> { static __device__ __forceinline__ float far() { return 0x1p62f; } };
template <> struct Far<double> { static __device__ __forceinline__ double far() { return 0x1p510; } };

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) <= 3.402823466e38f; }
__device__ __forceinline__ bool is_finite(double x) { return fabs(x) <= 1.7976931348623157e308; }

template <typename T>
__device__ __forceinline__ T product(T u0, T u1, const Point<T>& p) {
  return mul(add(mul(u0, p.v0), mul(u1, p.v1)), p.x);
}

// Rank two: every i with every other j. Only the maximum is updated at every j; at the end of a
// stretch an i whose maximum has increased records the stretch, which is searched for the j at the
// end. Where products may be NaN or infinite, a slower loop compares every j with its place
// instead. grid: (lines x tiles of i), a multiple of 32 threads.
template <typename T>
__device__ void paired(const Normalise<T>& c) {
  typedef typename Kind<T>::Bits B;
  __shared__ Point<T> points[TILE];
  const int n = c.n, threads = blockDim.x, tid = threadIdx.x;
  const int tiles = (n + ELEMENTS_PER_THREAD * threads - 1) / (ELEMENTS_PER_THREAD * threads);
  const i64 line = blockIdx.x / tiles;
  if (c.left && !c.left[line]) return;  // the whole block
  const int first = blockIdx.x % tiles * ELEMENTS_PER_THREAD * threads + tid;
  T u0[ELEMENTS_PER_THREAD], u1[ELEMENTS_PER_THREAD];
  bool odd = false;
  const T far = Far<T>::far();
#pragma unroll
  for (int k = 0; k < ELEMENTS_PER_THREAD; k++) {
    const int i = first + k * threads;
    u0[k] = i < n ? c.u0.at(line, i) : T(0);
    u1[k] = i < n ? c.u1.at(line, i) : T(0);
    odd |= !(fabs(u0[k]) <= far && fabs(u1[k]) <= far);
  }
  for (int j = tid; j < n; j += threads) {
    const T v0 = c.v0.at(line, j), v1 = c.v1.at(line, j);
    odd |= !(fabs(v0) <= far && fabs(v1) <= far && is_finite(c.x.at(line, j)));
  }
  const bool careful = __syncthreads_or(odd);
  T most[ELEMENTS_PER_THREAD], before[ELEMENTS_PER_THREAD];
  int winner[ELEMENTS_PER_THREAD];  // a stretch; in the slower loop, a place
  B sizes[ELEMENTS_PER_THREAD];
#pragma unroll
  for (int k = 0; k < ELEMENTS_PER_THREAD; k++) {
    most[k] = before[k] = T(0);
    winner[k] = careful ? -1 : 0;
    sizes[k] = -1;
  }
  for (int j0 = 0; j0 < n; j0 += TILE) {
    const int count = min(n - j0, TILE), padded = (count + STRETCH - 1) / STRETCH * STRETCH;
    if (j0) __syncthreads();
    for (int j = tid; j < padded; j += threads) {
      Point<T> p = {T(0), T(0), T(0), T(0)};
      if (j < count) {
        p.v0 = c.v0.at(line, j0 + j);
        p.v1 = c.v1.at(line, j0 + j);
        p.x = c.x.at(line, j0 + j);
      }
      points[j] = p;
    }
    __syncthreads();
    if (careful) {
      for (int j = 0; j < count; j++) {
        const Point<T> p = points[j];
#pragma unroll
        for (int k = 0; k < ELEMENTS_PER_THREAD; k++) {
          const B size = sized(product(u0[k], u1[k], p));
          if (size > sizes[k] && j0 + j != first + k * threads) {
            sizes[k] = size;
            winner[k] = j0 + j;
          }
        }
      }
      continue;
    }
    for (int s = 0; s < padded; s += STRETCH) {
      const int from = j0 + s;
      // A warp's i are ELEMENTS_PER_THREAD runs of 32. Where the stretch is in one of them, i = j is
      // excluded.
      bool own = false;
#pragma unroll
      for (int k = 0; k < ELEMENTS_PER_THREAD; k++) own |= (first + k * threads) / 32 == from / 32;
      if (own) {
        for (int j = 0; j < STRETCH; j++) {
          const Point<T> p = points[s + j];
#pragma unroll
          for (int k = 0; k < ELEMENTS_PER_THREAD; k++) {
            const T size = product(u0[k], u1[k], p);
            most[k] = most_of(most[k], from + j == first + k * threads ? T(0) : size);
          }
        }
      } else {
#pragma unroll
        for (int j = 0; j < STRETCH; j++) {
          const Point<T> p = points[s + j];
#pragma unroll
          for (int k = 0; k < ELEMENTS_PER_THREAD; k++)
            most[k] = most_of(most[k], product(u0[k], u1[k], p));
        }
      }
#pragma unroll
      for (int k = 0; k < ELEMENTS_PER_THREAD; k++) {
        if (most[k] > before[k]) winner[k] = from;
        before[k] = most[k];
      }
    }
  }
#pragma unroll
  for (int k = 0; k < ELEMENTS_PER_THREAD; k++) {
    const int i = first + k * threads;
    int at = winner[k];
    if (!careful) {
      for (int j = min(winner[k] + STRETCH, n) - 1; j >= winner[k]; j--) {
        Point<T> p;
        if (n <= TILE) {
          p = points[j];
        } else {
          p.v0 = c.v0.at(line, j);
          p.v1 = c.v1.at(line, j);
          p.x = c.x.at(line, j);
        }
        if (j != i && fabs(product(u0[k], u1[k], p)) == most[k]) at = j;
      }
      sizes[k] = sized(most[k]);
    }
    if (n == 1) at = -1;
    if (i < n) chosen<T, 2>(c, line, i, at < 0 ? 0 : sizes[k], at);
  }
}

KERNEL(256, paired_float, Normalise<float>) { paired<float>(c); }
KERNEL(256, paired_double, Normalise<double>) { paired<double>(c); }

// The largest of numbers that are at least 0, its place, and the sum of the others: so that a number
// is never subtracted from a sum that it is the largest part of. NaN is added to the sum.
template <typename T>
struct LargestAndRest {
  T most, rest;
  int at;

  __device__ __forceinline__ void take(const LargestAndRest& other) {
    const bool larger = other.most > most;
    rest = add(add(rest, other.rest), larger ? most : other.most);
    at = larger ? other.at : at;
    most = larger ? other.most : most;
  }
};

template <typename T, bool FLAT>
__device__ __forceinline__ void ranked_sums(const Normalise<T>& c) {
  __shared__ LargestAndRest<T> found[8];
  const int rows = c.rows, row = threadIdx.x % rows, n = c.n;
  const i64 line = (i64)blockIdx.x * (256 / rows) + threadIdx.x / rows;
  const bool there = line < c.lines;
  const i64 mine = there ? line : 0;
  const Line<T, FLAT> d(c.d, mine), x(c.x, mine), u(c.u0, mine), v(c.v0, mine);
  LargestAndRest<T> all = {T(0), T(0), -1};
  for (int j0 = row; there && j0 < n; j0 += READ_AHEAD * rows) {
    T sizes[READ_AHEAD];
#pragma unroll
    for (int k = 0; k < READ_AHEAD; k++) {
      const int j = min(j0 + k * rows, n - 1);
      sizes[k] = fabs(mul(v.at(j), x.at(j)));
    }
#pragma unroll
    for (int k = 0; k < READ_AHEAD; k++) {
      const int j = j0 + k * rows;
      if (j < n) all.take({sizes[k], T(0), j});
    }
  }
  for (int half = 16; half; half /= 2) {
    LargestAndRest<T> other;
    other.most = __shfl_xor_sync(FULL, all.most, half);
    other.rest = __shfl_xor_sync(FULL, all.rest, half);
    other.at = __shfl_xor_sync(FULL, all.at, half);
    all.take(other);
  }
  if (rows > 32) {  // all warps of the block share a line
    if (row % 32 == 0) found[row / 32] = all;
    __syncthreads();
    all = found[0];
#pragma unroll
    for (int w = 1; w < 8; w++) all.take(found[w]);
  }
  for (int i0 = row; there && i0 < n; i0 += READ_AHEAD / 2 * rows) {
    T xs[READ_AHEAD / 2], vs[READ_AHEAD / 2], us[READ_AHEAD / 2], ds[READ_AHEAD / 2];
#pragma unroll
    for (int k = 0; k < READ_AHEAD / 2; k++) {
      const int i = min(i0 + k * rows, n - 1);
      xs[k] = x.at(i);
      vs[k] = v.at(i);
      us[k] = u.at(i);
      ds[k] = d.at(i);
    }
#pragma unroll
    for (int k = 0; k < READ_AHEAD / 2; k++) {
      const int i = i0 + k * rows;
      if (i >= n) break;
      const T size = fabs(mul(vs[k], xs[k]));
      const T others = i == all.at ? all.rest : add(add(all.rest, -size), all.most);
      const T own = fabs(mul(add(ds[k], mul(us[k], vs[k])), xs[k]));
      c.value[line * n + i] = add(own, mul(fabs(us[k]), others));
    }
  }
}

// Sums of |J[i, j]| x[j] over j, for x >= 0, of rank one; grid as of `ranked`.
template <typename T>
__device__ void ranked_sums(const Normalise<T>& c) {
  const i64 steps = c.d.step | c.x.step | c.u0.step | c.v0.step;
  if ((u64)steps <= 1) {
    ranked_sums<T, true>(c);
  } else {
    ranked_sums<T, false>(c);
  }
}

KERNEL(256, ranked_sums_float, Normalise<float>) { ranked_sums<float>(c); }
KERNEL(256, ranked_sums_double, Normalise<double>) { ranked_sums<double>(c); }

// The same of rank two: every i with every j, summed by stretches; grid as of `paired`.
template <typename T>
__device__ void paired_sums(const Normalise<T>& c) {
  __shared__ Point<T> points[TILE];
  const int n = c.n, threads = blockDim.x, tid = threadIdx.x;
  const int tiles = (n + ELEMENTS_PER_THREAD * threads - 1) / (ELEMENTS_PER_THREAD * threads);
  const i64 line = blockIdx.x / tiles;
  const int first = blockIdx.x % tiles * ELEMENTS_PER_THREAD * threads + tid;
  T d[ELEMENTS_PER_THREAD], u0[ELEMENTS_PER_THREAD], u1[ELEMENTS_PER_THREAD];
  T sums[ELEMENTS_PER_THREAD];
#pragma unroll
  for (int k = 0; k < ELEMENTS_PER_THREAD; k++) {
    const int i = first + k * threads;
    d[k] = i < n ? c.d.at(line, i) : T(0);
    u0[k] = i < n ? c.u0.at(line, i) : T(0);
    u1[k] = i < n ? c.u1.at(line, i) : T(0);
    sums[k] = T(0);
  }
  for (int j0 = 0; j0 < n; j0 += TILE) {
    const int count = min(n - j0, TILE), padded = (count + STRETCH - 1) / STRETCH * STRETCH;
    if (j0) __syncthreads();
    for (int j = tid; j < padded; j += threads) {
      Point<T> p = {T(0), T(0), T(0), T(0)};
      if (j < count) {
        p.v0 = c.v0.at(line, j0 + j);
        p.v1 = c.v1.at(line, j0 + j);
        p.x = c.x.at(line, j0 + j);
      }
      points[j] = p;
    }
    __syncthreads();
    for (int s = 0; s < padded; s += STRETCH) {
      const int from = j0 + s;
      T part[ELEMENTS_PER_THREAD];
      bool own = false;  // as in paired: whether i = j occurs in this stretch, for this warp
#pragma unroll
      for (int k = 0; k < ELEMENTS_PER_THREAD; k++) {
        part[k] = T(0);
        own |= (first + k * threads) / 32 == from / 32;
      }
      if (own) {
        for (int j = 0; j < STRETCH; j++) {
          const Point<T> p = points[s + j];
#pragma unroll
          for (int k = 0; k < ELEMENTS_PER_THREAD; k++) {
            const T more = from + j == first + k * threads ? d[k] : T(0);
            part[k] += fabs(more + (u0[k] * p.v0 + u1[k] * p.v1)) * p.x;
          }
        }
      } else {
#pragma unroll
        for (int j = 0; j < STRETCH; j++) {
          const Point<T> p = points[s + j];
#pragma unroll
          for (int k = 0; k < ELEMENTS_PER_THREAD; k++)
            part[k] += fabs(u0[k] * p.v0 + u1[k] * p.v1) * p.x;
        }
      }
#pragma unroll
      for (int k = 0; k < ELEMENTS_PER_THREAD; k++) sums[k] += part[k];
    }
  }
#pragma unroll
  for (int k = 0; k < ELEMENTS_PER_THREAD; k++) {
    const int i = first + k * threads;
    if (i < n) c.value[line * n + i] = sums[k];
  }
}

KERNEL(256, paired_sums_float, Normalise<float>) { paired_sums<float>(c); }
KERNEL(256, paired_sums_double, Normalise<double>) { paired_sums<double>(c); }

// In rank two, most j attain the maximum for no i: +-(v0 x, v1 x) are points in the plane, the
// maximal j for i is the point furthest in the direction (u0, u1), which is a corner of their
// convex hull. So points well inside a polygon of extreme points are pruned. cpu/steps.cpp does the
// same. Why it is exact: computed products differ from true ones by a few roundings of |u0| reach0
// + |u1| reach1, so a point may be pruned if, moved by MARGIN along either axis, it stays inside.

#define DIRECTIONS 16   // in half a circle
#define MAX_POINTS 512  // the most points that may be left

#define COSINES {1.0, 0.9807852804032304, 0.9238795325112867, 0.8314696123025452, 0.7071067811865476, \
                 0.5555702330196023, 0.38268343236508984, 0.19509032201612833, 6.123233995736766e-17}
__device__ const double TABLE[9] = COSINES;

// For a direction known at compile time; others are in the table.
template <typename T>
__device__ __forceinline__ T cosine(int d) {
  const double some[9] = COSINES;
  return T(d <= 8 ? some[d] : -some[16 - d]);
}

template <typename T>
__device__ __forceinline__ T sine(int d) {
  return cosine<T>(d < 8 ? 8 - d : d - 8);
}

template <typename T> struct Hull;
template <> struct Hull<float> {
  static __device__ __forceinline__ float tiny() { return 0x1p-110f; }  // as TINY in cpu/steps.cpp
  static __device__ __forceinline__ float margin() { return 0x1p-18f; }  // 32 roundings
  static __device__ __forceinline__ float most() { return 3.402823466e38f; }
};
template <> struct Hull<double> {
  static __device__ __forceinline__ double tiny() { return 0x1p-1000; }
  static __device__ __forceinline__ double margin() { return 0x1p-47; }
  static __device__ __forceinline__ double most() { return 1.7976931348623157e308; }
};

// The maximum of a warp, in all lanes.
template <typename B>
__device__ __forceinline__ B largest_of_warp(B size) {
  for (int half = 16; half; half /= 2) size = max(size, __shfl_xor_sync(FULL, size, half));
  return size;
}

__device__ __forceinline__ int smallest_of_warp(int place) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_min_sync(FULL, place);
#else
  for (int half = 16; half; half /= 2) place = min(place, __shfl_xor_sync(FULL, place, half));
  return place;
#endif
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <>
__device__ __forceinline__ int largest_of_warp(int size) {
  return __reduce_max_sync(FULL, size);
}
#endif

// The same, and its lowest place.
template <typename B>
__device__ __forceinline__ void furthest(B& size, int& place) {
  const B most = largest_of_warp(size);
  place = smallest_of_warp(size == most ? place : 0x7fffffff);
  size = most;
}

#define ELEMENTS_AT_ONCE 4  // i that a thread compares with the remaining points at a time

template <typename T>
struct Pruned {
  Point<T> points[MAX_POINTS];
  typename Kind<T>::Bits mosts[8][7], sizes[8][DIRECTIONS];
  T edges[DIRECTIONS][3], corners[DIRECTIONS + 1][2];
  int few[MAX_POINTS], list[MAX_POINTS], kept_by[8], places[8][DIRECTIONS], waiting;
};

// One line per block of 256 threads; lines that cannot be pruned are left to paired. n > 1.
template <typename T, bool FLAT>
__device__ __forceinline__ void pruned(const Normalise<T>& c, Pruned<T>& shared) {
  typedef typename Kind<T>::Bits B;
  auto& points = shared.points;
  auto& few = shared.few, &list = shared.list;
  auto& kept_by = shared.kept_by;
  auto& mosts = shared.mosts;
  auto& sizes = shared.sizes;
  auto& places = shared.places;
  auto& edges = shared.edges;
  auto& corners = shared.corners;
  int& waiting = shared.waiting;
  const int n = c.n, tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const i64 line = blockIdx.x;
  const T highest = Hull<T>::most();
  const Line<T, FLAT> xs(c.x, line), u0s(c.u0, line), u1s(c.u1, line), v0s(c.v0, line), v1s(c.v1, line);

  // Whether no product overflows or underflows, and the points are exact to a few roundings.
  T most[7] = {T(0), T(0), T(0), T(0), T(0), T(0), T(0)};
  bool odd = false;
  for (int j = tid; j < n; j += 256) {
    const T u0 = u0s.at(j), u1 = u1s.at(j), x = xs.at(j), v0 = v0s.at(j), v1 = v1s.at(j);
    const T some[7] = {u0, u1, v0, v1, x, mul(v0, x), mul(v1, x)};
#pragma unroll
    for (int k = 0; k < 7; k++) {
      odd |= !(fabs(some[k]) <= highest);
      most[k] = most_of(most[k], some[k]);
    }
  }
#pragma unroll
  for (int k = 0; k < 7; k++) {
    const B size = largest_of_warp(sized(most[k]));
    if (lane == 0) mosts[warp][k] = size;
  }
  if (tid == 0) waiting = 0;
  odd = __syncthreads_or(odd);
#pragma unroll
  for (int k = 0; k < 7; k++) {
    B size = mosts[0][k];
#pragma unroll
    for (int w = 1; w < 8; w++) size = max(size, mosts[w][k]);
    most[k] = number(size);
  }
  const T bound = add(mul(most[0], most[2]), mul(most[1], most[3])) * most[4] * T(4);
  T scale[2];
  odd |= !(bound <= highest);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const bool nothing = most[2 + r] == T(0) || most[4] == T(0);
    scale[r] = nothing ? T(1) : T(1) / most[5 + r];
    odd |= !nothing && !(most[5 + r] >= Hull<T>::tiny());
    odd |= !(scale[r] <= highest);
  }
  if (odd) {  // uniform across the block
    if (tid == 0) c.left[line] = 1;
    return;
  }
  T limit = Hull<T>::tiny() * (most[4] > T(1) ? most[4] : T(1));

  auto across = [&](int j) { return mul(mul(v0s.at(j), xs.at(j)), scale[0]); };
  auto up = [&](int j) { return mul(mul(v1s.at(j), xs.at(j)), scale[1]); };
  {
    B size[DIRECTIONS];
    int place[DIRECTIONS];
#pragma unroll
    for (int d = 0; d < DIRECTIONS; d++) {
      size[d] = -1;
      place[d] = 0;
    }
    for (int j = tid; j < n; j += 256) {
      const T a = across(j), b = up(j);
#pragma unroll
      for (int d = 0; d < DIRECTIONS; d++) {
        const B here = sized(add(mul(a, cosine<T>(d)), mul(b, sine<T>(d))));
        place[d] = here > size[d] ? j : place[d];
        size[d] = max(size[d], here);
      }
    }
#pragma unroll
    for (int d = 0; d < DIRECTIONS; d++) {
      furthest(size[d], place[d]);
      if (lane == 0) {
        sizes[warp][d] = size[d];
        places[warp][d] = place[d];
      }
    }
  }
  __syncthreads();
  if (tid < DIRECTIONS) {
    B size = sizes[0][tid];
    int place = places[0][tid];
    for (int w = 1; w < 8; w++) {
      const bool wins = sizes[w][tid] > size || (sizes[w][tid] == size && places[w][tid] < place);
      size = wins ? sizes[w][tid] : size;
      place = wins ? places[w][tid] : place;
    }
    const T a = across(place), b = up(place);
    const T p = T(tid <= 8 ? TABLE[tid] : -TABLE[16 - tid]), q = T(TABLE[tid < 8 ? 8 - tid : tid - 8]);
    const bool turn = add(mul(a, p), mul(b, q)) < T(0);
    corners[tid][0] = turn ? -a : a;
    corners[tid][1] = turn ? -b : b;
    if (tid == 0) {  // after half a turn, the mirror image
      corners[DIRECTIONS][0] = turn ? a : -a;
      corners[DIRECTIONS][1] = turn ? b : -b;
    }
  }
  __syncthreads();
  if (tid < DIRECTIONS) {
    const T a = corners[tid + 1][1] - corners[tid][1], b = corners[tid][0] - corners[tid + 1][0];
    const T size = add(fabs(a), fabs(b));
    const bool there = size > T(0);  // two directions with the same corner have no edge
    const T edge = add(mul(a, corners[tid][0]), mul(b, corners[tid][1]));
    edges[tid][0] = there ? a : T(0);
    edges[tid][1] = there ? b : T(0);
    edges[tid][2] = there ? add(edge, -mul(Hull<T>::margin(), size)) : T(0);
  }
  __syncthreads();

  // Each warp has a part of the line, so that the remaining points stay in order: they are counted
  // first, then written.
  const int part = (n + 255) / 256 * 32, low = warp * part, high = min(n, low + part);
  auto outside = [&](int j) {
    bool kept = false;
    if (j < high && xs.at(j) != T(0)) {
      const T a = across(j), b = up(j);
#pragma unroll
      for (int k = 0; k < DIRECTIONS; k++)
        kept |= !(fabs(add(mul(edges[k][0], a), mul(edges[k][1], b))) <= edges[k][2]);
    }
    return __ballot_sync(FULL, kept);
  };
  int mine = 0;
  for (int base = low; base < high; base += 32) mine += __popc(outside(base + lane));
  if (lane == 0) kept_by[warp] = mine;
  __syncthreads();
  int count = 0, to = 0;
#pragma unroll
  for (int w = 0; w < 8; w++) {
    if (w == warp) to = count;
    count += kept_by[w];
  }
  if (count > MAX_POINTS || 2 * count > n) {
    if (tid == 0) c.left[line] = 1;
    return;
  }
  for (int base = low; base < high; base += 32) {
    const u32 which = outside(base + lane);
    if (which >> lane & 1) {
      const int f = to + __popc(which & ((1u << lane) - 1)), j = base + lane;
      few[f] = j;
      points[f] = {v0s.at(j), v1s.at(j), xs.at(j), T(0)};
    }
    to += __popc(which);
  }
  if (!count) limit = T(0);
  __syncthreads();

  for (int base = tid; base < n; base += 256 * ELEMENTS_AT_ONCE) {
    T u0[ELEMENTS_AT_ONCE], u1[ELEMENTS_AT_ONCE], size[ELEMENTS_AT_ONCE];
    int at[ELEMENTS_AT_ONCE];
#pragma unroll
    for (int k = 0; k < ELEMENTS_AT_ONCE; k++) {
      const int i = min(base + 256 * k, n - 1);
      u0[k] = u0s.at(i);
      u1[k] = u1s.at(i);
      size[k] = T(-1);
      at[k] = -1;
    }
    for (int f = 0; f < count; f++) {  // all products are finite
      const Point<T> p = points[f];
#pragma unroll
      for (int k = 0; k < ELEMENTS_AT_ONCE; k++) {
        const T here = fabs(product(u0[k], u1[k], p));
        at[k] = here > size[k] ? f : at[k];
        size[k] = here > size[k] ? here : size[k];
      }
    }
#pragma unroll
    for (int k = 0; k < ELEMENTS_AT_ONCE; k++) {
      const int i = base + 256 * k;
      if (i >= n) break;
      // An i that is itself a remaining point, or so small that rounding errors are not relative,
      // is compared with every other j, by a warp.
      const bool small = add(mul(fabs(u0[k]), most[5]), mul(fabs(u1[k]), most[6])) < limit;
      const int best = at[k] < 0 ? -1 : few[at[k]];
      if (best == i || small) {
        const int where = atomicAdd(&waiting, 1);
        if (where < MAX_POINTS) list[where] = i;
      } else {
        chosen<T, 2>(c, line, i, best < 0 ? 0 : sized(size[k]), best);
      }
    }
  }
  __syncthreads();
  if (tid == 0) c.left[line] = waiting > MAX_POINTS;
  if (waiting > MAX_POINTS) return;
  for (int w = warp; w < waiting; w += 8) {
    const int i = list[w];
    const T m0 = u0s.at(i), m1 = u1s.at(i);
    B best = -1;
    int place = n;
    for (int j = lane; j < n; j += 32) {
      const Point<T> p = {v0s.at(j), v1s.at(j), xs.at(j), T(0)};
      const B here = sized(product(m0, m1, p));
      if (here > best && j != i) {
        best = here;
        place = j;
      }
    }
    furthest(best, place);
    if (lane == 0) chosen<T, 2>(c, line, i, best, place);
  }
}

template <typename T>
__device__ void pruned(const Normalise<T>& c) {
  __shared__ Pruned<T> shared;
  const i64 steps = c.x.step | c.u0.step | c.u1.step | c.v0.step | c.v1.step;
  if ((u64)steps <= 1) {
    pruned<T, true>(c, shared);
  } else {
    pruned<T, false>(c, shared);
  }
}
KERNEL(256, pruned_float, Normalise<float>) { pruned<float>(c); }
KERNEL(256, pruned_double, Normalise<double>) { pruned<double>(c); }

// Compaction of provenance ids ----------------------------------------------------------------

struct Used {
  const int* numbers;
  u32* there;         // bitmap of the numbers that occur; initially 0
  i64 words, slots;   // words of the bitmap, and of those the words in shared memory
  i64 n, dims;
  i64 shape[DIMS], step[1][DIMS];  // innermost first
};

// Sets bits; skips the atomic where they are set already, as most are.
__device__ __forceinline__ void set_bits(u32* word, u32 bits) {
  if (bits & ~*word) atomicOr(word, bits);
}

#define NUMBERS_PER_THREAD 4  // read at a time

// Bitmap of the numbers that occur.
KERNEL(TALLY_THREADS, used, Used) {
  DYNAMIC(u32, mine);
  for (i64 w = threadIdx.x; w < c.slots; w += TALLY_THREADS) mine[w] = 0;
  __syncthreads();
  const i64 all = (i64)gridDim.x * TALLY_THREADS;
  for (i64 i = (i64)blockIdx.x * TALLY_THREADS + threadIdx.x; i < c.n; i += NUMBERS_PER_THREAD * all) {
    u32 some[NUMBERS_PER_THREAD];
#pragma unroll
    for (int k = 0; k < NUMBERS_PER_THREAD; k++) {
      i64 at[1];
      find(c, i + k * all < c.n ? i + k * all : i, at);
      some[k] = (u32)c.numbers[at[0]];
    }
#pragma unroll
    for (int k = 0; k < NUMBERS_PER_THREAD; k++) {
      const i64 w = some[k] / 32;
      if (w < c.slots) {
        set_bits(mine + w, 1u << some[k] % 32);
      } else if (w < c.words) {
        set_bits(c.there + w, 1u << some[k] % 32);
      }
    }
  }
  __syncthreads();
  for (i64 w = threadIdx.x; w < c.slots; w += TALLY_THREADS) set_bits(c.there + w, mine[w]);
}

struct Close {
  const u32* there;  // bitmap of the numbers that occur
  int* table;
  i64 count;
};

// Renumbers the numbers that occur from 1 on, without gaps; 0 stays 0. One block.
KERNEL(TALLY_THREADS, close, Close) {
  __shared__ int sums[TALLY_THREADS];
  const i64 words = (c.count + 31) / 32;
  int before = 0;
  for (i64 first = 0; first < words; first += TALLY_THREADS) {
    const i64 w = first + threadIdx.x;
    u32 bits = w < words ? c.there[w] : 0;
    if (!w) bits &= ~1u;
    sums[threadIdx.x] = __popc(bits);
    __syncthreads();
    for (int step = 1; step < TALLY_THREADS; step *= 2) {
      const int more = (int)threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
      __syncthreads();
      sums[threadIdx.x] += more;
      __syncthreads();
    }
    int number = before + sums[threadIdx.x] - __popc(bits);
    for (i64 n = 32 * w; n < 32 * w + 32 && n < c.count; n++) {
      const int yes = bits >> (n % 32) & 1;
      number += yes;
      c.table[n] = yes ? number : 0;
    }
    before += sums[TALLY_THREADS - 1];
    __syncthreads();
  }
}

struct Renumber {
  int* out;
  const int* numbers;
  const int* table;
  i64 count, n, dims;  // entries of the table, elements
  i64 shape[DIMS], step[2][DIMS];  // strides of out, numbers; innermost first
};

// out = table[numbers]; 0 for a number outside the table.
KERNEL(256, renumber, Renumber) {
  for (i64 i = (i64)blockIdx.x * 256 + threadIdx.x; i < c.n; i += (i64)gridDim.x * 256) {
    i64 at[2];
    find(c, i, at);
    const u32 number = (u32)c.numbers[at[1]];
    c.out[at[0]] = number < c.count ? c.table[number] : 0;
  }
}

// Products in half precision --------------------------------------------------------------------

struct Split {
  const u32* x;
  unsigned short* out;
  i64 n, each, parts;  // elements of x, and of each of its rows; how many parts
};

// A float32 number as the sum of two or three bfloat16 numbers of its sign: eight bits of it each,
// the last rounded to nearest. The parts of a row follow each other.
KERNEL(256, split, Split) {
  for (i64 i = (i64)blockIdx.x * 256 + threadIdx.x; i < c.n; i += (i64)gridDim.x * 256) {
    unsigned short* out = c.out + i / c.each * c.parts * c.each + i % c.each;
    u32 rest = c.x[i];
    for (i64 part = 1; part < c.parts; part++, out += c.each) {
      *out = (unsigned short)(rest >> 16);
      rest = (u32)__float_as_int(__uint_as_float(rest) - __uint_as_float(rest & 0xffff0000u));
    }
    *out = (unsigned short)((rest + 0x7fff + (rest >> 16 & 1)) >> 16);
  }
}

// How large tensors are ---------------------------------------------------------------------------

#define SIZED_PER_BLOCK (256 * 64)

struct SizedTensor {
  const void* x;
  i64 n, kind, first;  // elements in memory in any order
  double *partial, *out;  // four numbers for each thread block, and of the tensor
};
typedef Jobs<SizedTensor, 64> SizedTensors;

// Sums of squares, of sizes and of what is not 0, and the largest size. A sum of sizes is NaN if
// one of them is, which the largest does not tell.
struct Sizes {
  double squares, most, count, sum;

  __device__ __forceinline__ void take(double squared, double largest, double counted, double size) {
    squares += squared;
    most = fmax(most, largest);
    count += counted;
    sum += size;
  }
};

// Over all threads of the block, always in the same order; thread 0 has the result.
__device__ __forceinline__ void over_block(Sizes& mine) {
  __shared__ double held[4][256];
  const int t = threadIdx.x;
  held[0][t] = mine.squares, held[1][t] = mine.most, held[2][t] = mine.count, held[3][t] = mine.sum;
  for (int half = 128; half; half /= 2) {
    __syncthreads();
    if (t < half) {
      const int other = t + half;
      mine.take(held[0][other], held[1][other], held[2][other], held[3][other]);
      held[0][t] = mine.squares, held[1][t] = mine.most, held[2][t] = mine.count, held[3][t] = mine.sum;
    }
  }
}

KERNEL(256, sizes, SizedTensors) {
  const SizedTensor& own = c.mine();
  const i64 block = blockIdx.x - own.first, from = block * SIZED_PER_BLOCK;
  const i64 to = min(own.n, from + SIZED_PER_BLOCK);
  Sizes all = {0, 0, 0, 0};
  for (i64 i = from + threadIdx.x; i < to; i += 256) {
    const unsigned short* narrow = (const unsigned short*)own.x;
    const float x = own.kind == 0 ? ((const float*)own.x)[i]
                    : own.kind == 3 ? of_bfloat(narrow[i]) : of_half(narrow[i]);
    const double size = fabs((double)x);
    all.take(size * size, size, x != 0, size);
  }
  over_block(all);
  if (threadIdx.x) return;
  double* out = own.partial + 4 * block;
  out[0] = all.squares, out[1] = all.most, out[2] = all.count, out[3] = all.sum;
}

KERNEL(256, sizes_combined, SizedTensors) {
  const SizedTensor& own = c.job[blockIdx.x];
  const i64 blocks = (own.n + SIZED_PER_BLOCK - 1) / SIZED_PER_BLOCK;
  Sizes all = {0, 0, 0, 0};
  for (i64 i = threadIdx.x; i < blocks; i += 256) {
    const double* part = own.partial + 4 * i;
    all.take(part[0], part[1], part[2], part[3]);
  }
  over_block(all);
  if (threadIdx.x) return;
  own.out[0] = sqrt(all.squares), own.out[1] = all.sum != all.sum ? all.sum : all.most;
  own.out[2] = all.count, own.out[3] = all.sum;
}
