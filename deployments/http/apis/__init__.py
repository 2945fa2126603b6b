"""The endpoints of other makers' interfaces, each of which converts its requests to a chat."""
