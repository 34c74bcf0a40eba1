"""Plans performed without their devices: on tensors without data, or in virtual time.

In: a plan; its model, or the profile and the prices of its actions. Out: the bytes that stages hold, or when actions
ran. Read first: ``steps.py`` (performs steps by all ranks), ``stand_ins.py`` (charges for actions), ``memory.py``.
"""
