"""Constants of this package that change how fast or how patient it is, not what it computes."""

JOIN_SECONDS = 600
"""How long to wait for all ranks of a group to join."""

SILENCE_SECONDS = 300
"""A machine that does not answer for this long counts as gone."""

START_SECONDS = 300
"""How long to wait for all processes of ``torchrun`` to start."""

STORE_TIMEOUT_SECONDS = 10
"""Timeout of one request to the store of ``torch.distributed``."""

CONNECT_SECONDS = 10
"""Timeout of one attempt to connect to rank 0; it may have several addresses."""

FIRST_POLL_SECONDS = 0.01
"""Seconds between the first two looks for rank 0's address in the store; later ones double."""

MAX_POLL_SECONDS = 2.0
"""The most seconds between two looks for rank 0's address."""

MESSAGE_SECONDS = 0.06
"""Seconds that a message from rank 0 may take to reach all other ranks."""

MESSAGE_MAX_BYTES = 1 << 30
"""The longest message that is accepted."""

MAX_CONTAINER_ITEMS = 10_000
"""Of containers with more items than this that code refers to, only the number of items counts."""

SLOW_WRITE_SECONDS = 0.05
"""A checkpoint that takes longer than this to write is not written after every batch."""

WRITE_INTERVAL_FACTOR = 20
"""Such a checkpoint is written again after this many times its writing time."""
