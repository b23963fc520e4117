"""How long our passes take, as ratios to PyTorch's in the same run: ``python -m benchmarks``."""
