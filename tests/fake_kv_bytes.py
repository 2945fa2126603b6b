"""The K/V bytes of a FakeDevice: what engines without tensors are snapshotted through."""

import numpy as np

from kvtransfer.layout import KvLayout
from kvtransfer.replay.payload import Payload, Slots, payload_shape
from tests.fakes import FakeDevice


class FakeKvBytes:
    """Implements KvBytes. One layer, one head: K is the slot's token, V its position, each 8 bytes."""

    def __init__(self, device: FakeDevice, *, page_size: int, model: str = "fake") -> None:
        self._device = device
        self.layout = KvLayout(
            model=model,
            architecture="MHA",
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            dtype="int64",
            item_bytes=8,
            page_size=page_size,
            tp=1,
        )

    def read(self, slots: Slots) -> Payload:
        both = np.stack([self._device.tokens[slots], self._device.positions[slots]])  # [2, n]
        return np.ascontiguousarray(both).view(np.uint8).reshape(payload_shape(self.layout, len(slots)))

    def write(self, slots: Slots, payload: Payload) -> None:
        assert payload.shape == payload_shape(self.layout, len(slots))
        tokens, positions = np.ascontiguousarray(payload).view(np.int64).reshape(2, len(slots))
        self._device.tokens[slots] = tokens
        self._device.positions[slots] = positions
