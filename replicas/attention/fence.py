"""A point in the device's work that the host can wait for; memory that copies read may be written after it."""

import torch


class Fence:
    """One point in the current stream to wait for. On a CPU work is never pending, and both calls do nothing."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._marked = False

    def mark(self) -> None:
        """Move the point behind all work queued on the current stream so far."""
        if self._event is not None:
            self._event.record()
            self._marked = True

    def wait(self) -> None:
        """Wait until the device has passed the last mark."""
        if self._event is not None and self._marked:
            self._event.synchronize()
