"""Constrained decoding: grammars from what clients ask for, and matchers that say which tokens may come next."""
