"""KV memory: its size (sizing), its owners (allocator, table) and its bytes (pool)."""
