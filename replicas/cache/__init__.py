"""The prefix cache over the KV pool: radix tree, chunk cache, and the one door to both (kv)."""
