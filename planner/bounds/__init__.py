"""Bounds: seconds that no schedule of some stages can undercut."""
