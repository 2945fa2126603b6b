import numpy as np
import pytest

from replicas.errors import RowsExhausted
from replicas.memory.allocator import ReqToTokenPool


def slots(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def drained(table: ReqToTokenPool) -> list[tuple[int, int, list[int]]]:
    return [(row, start, values.tolist()) for row, start, values in table.drain_writes()]


def one_row() -> tuple[ReqToTokenPool, int]:
    """Make a table of one row, which is taken."""
    table = ReqToTokenPool(max_requests=1, context_len=8)
    return table, table.alloc()


def test_the_table_has_a_dummy_row_and_room_to_spare() -> None:
    """SPEC B01."""
    table = ReqToTokenPool(max_requests=2, context_len=8)
    assert table.shape == (3, 12)
    assert sorted([table.alloc(), table.alloc()]) == [1, 2]


def test_no_free_row_names_max_running_requests_and_takes_nothing() -> None:
    """SPEC B02, D09."""
    table, row = one_row()
    with pytest.raises(RowsExhausted, match=r"all 1 rows .* raise max_running_requests \(now 1\)"):
        table.alloc()
    table.free(row)
    assert table.num_free == 1
    table.check()


def test_writes_are_handed_out_once_and_runs_come_as_one() -> None:
    table = ReqToTokenPool(max_requests=2, context_len=8)
    a, b = table.alloc(), table.alloc()
    table.write(a, 0, slots(4, 5))
    table.write(b, 0, slots(8))
    table.write(a, 2, slots(6))
    assert drained(table) == [(a, 0, [4, 5, 6]), (b, 0, [8])]
    assert drained(table) == []
    table.write(a, 1, slots(9))
    assert drained(table) == [(a, 1, [9])]
    assert table.view(a, 0, 3).tolist() == [4, 9, 6]


def test_a_position_that_was_written_twice_is_handed_out_once_as_it_is_now() -> None:
    """A GPU makes the writes of a plan in any order. Position 5 was written once, apart from the others."""
    table, row = one_row()
    table.write(row, 0, slots(1, 2, 3, 4, 5, 6))
    table.drain_writes()
    table.write(row, 1, slots(22, 33))
    table.write(row, 5, slots(66))
    table.write(row, 0, slots(111, 222))
    assert drained(table) == [(row, 0, [111, 222, 33]), (row, 5, [66])]


def test_what_was_handed_out_does_not_change_with_the_table() -> None:
    table, row = one_row()
    table.write(row, 0, slots(1, 2))
    table.write(row, 2, slots(3))
    ((_, _, values),) = table.drain_writes()
    table.write(row, 0, slots(9, 9, 9))
    assert values.tolist() == [1, 2, 3]


def test_a_write_that_changes_nothing_is_not_logged() -> None:
    table, row = one_row()
    table.write(row, 0, slots(4, 5))
    table.drain_writes()
    table.write(row, 0, slots(4, 5))
    assert drained(table) == []


def test_what_a_former_owner_wrote_counts_as_unwritten() -> None:
    """The device may never have seen it: the freed row's writes are dropped, so equal ones must be logged again."""
    table, row = one_row()
    table.write(row, 0, slots(4, 5))
    table.free(row)
    assert drained(table) == []
    assert table.alloc() == row
    table.write(row, 0, slots(4, 5))
    assert drained(table) == [(row, 0, [4, 5])]
    table.check()


def test_a_row_is_valid_only_where_it_was_written() -> None:
    """SPEC B05."""
    table, row = one_row()
    table.write(row, 0, slots(4, 5))
    with pytest.raises(AssertionError, match="not valid on"):
        table.view(row, 0, 3)
    with pytest.raises(AssertionError, match="leaves a gap after 2"):
        table.write(row, 3, slots(7))
    with pytest.raises(AssertionError, match="do not fit 12 columns"):
        table.write(row, 0, np.zeros(13, dtype=np.int32))


def test_a_decode_batch_appends_one_each() -> None:
    """SPEC D08, F10, K2: at column seq_len counted from 0. The plan of the batch says it, so it is not logged."""
    table = ReqToTokenPool(max_requests=2, context_len=8)
    a, b = table.alloc(), table.alloc()
    table.write(a, 0, slots(4, 5))
    rows, positions = slots(a, b), slots(2, 0)
    assert table.gather(rows, positions - 1).tolist() == [5, -1]
    table.append_each(rows, positions, slots(6, 8))
    assert table.gather(rows, positions).tolist() == [6, 8]
    assert drained(table) == [(a, 0, [4, 5])]
    table.check()


def test_what_is_cut_is_not_handed_out() -> None:
    """Positions [0, 3) are written at once, [3, 6) after; the row is cut in the first run, or in the second."""
    for valid_len, kept in ((2, [4, 5]), (4, [4, 5, 6, 7])):
        table, row = one_row()
        table.write(row, 0, slots(4, 5, 6))
        table.write(row, 3, slots(7, 8, 9))
        table.cut(row, valid_len)
        assert table.valid_len(row) == valid_len
        assert drained(table) == [(row, 0, kept)]
    table.cut(row, 0)
    assert drained(table) == []
    table.check()
