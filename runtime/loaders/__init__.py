"""Loaders: processes of a host that read samples and collate them ahead of its ranks.

In: a model file, a plan, and which ranks the host has. Out: their rows of every mini-batch, by the time that they ask.
``server.py`` is the process that loaders are forked from; it deals out the work that ``work.py`` divides. A loader
(``process.py``) sends what it has read to the ranks that asked for it (``client.py``), as ``wire.py`` spells it.
"""
