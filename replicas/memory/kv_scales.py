"""Scales of K and V that a checkpoint has, for a pool of 8-bit floats on a GPU (SPEC C06).

Owns:      the names under which checkpoints have them: ``k_scale`` and ``v_scale`` of the attention, of its ``attn`` or
           of the projections, ``kv_scale`` for both, and ``output_scale`` of a projection (compressed-tensors).
Never:     loads weights (loading/weights.py, which knows these names by `KV_SCALE`).
Invariant: a number times its scale is the value. A layer for which the checkpoint has no scale, or a negative one (as
           some say "none"), has 1.
"""

import math
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from replicas.errors import InvalidConfig

KV_SCALE = re.compile(
    r"layers\.(\d+)\.self_attn\.(?:(?:attn\.)?(k|v|kv)_scale|(?:[kv]_proj)\.(k|v)_scale|(k|v)_proj\.output_scale)$"
)


def checkpoint_scales(folder: Path, num_layers: int) -> tuple[tuple[float, float], ...]:
    """Read the scales (of K, of V) of each layer from the safetensors in ``folder``; () if they have none.

    One that is given by head counts as its largest, which holds every head's numbers.

    Raises: InvalidConfig for a scale that is no number, or of a layer that the model lacks.
    """
    found: dict[tuple[int, str], float] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, scale in _scales(file):
            match = KV_SCALE.search(name)
            assert match is not None
            layer, parts = int(match[1]), match[2] or match[3] or match[4]
            if layer >= num_layers or not math.isfinite(scale):
                raise InvalidConfig(f"model: {name} = {scale:g} in {file.name}, of {num_layers} layers")
            found |= {(layer, part): scale for part in parts if scale > 0}
    if not found:
        return ()
    return tuple((found.get((layer, "k"), 1.0), found.get((layer, "v"), 1.0)) for layer in range(num_layers))


def _scales(file: Path) -> list[tuple[str, float]]:
    """Read the largest number of each tensor that is a scale. Raises: InvalidConfig for a file that is damaged."""
    try:
        with safe_open(file, framework="pt") as tensors:
            names = [name for name in tensors.keys() if KV_SCALE.search(name)]  # noqa: SIM118 - not a mapping
            return [(name, float(tensors.get_tensor(name).float().max())) for name in names]
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise InvalidConfig(f"model: {file} cannot be read: {error}. It may be cut short: fetch it again") from error
