"""Attribution: which parts of an input move a scalar, and through what."""
