"""Formats: the files and columns that autopar's parts hand each other; data and validation, nothing else.

In and out: JSON text. ``document.py`` reads it strictly and names the path of what is wrong; each other file is one
kind of document. Read ``plan.py`` first.
"""
