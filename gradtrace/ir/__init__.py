"""The backward program as data, the passes that rewrite it, and the interpreter that runs it."""
