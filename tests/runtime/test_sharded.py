"""Stages whose replicas divide what they hold train as the plain loop does: docs/promises.md, in float64."""
