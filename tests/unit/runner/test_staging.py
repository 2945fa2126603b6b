"""Arrays reach the device in one piece, at places that depend on their shapes alone."""

import numpy as np
import torch

from replicas.runner.batch import BUFFERS, Staging, places

CPU = torch.device("cpu")


def test_arrays_lie_behind_one_another_at_multiples_of_64_bytes() -> None:
    """3 numbers of 8 bytes end at 24, 20 of 4 bytes begin at 64 and end at 144, the last begins at 192."""
    arrays = [np.zeros(3, np.int64), np.zeros(20, np.int32), np.zeros(1, np.int32)]
    assert places(arrays) == ([0, 64, 192], 196)


def test_what_is_uploaded_into_a_place_lies_there_and_reads_the_same() -> None:
    into = torch.zeros(256, dtype=torch.uint8)
    staging = Staging(CPU)
    ids, rows = staging.upload([np.array([5, -1], np.int64), np.array([[1, 2], [3, 4]], np.int32)], into)
    assert ids.tolist() == [5, -1]
    assert rows.tolist() == [[1, 2], [3, 4]]
    assert ids.data_ptr() == into.data_ptr()
    assert rows.data_ptr() == into.data_ptr() + 64
    again, _ = staging.upload([np.array([7, 8], np.int64), np.zeros((2, 2), np.int32)], into)
    assert again.data_ptr() == ids.data_ptr()
    assert ids.tolist() == [7, 8]  # what a graph has read once is where it reads again


def test_buffers_are_written_in_turn_and_grow() -> None:
    into = torch.zeros(1 << 14, dtype=torch.uint8)
    staging = Staging(CPU)
    for size in range(1, 3 * BUFFERS):
        (got,) = staging.upload([np.arange(size * 40, dtype=np.int32)], into)
        assert got.tolist() == list(range(size * 40))
