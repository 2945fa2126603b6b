"""The KV pool of Double Sparsity: K and V as in MHATokenToKVPool, and beside them a short label of each key.

Owns:      the labels, which are the keys' heaviest channels, copied so that a score over them reads a run of memory;
           the file that names those channels (replicas/calibrate.py writes it).
Never:     chooses channels, or computes attention (attention/double_sparse.py).
Invariant: the label of a slot is its key at the channels of its layer and head, for every writer that uses this pool.
           Transfers and the host tier bypass it, so an engine with either is refused.
Thread:    the runner's.
Source:    Yang et al. 2024, "Post-Training Sparse Attention with Double Sparsity" (arXiv:2408.07092); SPEC C04.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from replicas.config import EngineConfig, ModelConfig
from replicas.errors import InvalidConfig
from replicas.memory.pool import MHATokenToKVPool


class DoubleSparseTokenToKVPool(MHATokenToKVPool):
    """``buffer`` as in MHATokenToKVPool; ``label_buffer`` [L, slots, K, heavy channels] float32, zero at first."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        channels: Tensor,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """``channels`` [L, K, C] int64: the heaviest of each layer and head of this rank."""
        num_layers, num_kv_heads, num_channels = channels.shape
        super().__init__(num_pages, page_size, num_layers, num_kv_heads, head_dim, dtype, device)
        self.channels = channels.to(self.device)
        num_slots = (num_pages + 1) * page_size
        self.label_buffer = torch.zeros(num_layers, num_slots, num_kv_heads, num_channels, device=self.device)

    def set_kv_buffer(self, layer: int, loc: Tensor, k: Tensor, v: Tensor) -> None:
        super().set_kv_buffer(layer, loc, k, v)
        self._label(layer, loc.long())

    def write_slots(self, slots: npt.NDArray[np.int32], data: Tensor) -> None:
        super().write_slots(slots, data)
        self._label_all(torch.from_numpy(slots.astype(np.int64)).to(self.device))

    def write_pages(self, pages: Any, data: Tensor) -> None:
        super().write_pages(pages, data)
        first = torch.as_tensor(pages, dtype=torch.int64, device=self.device) * self.page_size
        self._label_all((first[:, None] + torch.arange(self.page_size, device=self.device)).flatten())

    def give_back(self) -> None:
        super().give_back()
        self.label_buffer.zero_()

    def _label_all(self, slots: Tensor) -> None:
        for layer in range(self.num_layers):
            self._label(layer, slots)

    def _label(self, layer: int, slots: Tensor) -> None:
        """Copy the labels of ``slots`` [n] from their keys, as the pool has rounded them."""
        keys, _ = self.read_kv(layer, slots)
        self.label_buffer[layer, slots] = keys.float().gather(2, self.channels[layer].expand(len(slots), -1, -1))


def write_channels(path: Path, channels: Tensor, model: ModelConfig) -> None:
    """Write ``channels`` [L, K, C] of ``model`` to a JSON file."""
    found = {"architecture": model.architecture, "head_dim": model.head_dim, "channels": channels.tolist()}
    path.write_text(json.dumps(found) + "\n", encoding="utf-8")


def read_channels(path: Path, model: ModelConfig) -> Tensor:
    """Read the channels [L, K, C] of all ranks' heads. Raises: InvalidConfig for a file that is not of this model."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        channels = torch.tensor(found["channels"], dtype=torch.int64)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidConfig(
            f"cache.label_channels = {str(path)!r} cannot be read ({type(error).__name__}: {error}): make it with "
            f"python -m replicas.calibrate {model.path} TEXT --out {path}"
        ) from error
    wanted = (model.num_layers, model.num_kv_heads)
    fits = channels.ndim == 3 and tuple(channels.shape[:2]) == wanted and 1 <= channels.shape[2] <= model.head_dim
    if not fits or channels.min() < 0 or channels.max() >= model.head_dim:
        raise InvalidConfig(
            f"cache.label_channels = {str(path)!r} has channels {tuple(channels.shape)}; this model has {wanted[0]} "
            f"layers and {wanted[1]} KV heads of {model.head_dim}: make it anew with python -m replicas.calibrate"
        )
    return channels


def rank_channels(config: EngineConfig, rank: int) -> Tensor:
    """Read the channels [L, K, C] of the KV heads of ``rank``. Raises: InvalidConfig, as `read_channels`."""
    assert config.cache.label_channels is not None, "resolve.py refuses it"
    channels, tp = read_channels(Path(config.cache.label_channels), config.model), config.parallel.tp
    num_heads = config.model.num_kv_heads
    first = rank * num_heads // tp
    return channels[:, first : first + max(1, num_heads // tp)]
