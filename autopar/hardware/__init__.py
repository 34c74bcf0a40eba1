"""Hardware: where devices stand, and what is known of those and of links that are not at hand.

In: names such as ``2x8xH100:400Gbps``. Out: a ``Cluster`` with the links and collectives that data sheets promise.
Read ``clusters.py`` first; ``gpus.py`` is the table of GPUs, with its sources, and ``kinds.py`` joins
profiles of several kinds of devices, and says which of their times are those of a cluster's.
"""
