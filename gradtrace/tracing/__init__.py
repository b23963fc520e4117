"""Gradient tracing: a plan is executed with provenance of every element, and leaves are counted."""
