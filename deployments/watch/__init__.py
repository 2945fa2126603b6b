"""What is seen of a running Manta: metrics, observatory, terminal."""
