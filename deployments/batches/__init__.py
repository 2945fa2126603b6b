"""Batches: files of requests that run in the gaps that other requests leave."""
