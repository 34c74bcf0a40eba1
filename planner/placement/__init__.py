"""Placement: which devices stages may take, and what is near what."""
