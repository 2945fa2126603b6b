"""Files of weights whose headers lie: each is refused by name, with no traceback of another kind and no large
allocation. Mutations are drawn from a fixed seed, so that one that fails fails again."""

import json
import random
import re
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replicas.checkpoints.gguf_file import GgufCheckpoint, GgufFile
from replicas.checkpoints.gguf_folder import config_of, stored
from replicas.checkpoints.safetensors_files import SafetensorsCheckpoint
from replicas.checkpoints.weight_index import safetensors_files
from replicas.errors import InvalidConfig
from replicas.memory.kv_scales import checkpoint_scales

NUM_MUTATIONS = 500
TEXT, ARRAY, U8, U32, F32, U64 = 8, 9, 0, 4, 6, 10  # ggml's types of fields; of tensors F32 is 0, Q8_0 is 8
FORMS = {U8: "<B", U32: "<I", F32: "<f", U64: "<Q"}
HOSTILE = [0, 1, 2, 7, 31, 33, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 63) + 1, (1 << 64) - 1]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(name: str, kind: int, value: Any) -> bytes:
    return text(name) + struct.pack("<I", kind) + (text(value) if kind == TEXT else struct.pack(FORMS[kind], value))


def array(name: str, kind: int, count: int, items: bytes) -> bytes:
    return text(name) + struct.pack("<IIQ", ARRAY, kind, count) + items


def tensor(name: str, shape: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)


FIELDS = [
    field("general.architecture", TEXT, "llama"),
    *(field(f"llama.{name}", U32, value) for name, value in {
        "attention.head_count": 4, "attention.head_count_kv": 2, "embedding_length": 32, "feed_forward_length": 64,
        "block_count": 1, "context_length": 128, "rope.dimension_count": 8,
    }.items()),
    field("llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
    field("llama.rope.freq_base", F32, 1e4),
    field("tokenizer.ggml.eos_token_id", U32, 1),
    array("tokenizer.ggml.tokens", TEXT, 3, text("a") + text("b") + text("c")),
    array("tokenizer.ggml.scores", F32, 3, struct.pack("<3f", 1, 2, 3)),
]  # fmt: skip
TENSORS = [
    tensor("token_embd.weight", [3, 32], 0, 0),
    tensor("blk.0.attn_q.weight", [32, 32], 8, 384),
    tensor("blk.0.attn_norm.weight", [32], 0, 384 + 32 * 34),
]
NUM_BYTES = 384 + 32 * 34 + 128  # of the tensors


def gguf(
    fields: list[bytes] = FIELDS, tensors: list[bytes] = TENSORS, *, counts: tuple[int, int] | None = None
) -> bytes:
    num_tensors, num_fields = counts or (len(tensors), len(fields))
    head = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_fields) + b"".join(fields) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(NUM_BYTES)


def read_gguf(path: Path) -> None:
    """All that is read of a header before a model is made."""
    file = GgufFile(path)
    config_of(file)
    stored(file)
    weights = GgufCheckpoint(file)
    for name in weights.names:
        weights.weight(name)


def read_safetensors(path: Path) -> None:
    weights = SafetensorsCheckpoint(path.parent, None)
    for name in weights.names:
        weights.weight(name)
    checkpoint_scales(path.parent, num_layers=2)


def refused(read: Callable[[Path], None], path: Path, data: bytes, seed: str = "") -> str:
    """Read ``data`` from a file. Returns: the error, "" for none.

    Raises: AssertionError for an error that does not name the file, or for memory beyond what the file accounts for.
    """
    path.write_bytes(data)
    tracemalloc.start()
    try:
        read(path)
        said = ""
    except InvalidConfig as error:
        said = str(error)
        assert str(path) in said, f"{seed}: {said}"
        assert len(said) < 1000, f"{seed}: {said[:1000]}"
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 64 * len(data) + (1 << 20), f"{seed}: {peak} bytes for a file of {len(data)}"
    return said


NESTED = struct.pack("<IQ", ARRAY, 1) * 2000
LIES: dict[str, tuple[bytes, str]] = {
    "numbers cut short": (gguf([*FIELDS, array("x", U64, 1 << 24, b"")]), "says that it has 16777216 items"),
    "half a gigabyte of bytes": (gguf([*FIELDS, array("x", U8, 1 << 29, b"")]), "says that it has 536870912 items"),
    "2,000 nested arrays": (gguf([*FIELDS, text("x") + struct.pack("<I", ARRAY) + NESTED]), "more than 4 deep"),
    "alignment 0": (gguf([*FIELDS, field("general.alignment", U32, 0)]), "aligns tensors to 0, no power of two"),
    "alignment below 0": (
        gguf([*FIELDS, text("general.alignment") + struct.pack("<Ii", 5, -32)]), "aligns tensors to -32, no power"),
    "alignment 48": (gguf([*FIELDS, field("general.alignment", U32, 48)]), "aligns tensors to 48, no power of two"),
    "alignment that is text": (gguf([*FIELDS, field("general.alignment", TEXT, "32")]), "aligns tensors to '32'"),
    "alignment 2^63": (gguf([*FIELDS, field("general.alignment", U64, 1 << 63)]), "is no multiple of its alignment"),
    "split.count that is text": (gguf([*FIELDS, field("split.count", TEXT, "many")]), "split.count = 'many'"),
    "split.count that is a list": (gguf([*FIELDS, array("split.count", U8, 1, b"\2")]), r"split.count = \[2\]"),
    "two tensors of one name": (gguf(tensors=[*TENSORS, TENSORS[0]]), "has the tensor 'token_embd.weight' twice"),
    "two tensors of one weight": (
        gguf(tensors=[*TENSORS, tensor("model.embed_tokens.weight", [3, 32], 0, 0)]), "has two tensors for one weight"),
    "two fields of one name": (gguf([*FIELDS, FIELDS[0]]), "has the field 'general.architecture' twice"),
    "2^63 tensors": (gguf(counts=(1 << 63, len(FIELDS))), "items where"),
    "2^60 fields": (gguf(counts=(3, 1 << 60)), "says that it has 1152921504606846976 items"),
    "a text of 2^62 bytes": (gguf([*FIELDS, struct.pack("<Q", 1 << 62)]), "4611686018427387904 bytes should follow"),
    "an offset of 2^63": (gguf(tensors=[*TENSORS[:2], tensor("x", [32], 0, 1 << 63)]), "is cut short: 1 tensors"),
    "an offset between two numbers": (gguf(tensors=[*TENSORS[:2], tensor("x", [32], 0, 33)]), "at 33, which is no"),
    "a shape of 2^60 rows": (gguf(tensors=[*TENSORS[:2], tensor("x", [1 << 60, 32], 0, 0)]), "is cut short: 1 tensors"),
    "a shape of no rows": (gguf(tensors=[*TENSORS[:2], tensor("x", [0, 32], 0, 0)]), r"shape \[0, 32\]"),
    "2^31 dimensions": (gguf(tensors=[text("x") + struct.pack("<I", 1 << 31)]), "of 2147483648 dimensions"),
    "no heads": (gguf([each.replace(struct.pack("<II", U32, 4), struct.pack("<II", U32, 0)) for each in FIELDS]),
                 "head_count = 0; a whole number from 1"),
    "heads that are a list": (
        gguf([array("llama.attention.head_count", U8, 1, b"\4") if b"head_count" in each and b"kv" not in each else each
              for each in FIELDS]), r"head_count = \[4\]"),
    "no number": (gguf([*FIELDS[:8], field("llama.attention.layer_norm_rms_epsilon", F32, float("nan")), *FIELDS[9:]]),
                  "rms_epsilon = nan; a number"),
    "an angle's factors that are not": (
        gguf([*FIELDS], [*TENSORS, tensor("rope_freqs.weight", [32], 8, 0)]), "scales frequencies otherwise"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_gguf_header_that_lies_is_refused_by_name(lie: str, tmp_path: Path) -> None:
    data, says = LIES[lie]
    assert not refused(read_gguf, tmp_path / "whole.gguf", gguf())
    assert re.search(says, refused(read_gguf, tmp_path / "lie.gguf", data))


def whole_safetensors(header: dict[str, Any] | None = None, *, data: bytes = bytes(96)) -> bytes:
    found = json.dumps(header or SAFE).encode()
    return struct.pack("<Q", len(found)) + found + data


SAFE = {
    "__metadata__": {"format": "pt"},
    "model.layers.0.self_attn.k_scale": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
    "model.embed_tokens.weight": {"dtype": "F16", "shape": [3, 4], "data_offsets": [4, 28]},
    "model.norm.weight": {"dtype": "BF16", "shape": [34], "data_offsets": [28, 96]},
}


def changed(**changes: Any) -> bytes:
    name = "model.norm.weight"
    return whole_safetensors({**SAFE, name: {**SAFE[name], **changes}})


SAFE_LIES = {
    "a header of 2^63 bytes": struct.pack("<Q", 1 << 63) + whole_safetensors()[8:],
    "a header longer than the file": struct.pack("<Q", 5000) + whole_safetensors()[8:],
    "a header that is no JSON": struct.pack("<Q", 4) + b"{{{{" + bytes(96),
    "a header that nests": struct.pack("<Q", 100_000) + b'{"a":' * 20_000,
    "an end behind the file": changed(data_offsets=[28, 1 << 40]),
    "an end before its beginning": changed(data_offsets=[96, 28]),
    "an overlap": changed(data_offsets=[20, 88]),
    "a negative shape": changed(shape=[-34]),
    "a shape of 2^63": changed(shape=[1 << 63]),
    "a shape of 2^32 x 2^32": changed(shape=[1 << 32, 1 << 32]),
    "a shape of other bytes": changed(shape=[33]),
    "a kind that is unknown": changed(dtype="F7"),
    "a kind that is no text": changed(dtype=7),
    "too few bytes": whole_safetensors(data=bytes(90)),
    "nothing": b"",
}


@pytest.mark.parametrize("lie", SAFE_LIES)
def test_a_safetensors_header_that_lies_is_refused_by_name(lie: str, tmp_path: Path) -> None:
    read_safetensors_whole(tmp_path)
    for read in (read_safetensors, lambda path: checkpoint_scales(path.parent, num_layers=2)):
        assert refused(read, tmp_path / "model.safetensors", SAFE_LIES[lie])


def read_safetensors_whole(folder: Path) -> None:
    assert not refused(read_safetensors, folder / "model.safetensors", whole_safetensors())


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Change a header in one to three places: bits, numbers of 1 to 8 bytes, pieces that go, come twice or move."""
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(data))
        match draw.randrange(6):
            case 0:
                data = data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
            case 1:
                number = draw.choice(HOSTILE).to_bytes(8, "little")[: draw.choice([1, 2, 4, 8])]
                data = data[:at] + number + data[at + len(number) :]
            case 2:
                data = data[:at] + data[at + draw.randint(1, 16) :]
            case 3:
                data = data[:at] + data[at : at + draw.randint(1, 64)] + data[at:]
            case 4:
                other = draw.randrange(len(data))
                data = data[:at] + data[other : other + 8] + data[at + 8 :]
            case _:
                data = data[: at or 1]
        data = data or b"G"
    return data


READERS: dict[str, tuple[Callable[[Path], None], str, bytes]] = {
    "gguf": (read_gguf, "fuzzed.gguf", gguf()),
    "safetensors": (read_safetensors, "model.safetensors", whole_safetensors()),
}


@pytest.mark.parametrize("kind", READERS)
def test_a_mutated_header_is_read_or_refused_by_name_and_takes_no_memory(kind: str, tmp_path: Path) -> None:
    read, name, whole = READERS[kind]
    assert not refused(read, tmp_path / name, whole)
    num_refused = sum(
        bool(refused(read, tmp_path / name, mutated(whole, random.Random(f"{kind} {seed}")), f"{kind} {seed}"))
        for seed in range(NUM_MUTATIONS)
    )
    assert NUM_MUTATIONS // 2 < num_refused < NUM_MUTATIONS  # some change only numbers


@pytest.mark.parametrize(
    "index",
    [
        b"[]", b"{", b'{"weight_map": 7}', b'{"weight_map": {"a": "../x.safetensors"}}', b"[" * 100_000,
        b'{"weight_map": {"a": "/etc/x.safetensors"}}', b'{"weight_map": {"a": "x\\u0000.safetensors"}}',
        b'{"weight_map": {"a": "' + b"x" * 300 + b'.safetensors"}}', b'{"weight_map": {"a": "x.bin"}}', b"\xff",
    ],
)  # fmt: skip
def test_an_index_that_lies_is_refused_by_name(index: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(InvalidConfig, match=str(tmp_path)) as error:
        safetensors_files(tmp_path)
    assert len(str(error.value)) < 1000
