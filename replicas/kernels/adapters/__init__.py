"""What adapters (LoRA) add to products: rows of a step, by the adapter of each."""
