"""The cache: a captured graph is kept by what it depends on, and read again where nothing of that has changed."""
