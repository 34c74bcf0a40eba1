"""Capture: a user's model file becomes a graph of layers."""
