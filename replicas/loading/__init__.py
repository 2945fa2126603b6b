"""A model from its files: which, its config, its weights, and the products that suit this machine."""
