"""The engine of one model instance: pools, radix cache, scheduler, model runner. Imports no Ray, no web framework."""
