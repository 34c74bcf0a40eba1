"""The interpreter of a rank's program, and the times of what it performs.

In: a program, a stage, a mailbox, a reducer. Out: one step, and when each of its actions began and ended.
Read first: ``execute.py``.
"""
