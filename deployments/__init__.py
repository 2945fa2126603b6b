"""The Ray floor: alone in knowing Ray, HTTP and pydantic. It builds the Serve app around `replicas` and `routing`."""
