"""Pages of the reference: the command line, the library, files, the model file and schedules, as Markdown.

In: the options of commands, signatures, records and docstrings. Out: the text of a page, one module for each.
``text.py`` turns docstrings into Markdown; read ``commands.py`` first.
"""
