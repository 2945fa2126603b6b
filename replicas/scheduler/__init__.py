"""Decides what runs in each step: host code over ints, no device, no model."""
