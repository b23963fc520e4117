"""Tuning constants of the kernels. They change time and memory, not results."""

MAX_PRODUCTS = 1 << 20
"""The most products that plain torch materialises at a time."""

PIECE_ELEMENTS = 1 << 24
"""Larger leaves are summed in pieces of this many elements: their provenance ids need not be in
memory all at once, and the exact sums of a piece fit into 64 bits per bin."""

CONCAT_MAX_ELEMENTS = 1 << 12
"""Tensors of fewer elements are concatenated before they are summed."""

TABLE_ENTRIES, CUDA_TABLE_ENTRIES = 1 << 22, 1 << 24
"""How many entries of a table to compute at a time: on the CPU, on a GPU."""

# CPU ---------------------------------------------------------------------------------------------

SINGLE_THREAD_MAX_ELEMENTS = 1 << 15
"""Up to this many elements one thread is faster than several."""

CPU_BATCH_MAX_ELEMENTS = 1 << 14
"""Leaves of at most this many elements are measured together, many in one call."""

MEASURED_MIN_ELEMENTS = 256
"""Rows of at least so many elements are measured each by itself; shorter ones by their numbers."""

ZEROS_ROOM = 1 << 12
"""So many elements that are 0 are listed in one pass; if there are more, in two."""

THREAD_PRODUCTS_PER_CALL = 1_000_000_000
"""Products per thread and call: at most a third of a second, during which Ctrl-C is delayed."""

SPLIT_MIN_ROWS = 64
"""The fewest rows per call when a matrix is split: each call packs the other matrix again."""

# Contractions on a GPU ---------------------------------------------------------------------------

CUDA_MIN_PRODUCTS = 1 << 22
"""The fewest products for which the CUDA kernels, and copying operands for them, pay."""

PAIRS_MIN_K = 128
"""The fewest k for which bfloat16 operands are multiplied in pairs. On an H200, in ms, with the
search, and in float32: 32 of 1,024 × 64 and 64 × 1,024: 1.0 and 0.7; 4,096 × 512 and 512 × 14,336:
3.2 and 3.9; 1,024 × 5,632 and 5,632 × 2,048: 0.96 and 1.4."""

SPLIT_PRODUCT_MIN_PRODUCTS, SPLIT_PRODUCT_MIN_COLUMNS = 1 << 30, 256
"""The fewest products, and columns of the second matrix, for which float32 is split into bfloat16
parts. On an H200, in µs, for batches of m × k and k × n: 32 of 1,024 × 64 and 64 × 1,024: 67, and
145 to 208 in float32; 1,024 × 2,048 and 2,048 × 2,048: 57 and 195; 32 of 512 × 128 and 128 × 512:
no difference; 32 of 1,024 × 1,024 and 1,024 × 64: 178 and 109."""

TWO_PARTS_MIN_K = 512
"""From so many products a sum on it is split into two parts, and else into three."""

SMALL_WORKSPACE_BYTES = 1 << 26
"""Workspaces up to this many bytes are allocated without asking how much memory is free."""

WORKSPACE_MAX_BYTES = 1 << 31
"""The most bytes of workspace per launch; larger contractions are split."""

CACHED_WORKSPACE_MAX_BYTES = 1 << 25
"""Workspaces up to this many bytes are cached for the next launch."""

SPLIT_MIN_EXTENT = 256
"""Rows or columns that are not split further."""

SHARE_MIN_STEPS = 8
"""The fewest steps of a tile that are worth a thread block."""

WHOLE_ROWS_MAX_K = 128
"""Up to this many k, the search for the argmax reads whole rows into shared memory."""

STRIDED_ROWS_MAX_BYTES, SEARCH_SHARED_MAX_BYTES = 48 << 10, 72 << 10
"""The most bytes of shared memory for 8 rows with strided k, and for all rows held in it."""

# Other kernels on a GPU --------------------------------------------------------------------------

PAIRWISE_MAX_ELEMENTS = 64
"""Up to this many elements per line, all pairs are compared without pruning first."""

BLOCK_MIN_ELEMENTS = 4096
"""Elements from which another thread block pays when counting."""

SHARED_BYTES = 47 << 10
"""Bytes of shared memory for bins."""

WORK_MAX_BYTES = 1 << 27
"""The most bytes of bins in a workspace."""

CACHED_WORDS = 1 << 19
"""Words of 8 bytes of the workspace that is cached for each stream."""

SPACE_WORDS = 1 << 16
"""Words of 8 bytes per allocation, for the provenance ids of reduced leaves in a batch."""

PAIRED_SUMS_MAX_ELEMENTS = 4096
"""The longest lines of which a GPU sums all pairs; above, sorting them is faster."""

CACHED_BINARIES = 64
"""The most compiled kernels of all versions and GPUs that are kept in the user's cache folder."""

SUMMED_ON_HOST_MAX_COUNTS = 1 << 16
"""Up to this many counts above 0, by leaf and set of components, the CPU adds up what a GPU has
counted."""

READ_MAX_COUNTS = 1 << 20
"""Up to this many counts, those included that are 0, are read from a GPU to see how many are not.
"""

# Captured passes ---------------------------------------------------------------------------------

CAPTURED_AFTER_LOSSES = 3
"""With which loss of one plan its pass gets fixed sizes; it is captured with the next."""

CAPTURED_MAX_BYTES = 1 << 31
"""The most bytes of a device for one captured pass, with the copies of its operands."""

CAPTURED_MAX_PASSES = 4
"""The most captured passes at a time."""

CAPTURED_AGAIN_AFTER_LOSSES = 50
"""After so many more losses a pass is captured again that was freed for others."""
