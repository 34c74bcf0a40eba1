"""Report: tables and pictures of what the formats hold; computes nothing.

In: documents and timelines. Out: tables for a console, figures.
Read ``table.py`` first, the one look of all tables, then ``plan.py``.
"""
