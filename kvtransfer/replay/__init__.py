"""Recorded requests, run again and compared."""
