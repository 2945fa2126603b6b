"""Numbers as the state shows them: short, so that what has hardly changed is not sent again.

Pure.
"""

import math
from collections.abc import Sequence

DIGITS = 3


def short(value: float) -> float:
    """``value`` to three significant digits; what JSON cannot say is 0."""
    if value == 0 or not math.isfinite(value):
        return 0.0
    places = DIGITS - 1 - math.floor(math.log10(abs(value)))
    return round(value, places)


def quantile(ranked: Sequence[float], share: float) -> float | None:
    """The value that ``share`` of ``ranked`` does not exceed (nearest rank); None without values. In order."""
    if not ranked:
        return None
    return ranked[max(math.ceil(share * len(ranked)) - 1, 0)]
