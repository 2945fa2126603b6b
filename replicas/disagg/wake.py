"""Wake: tells whoever drives an engine that its desk has news.

The desk exists before its engine, and the engine before its loop: so the loop says later what is to be called.
"""

from collections.abc import Callable


class Wake:
    """Called on the transfer thread; must not block. Deaf until `target` is set."""

    def __init__(self) -> None:
        self.target: Callable[[], None] | None = None

    def __call__(self) -> None:
        if self.target is not None:
            self.target()
