"""Requests of one step that have the same beginning in the pool: attention reads its K and V once for all of them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixGroup:
    """``members`` have the same slots at positions [0, length). A request is in at most one group of a step."""

    members: npt.NDArray[np.int32]  # [n] indices into the step's rows, ascending, n >= 2
    length: int  # tokens, whole pages, less than the seq_len of every member
