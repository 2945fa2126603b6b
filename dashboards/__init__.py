"""The metric catalogue and what is made from it. Imports nothing else of ours."""
