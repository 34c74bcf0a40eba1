"""Options: what users ask of a plan, a profile and a run, each said once.

Commands, functions of Python, the reference and refusals are made of these classes. Read ``plan.py`` first.
"""
