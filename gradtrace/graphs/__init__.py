"""The operator graph of a loss, as data and as SVG."""
