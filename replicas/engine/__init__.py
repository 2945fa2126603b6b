"""Submit, step, loop: the engine of one model instance."""
