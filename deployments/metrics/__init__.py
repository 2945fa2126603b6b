"""Emission of the catalogue's metrics (dashboards/catalog.py) by each process, on a port of its own."""
