"""KV transfers of KV pages between two replicas: one room each."""
