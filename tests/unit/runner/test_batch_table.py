"""The ranks' table follows the plans: what they say outright, and the slots of rows that decode."""

import numpy as np
import torch

from replicas.runner.batch import DeviceTable, Staging, build, cells
from replicas.scheduler.plan import DecodePlan, ExtendPlan, ExtendRow, TableWrite

CPU = torch.device("cpu")


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_a_decode_steps_slots_are_entered_at_the_last_positions() -> None:
    table = DeviceTable(3, 8, CPU)
    writes = (TableWrite(1, 0, ints(16, 17)), TableWrite(2, 0, ints(32)))
    plan = DecodePlan(
        table_writes=writes, rows=ints(2, 1), token_ids=ints(5, 6), seq_lens=ints(2, 3), slots=ints(33, 18), sampling=()
    )
    build(plan, table, Staging(CPU))
    assert table.slots[1, :4].tolist() == [16, 17, 18, 0]
    assert table.slots[2, :3].tolist() == [32, 33, 0]


def test_a_mixed_steps_decode_rows_are_entered_and_its_prompts_come_as_writes() -> None:
    table = DeviceTable(3, 8, CPU)
    rows = (
        ExtendRow(row=1, token_ids=ints(7, 8), prefix_len=0, slots=ints(16, 17), sample=True),
        ExtendRow(row=2, token_ids=ints(9), prefix_len=1, slots=ints(33), sample=True),
    )
    writes = (TableWrite(1, 0, ints(16, 17)), TableWrite(2, 0, ints(32)))
    build(ExtendPlan(table_writes=writes, rows=rows, sampling=(), num_decode=1), table, Staging(CPU))
    assert table.slots[1, :3].tolist() == [16, 17, 0]
    assert table.slots[2, :3].tolist() == [32, 33, 0]


def test_writes_made_in_one_operation_are_those_made_one_by_one() -> None:
    """As a GPU makes them: rows of 8, so that position 2 of row 1 is cell 10."""
    writes = (TableWrite(1, 2, ints(16, 17)), TableWrite(2, 0, ints(32)))
    index, values = cells(writes, row_len=8)
    assert (index.tolist(), values.tolist()) == ([10, 11, 16], [16, 17, 32])
    table = DeviceTable(3, 8, CPU)
    table.apply(writes, Staging(CPU))
    flat = torch.zeros(24, dtype=torch.int32).index_copy_(0, torch.from_numpy(index), torch.from_numpy(values))
    assert torch.equal(table.slots.view(-1), flat)
