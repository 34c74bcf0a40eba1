"""The plain loop: one process trains the whole model; every training run is compared with it."""
