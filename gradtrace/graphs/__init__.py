"""The graph of operators as data and as a picture."""
