"""Limits on what is read of a run."""

MAX_UNREADABLE_LINES = 1000
"""The most consecutive torn or empty lines that are accepted: a killed process leaves one."""
