"""Good files of every kind that autopar reads, and ways to break them."""
