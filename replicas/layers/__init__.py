"""Tensor-parallel building blocks that the model files are made of."""
