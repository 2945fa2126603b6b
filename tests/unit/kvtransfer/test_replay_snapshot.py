"""The snapshot file: written whole, read as written, refused with the reason."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.errors import BadSnapshot, IncompatibleLayout
from kvtransfer.layout import KvLayout
from kvtransfer.replay.payload import PayloadMeta, require_same_meaning
from kvtransfer.replay.snapshot import MAGIC, PREAMBLE_BYTES, VERSION, ReplaySnapshot

LAYOUT = KvLayout(
    model="m", architecture="MHA", num_layers=2, num_kv_heads=3, head_dim=4, dtype="bfloat16", item_bytes=2,
    page_size=4, tp=1,
)  # fmt: skip
SAMPLING = {"temperature": 0.7, "seed": 2**63 - 1, "stop": ["\n", "né"], "top_k": None, "logit_bias": [[3, -0.1]]}


def make(num_prompt: int = 5, num_output: int = 3, num_computed: int = 7) -> ReplaySnapshot:
    rng = np.random.default_rng(num_computed)
    meta = PayloadMeta(
        rid="r1",
        layout=LAYOUT,
        prompt_len=num_prompt,
        cached_prefix_len=4,
        token_range=(0, num_computed),
        row=2,
        slots=np.arange(8, 8 + num_computed, dtype=np.int32),
    )
    return ReplaySnapshot(
        prompt_ids=np.arange(100, 100 + num_prompt, dtype=np.int32),
        output_ids=np.arange(200, 200 + num_output, dtype=np.int32),
        tokenizer="t" * 32,
        chat_template="c" * 32,
        device="cpu",
        cached={"device": 1, "host": 2, "store": 1},
        sampling=SAMPLING,
        eos_ids=(2, 7),
        salt="tenant é",
        adapter={"identity": "ab" * 32, "path": "/adapters/é"},
        priority=-3,
        return_logprobs=True,
        top_logprobs=5,
        prompt_logprobs_from=None,
        meta=meta,
        kv=rng.integers(0, 256, meta.shape, dtype=np.uint8),
    )


def assert_same(a: ReplaySnapshot, b: ReplaySnapshot) -> None:
    for one, other in ((a.prompt_ids, b.prompt_ids), (a.output_ids, b.output_ids), (a.meta.slots, b.meta.slots)):
        assert one.dtype == other.dtype == np.int32
        assert one.tolist() == other.tolist()
    assert a.kv.shape == b.kv.shape
    assert a.kv.tobytes() == b.kv.tobytes()
    assert (a.tokenizer, a.chat_template) == (b.tokenizer, b.chat_template)
    for name in (
        "rid",
        "device",
        "cached",
        "sampling",
        "eos_ids",
        "salt",
        "adapter",
        "priority",
        "return_logprobs",
        "prompt_logprobs_from",
    ):
        assert getattr(a, name) == getattr(b, name)
    for name in ("layout", "prompt_len", "cached_prefix_len", "token_range", "row"):
        assert getattr(a.meta, name) == getattr(b.meta, name)


@given(num_prompt=st.integers(1, 9), num_output=st.integers(0, 9), share=st.floats(0, 1))
def test_what_is_read_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, num_prompt: int, num_output: int, share: float
) -> None:
    """SPEC H18: none to all but one of the tokens; a token of K/V is 2 layers x 2 x 3 heads x 4 x 2 = 96 bytes."""
    computed = int(share * (num_prompt + num_output - 1))
    snapshot = make(num_prompt, num_output, computed)
    path = tmp_path_factory.mktemp("snapshot") / "s"
    snapshot.save(path)
    assert_same(ReplaySnapshot.load(path), snapshot)
    assert path.stat().st_size >= 4 * (num_prompt + num_output + computed) + 96 * computed


def test_a_file_replaces_the_one_before_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    make(num_computed=2).save(tmp_path / "s")
    make(num_computed=3).save(tmp_path / "s")
    assert ReplaySnapshot.load(tmp_path / "s").meta.num_tokens == 3
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    assert (tmp_path / "s").stat().st_mode & 0o077 == 0  # prompts are private


def test_a_write_that_fails_keeps_the_file_before(tmp_path: Path) -> None:
    make(num_computed=2).save(tmp_path / "s")
    with pytest.raises(ValueError, match="Out of range float"):
        replace(make(num_computed=3), sampling={"temperature": float("nan")}).save(tmp_path / "s")
    assert ReplaySnapshot.load(tmp_path / "s").meta.num_tokens == 2
    assert len(list(tmp_path.iterdir())) == 1


def test_every_way_to_cut_a_file_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s"
    make().save(path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(BadSnapshot, match=r"no snapshot|cut short"):
            ReplaySnapshot.load(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(BadSnapshot, match="732 bytes of body are wanted, 733 are there"):
        ReplaySnapshot.load(path)


def test_a_file_made_before_a_layout_had_windows_is_read(tmp_path: Path) -> None:
    """What it lacks is as by default; a field that every layout has is wanted."""
    path = tmp_path / "s"
    make().save(path)
    old = {name: value for name, value in asdict(LAYOUT).items() if not name.startswith("window_")}
    rewritten(path, layout=old)
    assert_same(ReplaySnapshot.load(path), make())
    rewritten(path, layout={**old, "window_pages": "4"})
    with pytest.raises(BadSnapshot, match="window_pages is str"):
        ReplaySnapshot.load(path)
    del old["page_size"]
    rewritten(path, layout=old)
    with pytest.raises(BadSnapshot, match="page_size"):
        ReplaySnapshot.load(path)


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "s"
    make().save(path)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises(BadSnapshot):
            ReplaySnapshot.load(path)


def rewritten(path: Path, *, version: int = VERSION, header: bytes | None = None, **changed: object) -> None:
    """Change header fields, with digests that fit, as a buggy or foreign writer would."""
    whole = path.read_bytes()
    end = PREAMBLE_BYTES + int.from_bytes(whole[12:16], "little")
    if header is None:
        header = json.dumps({**json.loads(whole[PREAMBLE_BYTES:end]), **changed}).encode()
    start = MAGIC + version.to_bytes(4, "little") + len(header).to_bytes(4, "little")
    path.write_bytes(start + xxhash.xxh3_64_intdigest(start + header).to_bytes(8, "little") + header + whole[end:])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"version": 3}, "version 3, and version 4 is understood"),
        ({"num_prompt": 6}, "its header makes no sense"),
        ({"num_computed": 6}, "its header makes no sense"),
        ({"num_prompt": -1, "num_output": 9}, "its header makes no sense"),
        ({"num_output": True}, "num_output is bool, int is wanted"),
        ({"sampling": "greedy"}, "sampling is str, dict is wanted"),
        ({"adapter": {"path": 1}}, "path is int, str is wanted"),
        ({"layout": {}}, "its header makes no sense: 'model'"),
        ({"body_bytes": "many"}, "many bytes of body are wanted"),
        ({"header": b"[]"}, "the header is list, dict is wanted"),
        ({"header": b"{"}, "its header makes no sense"),
    ],
)
def test_a_header_that_does_not_describe_the_body_is_refused(
    tmp_path: Path, changed: dict[str, object], said: str
) -> None:
    path = tmp_path / "s"
    make().save(path)
    rewritten(path, **changed)  # type: ignore[arg-type]
    with pytest.raises(BadSnapshot, match=said):
        ReplaySnapshot.load(path)


def test_a_snapshot_holds_fewer_tokens_than_the_sequence() -> None:
    """The last token's K/V is made by the step that follows."""
    with pytest.raises(ValueError, match="does not begin a sequence of 8"):
        make(num_computed=8)
    with pytest.raises(ValueError, match=r"\(2, 2, 7, 3, 8\) uint8 is wanted"):
        replace(make(), kv=np.zeros((2, 2, 7, 3, 4), np.uint8))


def test_bytes_of_another_model_are_refused_and_another_page_size_is_not() -> None:
    """SPEC H12: reject, never reinterpret."""
    require_same_meaning(LAYOUT, replace(LAYOUT, page_size=1, tp=3))
    with pytest.raises(IncompatibleLayout, match="head_dim: 4 here, 8 there; dtype: 'bfloat16' here, 'float16' there"):
        require_same_meaning(LAYOUT, replace(LAYOUT, head_dim=8, dtype="float16"))
