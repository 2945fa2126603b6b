"""The parts of CUDA graphs that need no CUDA: sizes, padding rows, inputs that stay in place."""

import numpy as np
import pytest
import torch

from replicas.attention.base import BatchMeta
from replicas.runner.batch import DeviceTable, Staging, decode_arrays
from replicas.runner.graphs import BYTES_PER_GRAPH, DecodeGraphs, graph_bytes, graph_size, graph_sizes
from replicas.scheduler.plan import DecodePlan, idle_decode

CPU = torch.device("cpu")


def plan(rows: list[int], seq_lens: list[int], slots: list[int]) -> DecodePlan:
    ids = np.array([100 + row for row in rows], np.int32)
    lens, places, at = (np.array(values, np.int32) for values in (seq_lens, slots, rows))
    return DecodePlan(table_writes=(), rows=at, token_ids=ids, seq_lens=lens, slots=places, sampling=())


@pytest.mark.parametrize(
    ("max_rows", "sizes"), [(1, (1,)), (5, (1, 2, 4, 5)), (8, (1, 2, 4, 8)), (40, (1, 2, 4, 8, 16, 24, 32, 40))]
)
def test_the_largest_size_is_the_most_requests_that_may_run(max_rows: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(max_rows) == sizes


def test_above_256_rows_no_graph_is_made() -> None:
    assert graph_sizes(4096)[-1] == 256
    assert graph_size(257, graph_sizes(4096)) is None


def test_a_batch_takes_the_smallest_size_that_holds_it() -> None:
    assert [graph_size(n, graph_sizes(40)) for n in (1, 3, 8, 9, 33)] == [1, 4, 8, 16, 40]


def test_padding_rows_read_and_write_the_sink_alone() -> None:
    """Row 0, position 0, slot 0 of page 0, one token each."""
    made = decode_arrays(plan([3, 7], [10, 20], [160, 320]), 4)
    source, follows, ids, positions, slots, rows, prefix, seq_lens, bounds = made
    assert (source.tolist(), follows.tolist()) == ([-1], [-1] * 4)
    assert ids.tolist() == [103, 107, 0, 0]
    assert positions.tolist() == [9, 19, 0, 0]
    assert slots.tolist() == [160, 320, 0, 0]
    assert rows.tolist() == [3, 7, 0, 0]
    assert prefix.tolist() == [9, 19, 0, 0]
    assert seq_lens.tolist() == [10, 20, 1, 1]
    assert bounds.tolist() == [0, 1, 2, 3, 4]


class Began:
    """Records the steps that it begins."""

    def __init__(self) -> None:
        self.metas: list[BatchMeta] = []

    def begin(self, batch: BatchMeta) -> None:
        raise AssertionError("a captured step is begun by begin_graph")

    def begin_graph(self, batch: BatchMeta) -> None:
        self.metas.append(batch)

    def begin_captured(self, batch: BatchMeta) -> None:
        raise AssertionError("nothing is captured here")

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        raise AssertionError("nothing runs here")


def test_a_step_for_warming_up_reads_and_writes_the_sink_alone() -> None:
    idle = idle_decode(2, row=8, seq_len=3)
    found = [each.tolist() for each in (idle.rows, idle.seq_lens, idle.token_ids, idle.slots)]
    assert found == [[8, 8], [3, 3], [0, 0], [0, 0]]
    assert idle_decode(1).seq_lens.tolist() == [1]  # the token itself


def test_every_step_of_a_size_lies_where_the_first_did() -> None:
    table = DeviceTable(9, 32, CPU)
    attention = Began()
    graphs = DecodeGraphs(attention, table, Staging(CPU), max_rows=8, vocab_size=11)
    first = graphs.fill(idle_decode(4))
    second = graphs.fill(plan([3, 7, 1], [10, 20, 5], [160, 320, 80]))
    for name in ("rows", "seq_lens", "prefix_lens", "positions", "out_slots", "qo_indptr"):
        assert getattr(first.meta, name).data_ptr() == getattr(second.meta, name).data_ptr()
    assert first.input_ids.tolist() == [103, 107, 101, 0]
    assert second.sample_rows == [0, 1, 2]
    assert [meta.num_tokens for meta in attention.metas] == [4, 4]
    assert table.slots[7, 19] == 320
    assert table.slots[0].tolist() == [0] * 32  # rows that fill up changed nothing


def test_memory_is_set_aside_for_logits_and_layers_of_the_largest_batch() -> None:
    """256 rows x 12 bytes x 128,256 words are 394 MB; 13 graphs take 16 MiB each."""
    made = graph_bytes(
        4096, kinds=1, vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_heads=32, head_dim=128
    )
    assert made > 12 * 256 * 128_256 + 13 * BYTES_PER_GRAPH
    assert made < 1 << 30
