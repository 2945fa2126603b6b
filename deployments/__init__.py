"""The Ray floor: the only package that knows Ray, HTTP and pydantic. It builds the Serve app around `replicas` and `routing`."""
