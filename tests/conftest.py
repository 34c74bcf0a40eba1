"""Settings that every test shares."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

# A shell starts background jobs with interrupts ignored, which the commands under test would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # So does nohup with the end of the terminal: a handler, which children do not inherit, keeps it from this process.
    signal.signal(signal.SIGHUP, lambda number, frame: None)

settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("search", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
