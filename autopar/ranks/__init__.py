"""Ranks: processes, their rendezvous, deadlines and clean-up.

In: a function's name and its arguments. Out: what every rank returned, or the one failure that is to blame.
Read ``pool.py`` first (ranks of this host, forked by ``fork_server.py``); ``environment.py``, ``meeting.py`` and
``supervisor.py`` are for launchers.
"""
