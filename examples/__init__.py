"""The bundled examples: ordinary PyTorch, one model per file; nothing of autopar imports them."""
