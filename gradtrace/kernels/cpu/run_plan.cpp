// All instructions of a plan in one call: what `tracing/executor.py` does by the rule `greedy`, for
// values whose gradients are known. `tracing/plan_table.py` writes the table that is read here and
// says what each instruction means; the kernels are those that Python calls one by one.
//
// A value is provenance ids, one for each element in row-major order, or none if it is uniform, and
// the sets that they stand for. Ids are numbered as in Python, so that counts come in its order.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "contract.h"
#include "functions.h"
#include "threads.h"

namespace gradtrace {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t COMPACT_ABOVE = 512;  // COMPACT_ABOVE_ENTRIES in Python
constexpr int DIMS = 6;
constexpr auto TURN = std::chrono::milliseconds(200);  // then Python looks for signals

enum Op : int64_t {
  ROOT, BITS, COPY, GATHER, TABLE, PLACE, SCALE, SELECT, UNIFORM, JOIN, CONCAT, EMIT, FREE, OPS
};
enum Selects : int64_t { ASK, CONTRACT, REDUCE, NORMALISE, SCATTER };

// The table, as Python passes it.
struct Plan {
  const int64_t* ops;
  int64_t words;
  const struct Strided* views;
  int64_t view_count;
  const int64_t* pointers;
  int64_t pointer_count;
  const uint64_t* bits;  // (sets, width)
  int64_t bit_count, width, slots, threads, single;  // single: elements up to which one thread is faster
};

// Elements in memory: sizes and strides of dimensions, the outermost first. `pointer`: the index of
// the address, -1 for provenance ids.
struct Shape {
  int64_t dims, size[DIMS], step[DIMS];

  int64_t count() const {
    int64_t all = 1;
    for (int64_t d = 0; d < dims; d++) all *= size[d];
    return all;
  }
  bool flat() const { return dims == 0 || (dims == 1 && step[0] == 1); }
};

struct Strided {
  int64_t pointer, offset;
  Shape shape;
};
static_assert(sizeof(Strided) == 15 * 8, "as Python writes it");

// Copies a strided tensor to contiguous memory.
template <typename T>
void copied(const T* from, const Shape& how, T* to, int64_t dim = 0) {
  if (dim >= how.dims) {
    *to = *from;
    return;
  }
  const int64_t n = how.size[dim], step = how.step[dim];
  if (dim + 1 == how.dims) {
    for (int64_t i = 0; i < n; i++) to[i] = from[i * step];
    return;
  }
  int64_t inner = 1;
  for (int64_t d = dim + 1; d < how.dims; d++) inner *= how.size[d];
  for (int64_t i = 0; i < n; i++) copied(from + i * step, how, to + i * inner, dim + 1);
}

// Memory for ids and sizes, taken again for others of the same number of elements.
class Pool {
 public:
  ~Pool() {
    for (auto& each : free_) {
      for (int32_t* one : each.second) delete[] one;
    }
  }
  std::shared_ptr<int32_t> ids(int64_t n) {
    std::vector<int32_t*>& some = free_[n];
    int32_t* found = nullptr;
    if (some.empty()) {
      found = new int32_t[std::max<int64_t>(n, 1)];
    } else {
      found = some.back();
      some.pop_back();
    }
    return {found, [this, n](int32_t* one) { free_[n].push_back(one); }};
  }
  std::shared_ptr<float> floats(int64_t n) {
    std::shared_ptr<int32_t> raw = ids(n);
    return {raw, reinterpret_cast<float*>(raw.get())};
  }

 private:
  std::unordered_map<int64_t, std::vector<int32_t*>> free_;
};

using Ids = std::shared_ptr<int32_t>;
using Floats = std::shared_ptr<float>;
using Words = std::vector<uint64_t>;

// Provenance sets in words: (sets, width). Those of one table are one object.
struct Sets {
  Words words;
  int64_t count;
};
using Rows = std::shared_ptr<const Sets>;

struct State {
  bool there = false, unmasked = false;
  Ids ids;
  Rows rows;
  Words extra;
  int64_t value = -1;  // a view, of a term of a sum
  Floats size;
};

// What has been counted.
struct Counted {
  std::vector<int64_t> leaves;  // (leaves, 5): leaf, first count, counts, blank ones, table
  std::vector<int64_t> counts;
  std::vector<double> sums;
  Words extra;                  // (leaves, width)
  std::vector<Rows> tables;
  Words sets;                   // of all tables, and where each begins
  std::vector<int64_t> starts;
};

struct Beyond {};  // the plan needs what only Python has
struct Wanted {    // and this a gradient that is computed when it is counted
  int64_t pointer;
};
struct Asked {     // or the ids that a map selects, given those of its input, of which Python knows more
  int64_t question;
  const int32_t* ids;
  int64_t count;
};

class Execution {
 public:
  explicit Execution(const Plan& plan)
      : plan_(plan), at_(plan.ops), end_(plan.ops + plan.words), states_(plan.slots), sums_(plan.slots) {
    Words one(plan.width, 0);
    one[0] = 1;
    default_ = std::make_shared<const Sets>(Sets{one, 1});
  }

  // Executes instructions; returns whether there are more. `answer`: the ids that were asked for.
  bool run(const int32_t* answer) {
    if (asked_) {
      reply_ = {};
      if (answer) {
        reply_ = pool_.ids(wanted_);
        std::copy_n(answer, wanted_, reply_.get());
      }
      replied_ = true;
      asked_ = false;
    }
    const auto begin = Clock::now();
    while (at_ < end_) {
      const int64_t* before = at_;
      try {
        step();
      } catch (const Wanted&) {
        at_ = before;
        throw;
      } catch (const Asked&) {
        at_ = before;
        asked_ = true;
        throw;
      }
      if (at_ < end_ && Clock::now() - begin > TURN) return true;
    }
    gather_tables();
    return false;
  }

  Counted found;

 private:
  int64_t next() {
    require(at_ < end_);
    return *at_++;
  }
  int64_t slot() {
    const int64_t n = next();
    require(n >= 0 && n < plan_.slots);
    return n;
  }
  State& known() {
    State& state = states_[slot()];
    require(state.there);
    return state;
  }
  const Strided& view() {
    const int64_t n = next();
    require(n >= 0 && n < plan_.view_count);
    return plan_.views[n];
  }
  const Strided* maybe_view() { return *at_ < 0 ? (next(), nullptr) : &view(); }
  int threads(int64_t n) const { return n <= plan_.single ? 1 : static_cast<int>(plan_.threads); }

  template <typename T = float>
  const T* address(int64_t pointer) const {
    require(pointer >= 0 && pointer < plan_.pointer_count && plan_.pointers[pointer]);
    return reinterpret_cast<const T*>(plan_.pointers[pointer]);
  }
  // The elements of a view side by side; copied to `held` if they are not.
  const float* dense(const Strided& view, Floats& held) {
    const float* from = address(view.pointer) + view.offset;
    if (view.shape.flat()) return from;
    held = pool_.floats(view.shape.count());
    copied(from, view.shape, held.get());
    return held.get();
  }

  void step() {
    switch (next()) {
      case ROOT: return put(slot(), {}, default_, Words(plan_.width, 0), false);
      case BITS: return bits();
      case COPY: return copy();
      case GATHER: return gather();
      case TABLE: return table();
      case PLACE: return place();
      case SCALE: return scale();
      case SELECT: return select();
      case UNIFORM: return uniform();
      case JOIN: return join();
      case CONCAT: return concat();
      case EMIT: return emit();
      case FREE: states_[slot()] = State(); return;
      default: require(false);
    }
  }

  void put(int64_t slot, Ids ids, Rows rows, Words extra, bool unmasked) {
    State& out = states_[slot];
    out = State();
    out.there = true;
    out.ids = std::move(ids);
    out.rows = std::move(rows);
    out.extra = std::move(extra);
    out.unmasked = unmasked;
  }

  void bits() {
    State& state = known();
    const int64_t n = next();
    require(n >= 0 && n < plan_.bit_count);
    for (int64_t w = 0; w < plan_.width; w++) state.extra[w] |= plan_.bits[n * plan_.width + w];
  }

  // Gathers ---------------------------------------------------------------------------------------

  void moved(int64_t out, const State& from, Ids ids) {
    put(out, std::move(ids), from.rows, from.extra, from.unmasked);
  }
  void copy() {
    const int64_t out = slot();
    const State from = known();
    moved(out, from, from.ids);
  }
  void gather() {
    const int64_t out = slot();
    const State from = known();
    const Strided& how = view();
    Ids ids;
    if (from.ids) {
      ids = pool_.ids(how.shape.count());
      copied(from.ids.get() + how.offset, how.shape, ids.get());
    }
    moved(out, from, ids);
  }
  void table() {
    const int64_t out = slot();
    const State from = known();
    const int64_t* source = address<int64_t>(next());
    const int64_t n = next(), inputs = next();
    Ids ids;
    if (from.ids) {
      ids = pool_.ids(n);
      for (int64_t i = 0; i < n; i++) {
        require(source[i] < inputs);
        ids.get()[i] = source[i] < 0 ? 0 : from.ids.get()[source[i]];
      }
    }
    moved(out, from, ids);
  }
  // Writes (outer, length) to a part of each of `outer` lines of `pitch` elements.
  struct Part {
    int64_t outer, length, pitch, start;
  };
  Part part() {
    Part some;
    some.outer = next();
    some.length = next();
    some.pitch = next();
    some.start = next();
    require(some.outer >= 0 && some.length >= 0 && some.start >= 0 && some.start + some.length <= some.pitch);
    return some;
  }
  void place() {
    const int64_t out = slot();
    const State from = known();
    const Part some = part();
    Ids ids;
    if (from.ids) {
      ids = pool_.ids(some.outer * some.pitch);
      std::fill_n(ids.get(), some.outer * some.pitch, 0);
      for (int64_t k = 0; k < some.outer; k++) {
        std::copy_n(from.ids.get() + k * some.length, some.length, ids.get() + k * some.pitch + some.start);
      }
    }
    moved(out, from, ids);
  }
  void scale() {
    const int64_t out = slot();
    const State from = known();
    put(out, from.ids, from.rows, from.extra, bool(from.ids));
  }

  // The largest contribution ----------------------------------------------------------------------

  void select() {
    const int64_t out = slot();
    const State from = known();
    const Strided& x = view();
    put(out, selected(x, from.ids), from.rows, from.extra, false);
  }

  // A uniform value: elements that are 0 have a path where a contribution is not 0.
  void uniform() {
    const int64_t out = slot();
    const State from = known();
    const Strided* value = maybe_view();
    if (!value) {
      put(out, {}, from.rows, from.extra, false);
      return;
    }
    const Strided& x = view();
    const int64_t* after = at_ + 1 + *at_;  // the map, if it is not needed
    require(*at_ >= 1 && after <= end_);
    next();
    Floats held;
    const float* values = dense(*value, held);
    const int64_t n = value->shape.count();
    Ids ids;
    if (any_zero(values, n)) {
      const Ids reached = selected(x, {});
      bool missed = false;
      for (int64_t i = 0; i < n; i++) missed |= values[i] == 0 && reached.get()[i];
      if (missed) {
        ids = pool_.ids(n);
        for (int64_t i = 0; i < n; i++) ids.get()[i] = values[i] != 0 || reached.get()[i];
      }
    }
    at_ = after;
    put(out, ids, from.rows, from.extra, false);
  }

  static bool any_zero(const float* x, int64_t n) {
    constexpr int64_t SOME = 1024;
    for (int64_t i = 0; i < n; i += SOME) {
      if (kernels_for(x).any_zero(x + i, std::min(SOME, n - i))) return true;
    }
    return false;
  }

  Ids nonzero(const Strided& x) {
    Floats held;
    const float* values = dense(x, held);
    const int64_t n = x.shape.count();
    Ids ids = pool_.ids(n);
    for (int64_t i = 0; i < n; i++) ids.get()[i] = values[i] != 0;
    return ids;
  }

  // The id of the largest contribution to each element, by the map that follows in the table; 1 of
  // all elements that are not 0, without ids.
  Ids selected(const Strided& x, Ids given) {
    if (!given) given = nonzero(x);
    const int32_t* ids = given.get();
    switch (next()) {
      case ASK: {
        const int64_t question = next();
        wanted_ = next();
        if (!replied_) throw Asked{question, (held_ = given).get(), x.shape.count()};
        replied_ = false;
        held_ = {};
        require(reply_ || !wanted_);
        return std::move(reply_);
      }
      case CONTRACT: return contracted(x, ids);
      case REDUCE: return reduced(x, ids);
      case NORMALISE: return normalised(ids);
      case SCATTER: return scattered(x, ids);
      default: require(false);
    }
    return {};
  }

  // ids in another order, if a view follows.
  Ids ordered(Ids ids) {
    const Strided* order = maybe_view();
    if (!order) return ids;
    Ids found = pool_.ids(order->shape.count());
    copied(ids.get() + order->offset, order->shape, found.get());
    return found;
  }

  // An operand of a contraction: where it is, and its strides.
  template <typename T>
  void matrix(const T* data, Kind kind, View& out) {
    out.data = data;
    out.kind = kind;
    out.size = 0;
    out.batch = {nullptr, next()};
    out.rows = {nullptr, next()};
    out.inner = {nullptr, next()};
  }

  Ids contracted(const Strided& x, const int32_t* ids) {
    Call call{};
    const Strided *other = maybe_view(), *weight = &view(), *order = maybe_view();
    Floats first, second;
    Ids moved;
    const Strided& from = other ? *other : x;
    const float* a = other ? dense(from, first) : address(x.pointer) + x.offset;
    const bool packed = next();
    const float* b = packed ? dense(*weight, second) : address(weight->pointer) + weight->offset;
    if (order) {
      moved = pool_.ids(order->shape.count());
      copied(ids + order->offset, order->shape, moved.get());
      ids = moved.get();
    }
    call.by_column = next();
    matrix(a, FLOAT32, call.by_column ? call.b : call.a);
    matrix(b, FLOAT32, call.by_column ? call.a : call.b);
    matrix(ids, INT32, call.ids);
    call.batches = next();
    call.rows = next();
    call.inner = next();
    call.columns = next();
    call.kind = FLOAT32;
    Ids out = pool_.ids(product_of({call.batches, call.rows, call.columns}));
    call.out_ids = out.get();
    call.last_batch = call.batches;
    call.last_row = call.rows;
    call.threads = plan_.threads;
    call.algorithm = BY_MEASURE;
    done(gradtrace_contract(&call));
    return ordered(out);
  }

  // Ids in the order of a view, if one follows.
  const int32_t* turned(const int32_t* ids, Ids& held) {
    const Strided* order = maybe_view();
    if (!order) return ids;
    held = pool_.ids(order->shape.count());
    copied(ids + order->offset, order->shape, held.get());
    return held.get();
  }

  Ids reduced(const Strided& x, const int32_t* ids) {
    const Strided* other = maybe_view();
    Ids order;
    ids = turned(ids, order);
    const int64_t* how = at_;
    for (int k = 0; k < 12; k++) next();
    const int64_t n = product_of({how[1], how[3]});
    Floats sizes = pool_.floats(n);
    Ids out = pool_.ids(n);
    Floats held;
    const float* from = other ? dense(*other, held) : address(x.pointer) + x.offset;
    const int64_t all = product_of({how[0], how[1], how[2], how[3]});
    done(gradtrace_reduce(0, from, ids, how, sizes.get(), out.get(), threads(all)));
    return out;
  }

  Ids normalised(const int32_t* ids) {
    const int64_t lines = next(), n = next(), rank = next();
    require(rank == 1 || rank == 2);
    int64_t from[21];
    Floats held[6];
    Ids order;
    for (int k = 0; k < 3 + 2 * rank; k++) {
      const bool last = k == 2 + 2 * rank;
      const int64_t pointer = last ? -1 : next();
      const void* place = nullptr;
      if (last) {
        place = turned(ids, order);
      } else {
        const Strided* other = maybe_view();
        place = other ? dense(*other, held[k]) : address(pointer);
      }
      from[3 * k] = reinterpret_cast<int64_t>(place);
      from[3 * k + 1] = next();
      from[3 * k + 2] = next();
    }
    Ids out = pool_.ids(product_of({lines, n}));
    const int many = threads(16 * lines * n);
    done(gradtrace_normalise(0, lines, n, static_cast<int>(rank), from, nullptr, nullptr, out.get(), many));
    return ordered(out);
  }

  Ids scattered(const Strided& x, const int32_t* ids) {
    const int64_t* target = address<int64_t>(next());
    const int64_t size = next(), n = x.shape.count();
    Floats held, sizes = pool_.floats(size);
    Ids out = pool_.ids(size);
    std::fill_n(sizes.get(), size, 0.0f);
    std::fill_n(out.get(), size, 0);
    done(gradtrace_scatter(0, n, dense(x, held), ids, target, size, sizes.get(), out.get()));
    return out;
  }

  static void done(int status) {
    if (status == OUT_OF_MEMORY) throw std::bad_alloc();
    require(status == DONE);
  }

  // Sets ------------------------------------------------------------------------------------------

  // The sets of both, and by how much the ids of the second are shifted.
  int64_t joined(Rows& rows, Words& extra, const State& other) const {
    if (rows == other.rows && extra == other.extra) return 0;
    const int64_t width = plan_.width, count = rows->count;
    Sets both{Words((count + other.rows->count) * width), count + other.rows->count};
    write(*rows, extra, both.words.data());
    write(*other.rows, other.extra, both.words.data() + count * width);
    rows = std::make_shared<const Sets>(std::move(both));
    std::fill(extra.begin(), extra.end(), 0);
    return count;
  }
  void write(const Sets& sets, const Words& extra, uint64_t* out) const {
    for (int64_t n = 0; n < sets.count; n++) {
      for (int64_t w = 0; w < plan_.width; w++, out++) *out = sets.words[n * plan_.width + w] | extra[w];
    }
  }

  // Removes equal and unused sets of a large table, and numbers the ids anew; ids may be written to.
  void compact(int32_t* ids, int64_t n, Rows& rows, Words& extra) const {
    const int64_t count = rows->count, width = plan_.width;
    if (count <= COMPACT_ABOVE) return;
    std::vector<int32_t> number(count + 1, 0);
    for (int64_t i = 0; i < n; i++) number[ids[i]] = 1;
    Sets kept{Words(), 0};
    std::unordered_multimap<uint64_t, int32_t> seen;
    Words set(width);
    bool any = false;
    for (int64_t k = 0; k < count; k++) {
      if (!number[k + 1]) continue;
      any = true;
      uint64_t hash = 0;
      for (int64_t w = 0; w < width; w++) {
        set[w] = rows->words[k * width + w] | extra[w];
        hash = (hash ^ set[w]) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 29;
      }
      const auto same = seen.equal_range(hash);
      auto one = same.first;
      while (one != same.second && !std::equal(set.begin(), set.end(), kept.words.begin() + one->second * width)) ++one;
      if (one == same.second) {
        one = seen.emplace(hash, static_cast<int32_t>(kept.count++));
        kept.words.insert(kept.words.end(), set.begin(), set.end());
      }
      number[k + 1] = one->second + 1;
    }
    std::fill(extra.begin(), extra.end(), 0);
    if (!any) {
      rows = default_;
      return;
    }
    if (kept.count < count) {
      number[0] = 0;
      for (int64_t i = 0; i < n; i++) ids[i] = number[ids[i]];
    }
    rows = std::make_shared<const Sets>(std::move(kept));
  }

  // Sums ------------------------------------------------------------------------------------------

  struct Term {
    int64_t slot, value;
    bool partial, moved;
  };

  void join() {
    const int64_t out = slot(), n = next(), count = next();
    const bool alike = next(), partial = next();
    const int64_t deferred = next();  // 1: its gradient is known, 2: it is not
    const bool unknown = deferred == 2;
    std::vector<State> terms;
    size_t checked = 0;
    for (int64_t k = 0; k < count; k++) {
      const int64_t from = slot(), value = next();
      const bool is_partial = next(), is_moved = next();
      require(value >= -1 && value < plan_.view_count);
      if (is_partial) {
        std::vector<State> some = std::move(sums_[from]);
        sums_[from].clear();
        require(!some.empty());
        if (terms.empty()) {
          terms = std::move(some);
          checked = terms.size() > 1 ? terms.size() : 0;
        } else {
          for (State& each : some) terms.push_back(std::move(each));
        }
        continue;
      }
      require(states_[from].there);
      State state = states_[from];
      state.value = value;
      if (terms.empty() && is_moved && state.ids) state.unmasked = true;
      terms.push_back(std::move(state));
    }
    require(!terms.empty());
    const Strided* total = maybe_view();
    bool uniform = alike;
    for (size_t k = 0; k < terms.size(); k++) {
      uniform &= !terms[k].ids && (k < checked || !terms[k].size);
    }
    if (partial) {
      if (!uniform) {
        State sum = compared(terms, n);
        terms.clear();
        terms.push_back(std::move(sum));
      }
      sums_[out] = std::move(terms);
      return;
    }
    if (uniform) {
      put(out, deferred ? Ids() : cancelled(terms, total, n), terms[0].rows, terms[0].extra, false);
    } else {
      if (unknown) throw Beyond();
      State sum = compared(terms, n);
      sum.size = nullptr;
      states_[out] = std::move(sum);
    }
  }

  // Ids of a sum of uniform terms, if an element is 0 and a term is not; else none.
  Ids cancelled(const std::vector<State>& terms, const Strided* total, int64_t n) {
    require(total && total->shape.count() == n);
    Floats held;
    const float* sum = dense(*total, held);
    if (!any_zero(sum, n)) return {};
    Ids ids = pool_.ids(n);
    for (int64_t i = 0; i < n; i++) ids.get()[i] = sum[i] != 0;
    bool missed = false;
    for (const State& term : terms) {
      Floats kept;
      const float* values = of(term, n, kept);
      for (int64_t i = 0; i < n; i++) {
        const bool there = sum[i] == 0 && values[i] != 0;
        missed |= there;
        ids.get()[i] |= there;
      }
    }
    return missed ? ids : Ids();
  }

  const float* of(const State& term, int64_t n, Floats& held) {
    if (term.size) return term.size.get();
    require(term.value >= 0 && plan_.views[term.value].shape.count() == n);
    return dense(plan_.views[term.value], held);
  }

  // The ids of the largest term.
  State compared(std::vector<State>& terms, int64_t n) {
    State sum;
    State& first = terms[0];
    sum.there = true;
    sum.rows = first.rows;
    sum.extra = first.extra;
    sum.ids = pool_.ids(n);
    Floats held;
    const float* values = of(first, n, held);
    int32_t* ids = sum.ids.get();
    if (!first.ids) {
      for (int64_t i = 0; i < n; i++) ids[i] = values[i] != 0;
    } else if (first.size && !first.unmasked) {
      std::copy_n(first.ids.get(), n, ids);
    } else {
      for (int64_t i = 0; i < n; i++) ids[i] = values[i] != 0 ? first.ids.get()[i] : 0;
    }
    if (first.size) {
      sum.size = std::move(first.size);
    } else {
      sum.size = pool_.floats(n);
      std::memcpy(sum.size.get(), values, n * sizeof(float));
      int32_t* bits = reinterpret_cast<int32_t*>(sum.size.get());
      for (int64_t i = 0; i < n; i++) bits[i] &= 0x7fffffff;
    }
    for (size_t k = 1; k < terms.size(); k++) {
      const State& other = terms[k];
      const int64_t shift = joined(sum.rows, sum.extra, other);
      require(sum.rows->count < int64_t(1) << 31);
      Floats kept;
      done(gradtrace_merge(0, n, sum.size.get(), ids, of(other, n, kept), other.ids.get(), 1,
                           static_cast<int32_t>(shift), threads(n)));
    }
    compact(ids, n, sum.rows, sum.extra);
    return sum;
  }

  void concat() {
    const int64_t out = slot(), n = next(), count = next();
    const bool alike = next();
    const Strided& value = view();
    struct Piece {
      State state;
      const Strided* value;
      Part part;
    };
    std::vector<Piece> pieces;
    bool uniform = alike;
    for (int64_t k = 0; k < count; k++) {
      const State& state = known();
      const Strided* here = &view();
      pieces.push_back({state, here, part()});
      uniform &= !state.ids;
      require(pieces.back().part.outer * pieces.back().part.pitch == n);
    }
    require(count > 0);
    Rows rows = pieces[0].state.rows;
    Words extra = pieces[0].state.extra;
    if (uniform) {
      put(out, {}, rows, extra, false);
      return;
    }
    Ids ids = pool_.ids(n);
    for (const Piece& piece : pieces) {
      const Ids from = piece.state.ids ? piece.state.ids : nonzero(*piece.value);
      const int32_t shift = static_cast<int32_t>(joined(rows, extra, piece.state));
      const Part& some = piece.part;
      for (int64_t k = 0; k < some.outer; k++) {
        const int32_t* line = from.get() + k * some.length;
        int32_t* to = ids.get() + k * some.pitch + some.start;
        for (int64_t i = 0; i < some.length; i++) to[i] = line[i] ? line[i] + shift : 0;
      }
    }
    const bool large = rows->count > COMPACT_ABOVE;
    if (large) {
      mask(ids.get(), value, n);
      compact(ids.get(), n, rows, extra);
    }
    put(out, ids, rows, extra, !large);
  }

  void mask(int32_t* ids, const Strided& value, int64_t n) {
    require(value.shape.count() == n);
    Floats held;
    const float* values = dense(value, held);
    for (int64_t i = 0; i < n; i++) ids[i] = values[i] != 0 ? ids[i] : 0;
  }

  // Leaves ----------------------------------------------------------------------------------------

  void emit() {
    const int64_t leaf = next();
    const State& state = known();
    const Strided* gradient = maybe_view();
    if (gradient && !plan_.pointers[gradient->pointer]) throw Wanted{gradient->pointer};
    const int64_t n = gradient ? gradient->shape.count() : 0;
    Floats held;
    const float* values = gradient ? dense(*gradient, held) : nullptr;
    if (!gradient && state.ids) throw Beyond();
    const int64_t entries = !gradient ? 2 : state.ids ? state.rows->count + 1 : 1;
    const int64_t first = static_cast<int64_t>(found.counts.size());
    found.counts.resize(first + entries);
    found.sums.resize(first + entries);
    int64_t* counts = &found.counts[first];
    double* sums = &found.sums[first];
    if (state.ids) {
      Ids ids = state.ids;
      if (state.unmasked) {
        ids = pool_.ids(n);
        for (int64_t i = 0; i < n; i++) ids.get()[i] = values[i] != 0 ? state.ids.get()[i] : 0;
      }
      done(gradtrace_tally(0, n, ids.get(), values, entries, counts, sums, threads(n)));
    } else if (gradient) {
      done(gradtrace_magnitude(0, n, values, counts, sums, threads(n)));
    }
    const auto same = std::find(found.tables.begin(), found.tables.end(), state.rows);
    const int64_t table = same - found.tables.begin();
    if (same == found.tables.end()) found.tables.push_back(state.rows);
    for (const int64_t word : {leaf, first, entries, int64_t(entries > 1), table}) {
      found.leaves.push_back(word);
    }
    found.extra.insert(found.extra.end(), state.extra.begin(), state.extra.end());
  }

  void gather_tables() {
    for (const Rows& rows : found.tables) {
      found.starts.push_back(static_cast<int64_t>(found.sets.size()) / plan_.width);
      found.sets.insert(found.sets.end(), rows->words.begin(), rows->words.end());
    }
    found.starts.push_back(static_cast<int64_t>(found.sets.size()) / plan_.width);
  }

  Plan plan_;
  const int64_t *at_, *end_;
  Pool pool_;  // outlives the states
  Rows default_;
  std::vector<State> states_;
  std::vector<std::vector<State>> sums_;  // over some users of a value
  bool asked_ = false, replied_ = false;
  int64_t wanted_ = 0;  // ids of the answer
  Ids reply_, held_;
};

}  // namespace
}  // namespace gradtrace

using gradtrace::guarded;

// Begins or continues the execution of a plan (its state is at `held`; null: begins). The answer:
// 0 done, 1 to be continued, 2 needs Python, 3 to be continued with the pointer whose index follows,
// 4 with the place of ids in answer[2], by a map: the number of a question, the ids of the input and
// how many these are follow.
// If it is done, then the number of leaves, counts and tables and the places of leaves, counts, sums,
// extra bits, sets and where each table begins, until it is ended.
GRADTRACE_API int gradtrace_run_plan(const gradtrace::Plan* plan, void** held, int64_t* answer) {
  return guarded([&] {
    gradtrace::require(held && answer);
    if (!*held) {
      gradtrace::require(plan && plan->words >= 0 && plan->width > 0 && plan->slots >= 0 && plan->threads > 0);
      gradtrace::require_places(plan->words, {plan->ops});
      gradtrace::require_places(plan->view_count, {plan->views});
      gradtrace::require_places(plan->pointer_count, {plan->pointers});
      gradtrace::require_places(plan->bit_count, {plan->bits});
      for (int64_t n = 0; n < plan->view_count; n++) {
        const gradtrace::Shape& shape = plan->views[n].shape;
        gradtrace::require(plan->views[n].pointer < plan->pointer_count);
        gradtrace::require(shape.dims >= 0 && shape.dims <= gradtrace::DIMS);
        for (int64_t d = 0; d < shape.dims; d++) gradtrace::require(shape.size[d] > 0);
      }
      *held = new gradtrace::Execution(*plan);
    }
    auto* execution = static_cast<gradtrace::Execution*>(*held);
    try {
      answer[0] = execution->run(reinterpret_cast<const int32_t*>(answer[2]));
    } catch (const gradtrace::Beyond&) {
      answer[0] = 2;
    } catch (const gradtrace::Wanted& wanted) {
      answer[0] = 3;
      answer[1] = wanted.pointer;
    } catch (const gradtrace::Asked& asked) {
      answer[0] = 4;
      answer[1] = asked.question;
      answer[2] = reinterpret_cast<int64_t>(asked.ids);
      answer[3] = asked.count;
    }
    if (answer[0]) return;
    const gradtrace::Counted& found = execution->found;
    answer[1] = static_cast<int64_t>(found.leaves.size()) / 5;
    answer[2] = static_cast<int64_t>(found.counts.size());
    answer[3] = static_cast<int64_t>(found.tables.size());
    const void* places[] = {found.leaves.data(), found.counts.data(), found.sums.data(),
                            found.extra.data(), found.sets.data(), found.starts.data()};
    std::memcpy(answer + 4, places, sizeof places);
  });
}

// Frees what the execution of a plan holds.
GRADTRACE_API void gradtrace_end_plan(void* held) {
  delete static_cast<gradtrace::Execution*>(held);
}
