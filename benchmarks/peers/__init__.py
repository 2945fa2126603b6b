"""Other systems beside Manta in one run: ``python -m benchmarks.peers``."""
