"""One request to its end: leases, tries, resume."""
