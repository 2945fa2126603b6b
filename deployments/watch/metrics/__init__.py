"""Metrics of a process: the catalogue's entries as a Prometheus client's objects, and their own HTTP port."""
