// Aggregates the tallies of leaves by component: one pass over the groups (leaf, pair, provenance
// id), and for each over the bits of its id's provenance set.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "threads.h"

namespace {

using gradtrace::require;
using gradtrace::require_places;

// A leaf: offset and number of its counts, how many of them are for no path, the rows of its
// provenance table (number, words per row), its first pair, and its index among leaves.
struct Leaf {
  int64_t start, size, blank, rows, width, length, pair, place;
};

struct Request {
  int64_t leaves, entries, pairs, components, places, width, reach, owned;  // sizes; words per set
  const Leaf* leaf;
  const int64_t* counts;  // (entries)
  const double* sums;     // (entries)
  const uint64_t* extra;  // (leaves, width): bits added to every set of a leaf
  const uint64_t* able;   // (places, reach): bits that a path from that leaf could have
  const int64_t* owner;   // (places + 1): offsets into own
  const int64_t* own;     // (owned): components that a leaf belongs to
  const int64_t* begin;   // (64 * max(width, reach) + 1): offsets into of
  const int64_t* of;      // components of each bit
  const double* totals;   // (leaves): number of possible paths
  double* eligible;       // (components, pairs, 2)
  double* through;        // (components, pairs, 2)
  double* unreached;      // (components)
  int64_t* odd;           // whether some sum is not finite
};
static_assert(sizeof(Request) == 22 * 8 && sizeof(Leaf) == 8 * 8, "as Python packs them");

// Compensated sums: with the rounding error of each, so that the order hardly ever matters.
struct Number {
  double sum = 0, rest = 0;

  void add(double x) {
    const double old = sum, back = old + x - old;
    sum = old + x;
    rest += (old - (sum - back)) + (x - back);
  }

  void add(const Number& other) {
    add(other.sum);
    rest += other.rest;
  }

  double value() const { return std::isfinite(sum) ? sum + rest : sum; }
};

class Sum {
 public:
  explicit Sum(const Request& all) : all(all), seen(all.components, -1), mine(all.components, -1) {
    check();
    const int64_t size = 2 * all.components * all.pairs;
    eligible.resize(size);
    through.resize(size);
    for (int64_t n = 0; n < all.leaves; n++) add(n, all.leaf[n]);
    for (int64_t k = 0; k < size; k++) {
      all.eligible[k] = eligible[k].value();
      all.through[k] = through[k].value();
    }
  }

 private:
  void check() const {
    const int64_t most = 64 * std::max(all.width, all.reach);
    require(all.pairs >= 0 && all.components >= 0 && all.places >= 0 && all.owned >= 0);
    require(all.width >= 1 && all.reach >= 1 && all.begin && all.owner);
    require_places(all.leaves, {all.leaf, all.extra, all.able, all.totals});
    require_places(all.entries, {all.counts, all.sums});
    require_places(gradtrace::product_of({2, all.components, all.pairs}), {all.eligible, all.through});
    require_places(all.components, {all.unreached});
    require_places(all.begin[most], {all.of});
    require_places(all.owned, {all.own});
    require_places(1, {all.odd});
    ascending(all.begin, most, all.begin[most], all.of);
    ascending(all.owner, all.places, all.owned, all.own);
    for (int64_t n = 0; n < all.leaves; n++) {
      const Leaf& leaf = all.leaf[n];
      require(0 <= leaf.start && 0 <= leaf.blank && leaf.blank <= leaf.size);
      require(leaf.size <= all.entries && leaf.start <= all.entries - leaf.size);
      require(0 <= leaf.place && leaf.place < all.places && leaf.pair >= 0 && leaf.length >= 0);
      require(leaf.rows && 1 <= leaf.width && leaf.width <= all.width);
      if (leaf.size == leaf.blank) continue;
      require(leaf.length >= 1);
      const int64_t pairs = (leaf.size - leaf.blank + leaf.length - 1) / leaf.length;
      require(pairs <= all.pairs && leaf.pair <= all.pairs - pairs);
    }
  }

  void ascending(const int64_t* starts, int64_t n, int64_t end, const int64_t* which) const {
    require(starts[0] == 0 && starts[n] == end);
    for (int64_t i = 0; i < n; i++) require(starts[i] <= starts[i + 1]);
    for (int64_t i = 0; i < end; i++) require(0 <= which[i] && which[i] < all.components);
  }

  // body(component) for the components that share a bit with the words and do not own the leaf.
  template <typename Word, typename Body>
  void each(int64_t width, const Word& word, const Body& body) {
    stamp++;
    for (int64_t w = 0; w < width; w++) {
      for (uint64_t bits = word(w); bits; bits &= bits - 1) {
        const int64_t bit = 64 * w + __builtin_ctzll(bits);
        for (int64_t k = all.begin[bit]; k < all.begin[bit + 1]; k++) {
          const int64_t component = all.of[k];
          if (seen[component] == stamp || mine[component] == here) continue;
          seen[component] = stamp;
          body(component);
        }
      }
    }
  }

  void add(int64_t n, const Leaf& leaf) {
    here = n;
    for (int64_t k = all.owner[leaf.place]; k < all.owner[leaf.place + 1]; k++) mine[all.own[k]] = n;
    const uint64_t* rows = reinterpret_cast<const uint64_t*>(leaf.rows);
    const uint64_t* extra = all.extra + n * all.width;
    std::vector<Number> found;  // by pair: number of elements, and their sum
    double paths = 0;
    for (int64_t k = 0; k < leaf.size - leaf.blank; k++) {
      const int64_t count = all.counts[leaf.start + leaf.blank + k];
      if (!count) continue;
      const int64_t pair = k / leaf.length;
      const uint64_t* row = rows + (k - pair * leaf.length) * leaf.width;
      if (!((row[0] | extra[0]) & 1)) continue;  // no path
      double sum = all.sums[leaf.start + leaf.blank + k];
      if (!std::isfinite(sum)) *all.odd = 1, sum = 0;
      const double number = static_cast<double>(count);
      paths += number;
      found.resize(std::max<size_t>(found.size(), 2 * pair + 2));
      found[2 * pair].add(number);
      found[2 * pair + 1].add(sum);
      const auto word = [&](int64_t w) { return (w < leaf.width ? row[w] : 0) | extra[w]; };
      each(all.width, word, [&](int64_t component) {
        const int64_t at = 2 * (all.pairs * component + leaf.pair + pair);
        through[at].add(number);
        through[at + 1].add(sum);
      });
    }
    const double missing = all.totals[n] - paths;
    const uint64_t* able = all.able + leaf.place * all.reach;
    each(all.reach, [&](int64_t w) { return able[w]; }, [&](int64_t component) {
      all.unreached[component] += missing;
      for (size_t k = 0; k < found.size(); k++) {
        eligible[2 * (all.pairs * component + leaf.pair) + k].add(found[k]);
      }
    });
  }

  const Request& all;
  std::vector<Number> eligible, through;
  std::vector<int64_t> seen, mine;  // by component: the last visit, and the last leaf that it owns
  int64_t stamp = 0, here = 0;
};

}  // namespace

GRADTRACE_API int gradtrace_groups(const Request* all) {
  return gradtrace::guarded([&] {
    require(all);
    Sum sum(*all);
  });
}
