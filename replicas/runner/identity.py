"""Names a model by what is in its folder, so that two nodes know that they serve the same one.

Owns:      the identity that KvLayout.model and snapshots carry.
Never:     reads a whole checkpoint: a large one would take minutes.
Invariant: equal files give equal identities, wherever they lie.
"""

import json
from pathlib import Path

import xxhash

from replicas.config import Quantization
from replicas.kernels.int8_groups import RULE
from replicas.runner.weights import model_folder

NOT_MEANING = frozenset({"_name_or_path", "transformers_version"})  # of config.json: differ, and change no K/V
SAMPLES = 32  # blocks read of each weight file, evenly spaced, its header and its end among them
SAMPLE_BYTES = 1 << 16


def model_identity(path_or_hub_id: str, quantization: Quantization) -> str:
    """32 hex digits over the config and the weight files: names, sizes, headers and samples of their bytes; and over
    how the weights are rounded when they are loaded: K and V of the one mean something else to the other.

    Two checkpoints of one architecture (a fine-tune and its base) differ nearly everywhere, so that samples tell them
    apart; one that was edited in a few numbers only may go unnoticed.
    """
    folder = model_folder(path_or_hub_id)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    meaning = {key: value for key, value in config.items() if key not in NOT_MEANING}
    digest = xxhash.xxh3_128(json.dumps(meaning, sort_keys=True).encode())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        _add_samples(digest, path)
    if quantization != "none":
        digest.update(RULE.encode())
    return str(digest.hexdigest())


def _add_samples(digest: "xxhash.xxh3_128", path: Path) -> None:
    last = max(path.stat().st_size - SAMPLE_BYTES, 0)
    with path.open("rb") as file:
        for i in range(SAMPLES):
            file.seek(last * i // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
