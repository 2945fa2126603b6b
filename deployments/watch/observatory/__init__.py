"""The observatory: a deployment of its own that asks the routers for their state and shows it; on no request's way."""
