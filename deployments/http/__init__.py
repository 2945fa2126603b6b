"""Wire types in and out: the endpoints and what guards them."""
