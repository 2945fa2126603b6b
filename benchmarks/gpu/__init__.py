"""The engine on a GPU against the limits of that GPU."""
