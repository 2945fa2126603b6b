"""Decides where a request goes. No I/O, no Ray, no torch; the clock is injected."""
