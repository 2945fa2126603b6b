"""Runs plans on the device: batch building, the model, and sampling."""
