"""How a rank that fails leaves: what its launcher must be told, and when."""

INTERRUPTED = 130
"""The exit code that a shell reports for a program that Ctrl-C ended."""

LAST_WORDS = 0.5
"""Seconds between the last output and the end of the job.

MPICH's launcher drops what it has not read when a rank aborts.
"""
