"""Files: written atomically, read within size limits, checked against schemas; text tables."""
