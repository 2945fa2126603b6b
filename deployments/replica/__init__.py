"""One model replica as a Ray Serve deployment."""
