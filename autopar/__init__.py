"""autopar: measure a PyTorch model, plan the fastest way to train it, train it that way."""
