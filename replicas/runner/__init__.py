"""Runs plans on the device: batch building, the model, sampling, and follower ranks."""
