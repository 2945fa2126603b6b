"""`python -m replicas.calibrate MODEL TEXT`: finds the channels of keys that decide most of attention, for
`attention: double_sparse`.

Owns:      the measure: the mean of |q * k| over all pairs of a token and one before it, by layer, KV head and channel;
           query heads that share a KV head are summed.
Never:     trains or changes a model.
Source:    Yang et al. 2024 (arXiv:2408.07092), section 3.1: offline calibration of channels.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from replicas.attention.base import BatchMeta
from replicas.attention.torch_native import attend
from replicas.config import load_extensions
from replicas.errors import InvalidConfig, MantaError
from replicas.layers.tp_group import TpGroup
from replicas.loading.model_files import load_model_config
from replicas.loading.weights import load_weights
from replicas.memory.sparse_pool import write_channels
from replicas.models.registry import model_class
from replicas.text.tokenizer import Tokenizer


class ChannelWeights:
    """An AttentionBackend for one prompt by itself, without a pool, that sums |q * k| as it goes."""

    def __init__(self, num_layers: int) -> None:
        self.sums: list[Tensor | None] = [None] * num_layers  # [K, D] each

    def begin(self, batch: BatchMeta) -> None:
        assert batch.qo_indptr.tolist() == [0, batch.num_tokens], "one prompt, from its first token on"

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        seen = k.float().abs().cumsum(0)  # [T, K, D] of all tokens up to each
        asked = q.float().abs().view(len(q), k.shape[1], -1, q.shape[2]).sum(2)
        found = (asked * seen).sum(0)
        before = self.sums[layer]
        self.sums[layer] = found if before is None else before + found
        return attend(q, k, v).flatten(1)

    def heaviest(self, num_channels: int) -> Tensor:
        """Return [L, K, num_channels] the channels of largest weight, in order of their number."""
        sums = torch.stack([each for each in self.sums if each is not None])
        return sums.topk(num_channels, dim=-1).indices.sort(dim=-1).values


def prompt_meta(num_tokens: int) -> BatchMeta:
    """Describe a step of one prompt that nothing precedes."""
    one = torch.zeros(1, dtype=torch.int32)
    return BatchMeta(
        is_decode=False,
        qo_indptr=torch.tensor([0, num_tokens], dtype=torch.int32),
        rows=one,
        prefix_lens=one,
        seq_lens=one + num_tokens,
        positions=torch.arange(num_tokens),
        out_slots=torch.arange(num_tokens),
        table=torch.arange(num_tokens, dtype=torch.int32)[None],
        max_seq_len=num_tokens,
        num_tokens=num_tokens,
    )


def heavy_channels(
    path: str, text: str, *, num_channels: int, most_tokens: int = 8192, piece_len: int = 1024
) -> Tensor:
    """Measure the heaviest channels [L, K, num_channels] of the model in folder ``path`` over ``text``.

    Args:   most_tokens: of the text, from its first; piece_len: tokens that are run at a time, each piece by itself.
    Raises: InvalidConfig for a folder without a model, or one that attends in another way than with heads of keys.
    """
    model, tp = load_model_config(path, device="cpu"), TpGroup(device="cpu")
    if model.mla is not None or model.attention_kinds:
        raise InvalidConfig(f"model: {path} does not attend plainly, with heads of keys: it has no heavy channels")
    if not 1 <= num_channels <= model.head_dim:
        raise InvalidConfig(f"--channels {num_channels}: this model's heads have {model.head_dim}")
    found = ChannelWeights(model.num_layers)
    made = model_class(model)(model, tp, found)
    load_weights(made, model, tp, one_order=False)
    ids = Tokenizer(path).encode(text)[:most_tokens]
    for start in range(0, len(ids), min(piece_len, model.context_len)):
        piece = torch.from_numpy(ids[start : start + min(piece_len, model.context_len)])
        made.forward(piece, prompt_meta(len(piece)), torch.tensor([len(piece) - 1]))
    return found.heaviest(num_channels)


def main(argv: Sequence[str] | None = None) -> int:
    about = (__doc__ or "").partition("\n\n")[0]
    parse = argparse.ArgumentParser(prog="python -m replicas.calibrate", description=about)
    parse.add_argument("model", help="a folder, as in model.path")
    parse.add_argument("text", type=Path, help="a file of text of the kind that will be served, some 8,000 tokens")
    parse.add_argument("--channels", type=int, default=16, help="of each layer and head (16)")
    parse.add_argument("--out", type=Path, default=Path("label_channels.json"), help="(label_channels.json)")
    options = parse.parse_args(argv)
    try:
        load_extensions()
        text = options.text.read_text(encoding="utf-8")
        channels = heavy_channels(options.model, text, num_channels=options.channels)
        write_channels(options.out, channels, load_model_config(options.model, device="cpu"))
    except (MantaError, OSError, ValueError) as error:
        print(f"calibrate: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {options.channels} channels of {channels.shape[0]} layers x {channels.shape[1]} KV heads")
    return 0


if __name__ == "__main__":
    sys.exit(main())
