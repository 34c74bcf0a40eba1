"""Profiler: layer graph and device become a profile; links become a cluster.

In: a model that ``subject.py`` captures. Out: seconds and bytes of every layer, measured (``profile.py``) or estimated
for a GPU that is not there (``estimate.py``), and the links between ranks (``probe.py``). Read ``profile.py`` first.
"""

if __name__ != "autopar.profiler":
    raise ImportError("import this package as autopar.profiler; profiler/ on its own is not a package")

from autopar.profiler.probe import local_cluster, measure_links
from autopar.profiler.profile import profile
from autopar.profiler.subject import Subject, prepare

__all__ = ["Subject", "local_cluster", "measure_links", "prepare", "profile"]
