"""Files, written whole or not at all, read within limits and checked against schemas; tables."""
