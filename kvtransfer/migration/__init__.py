"""Cached pages that move between the host tiers of replicas: out of one that leaves, into one that is new."""
