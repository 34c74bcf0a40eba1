"""Simulator: interprets a program with durations; one that is exact for all, and quicker ones where they agree."""
