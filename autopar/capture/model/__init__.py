"""The model: its file and functions, batch, optimizer, state, and what it does besides computing."""
