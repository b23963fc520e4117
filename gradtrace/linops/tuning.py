"""How much of a map is materialised at a time, and which of two algorithms is taken."""

ROWS_MAX_ENTRIES = 1 << 20
"""The most entries of rows of a Jacobian that are materialised at a time."""

SPARSE_CHUNK_PRODUCTS = 1 << 22
"""The most products of a sparse map that are materialised at a time."""

HULL_CHUNK_PRODUCTS = 1 << 20
"""The most products that a search for corners of a convex hull materialises at a time."""

DISTANCES_CHUNK_WEIGHTS = 1 << 18
"""The most weights of pairwise distances that are materialised at a time; this many fit into a
CPU's cache.
"""

HULL_DIRECTIONS = 16
"""The number of directions over a half circle whose extreme points form the first polygon."""

PAIRWISE_MAX_ELEMENTS = 64
"""Lines of at most this many elements are compared pairwise."""

SPARSE_RATIO = 8
"""A scatter counts as sparse if it has this many times fewer inputs than outputs; then only outputs
that are the target of an input are computed.
"""

KERNEL_MIN_ELEMENTS = 1 << 12
"""A diagonal plus low rank of fewer elements is a few operations of torch: to prepare the call of a
kernel takes as long.
"""

CACHED_ELEMENTS = 1 << 16
"""Several operations in a row on a tensor of more elements are done for so many at a time, which
stay in a CPU's cache.
"""

BATCHED_MIN_ELEMENTS = 1 << 12
"""Copies of a contraction with fewer elements are one product, even if these have to be moved."""

SEMIRING_PIECE_ELEMENTS = 1 << 20
"""Softmax and norms are computed in a semiring for about so many elements at a time."""
