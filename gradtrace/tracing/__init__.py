"""Gradient tracing: provenance of every element, influence tables, and single paths."""
