"""Requests and tokens beside Ray: one socket for each engine and router."""
