"""Prefill on one replica, decode on another: the two roles that an engine plays in a KV transfer."""
