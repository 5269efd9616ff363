"""How a rank that fails leaves: what its launcher must be told, and when."""

import signal

INTERRUPTED = 130
"""The exit code that a shell reports for a program that Ctrl-C ended."""

PREEMPTED = 75
"""The exit code of a job that a signal ended after it wrote a checkpoint.

`EX_TEMPFAIL` of sysexits.h: start it again, and it goes on.
"""

LEFT = 121
"""The exit code when a rank has ended its script while others wait for it."""

OUT_OF_STEP = 122
"""The exit code when ranks wait for each other in different collectives."""

STALLED = 124
"""The exit code when ranks have waited longer than `timeout` (as of `timeout`(1))."""

STACKS = getattr(signal, "SIGRTMAX", 64) - 3
"""The signal on which a rank writes its Python stacks; libraries leave it alone."""

LAST_WORDS = 0.5
"""Seconds between the last output and the end of the job.

MPICH's launcher drops what it has not read when a rank aborts.
"""
