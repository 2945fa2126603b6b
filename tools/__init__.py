"""Command-line tools of the project; each is run as ``python -m tools.<name>``, most of them from the Makefile."""
