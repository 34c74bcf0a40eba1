"""Tensors between ranks: posted, sent, received, and let go.

In: the sends and receives of a rank's program. Out: activations and gradients, joined from the senders' rows.
Read first: ``mailbox.py``, then ``transport.py``, which it sends by.
"""
