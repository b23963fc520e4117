"""Exit codes, and what they mean."""

from __future__ import annotations

FAILED, WRONG, BUG, INTERRUPTED, UNREAD = 1, 2, 3, 130, 141

MEANING = {
    0: "all is well",
    FAILED: "a check failed: a wrong gradient, a finding",
    WRONG: "usage error: an option, a file, the script itself",
    BUG: "a bug in gradtrace",
    INTERRUPTED: "stopped by Ctrl-C",
    UNREAD: "whoever read the output has gone, as in gradtrace trace ... | head",
}
