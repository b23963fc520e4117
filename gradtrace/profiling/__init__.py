"""Detects growth of the time or memory of a loop's steps."""
