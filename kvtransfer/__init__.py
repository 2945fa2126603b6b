"""Moves KV pages between address spaces and names them. Knows pages, ranks and bytes, not schedulers."""
