"""KV memory: how much there is (sizing), who has it (allocator, table) and where its bytes are (pool)."""
