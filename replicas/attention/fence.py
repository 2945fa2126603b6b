"""Lets the host wait until the device has come past a point of its work: what copies read may then be written."""

import torch


class Fence:
    """One point at a time. On a CPU nothing is ever under way, and both calls do nothing."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._marked = False

    def mark(self) -> None:
        """The point is behind all that the current stream has been given so far."""
        if self._event is not None:
            self._event.record()
            self._marked = True

    def wait(self) -> None:
        """Returns when the device has passed the mark made last."""
        if self._event is not None and self._marked:
            self._event.synchronize()
