"""The control links between replicas."""
