"""Layers: an exported model is cut at its units, built as layers that run alone, and checked against the model."""
