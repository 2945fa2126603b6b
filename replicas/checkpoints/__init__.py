"""Weights as they lie on disk, safetensors or GGUF, under the names and in the shapes that layers want."""
