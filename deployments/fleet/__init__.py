"""Which replicas there are, how loaded they are and what they have cached."""
