"""The groups of weights and activations of a quantised product that share a scale.

Owns:      the rule, which is part of the meaning of K and V: engines with different rules hold different numbers.
Invariant: the groups of a row are the same on any number of ranks; a number of ranks that would cut one is refused.
"""

GROUP = 32  # numbers that share a scale: one that is large costs the others of its group their precision
RULE = f"int8, groups of {GROUP} inputs"


def group_length(inputs: int) -> int:
    """Choose the group length for a row of ``inputs``: `GROUP`, half of it if that does not fit, else the whole row."""
    return next((length for length in (GROUP, GROUP // 2) if inputs % length == 0), inputs)


def cut_by(inputs: int, ranks: int) -> bool:
    """Tell whether ``ranks`` that share a row of inputs evenly would cut a group."""
    return group_length(inputs // ranks) != group_length(inputs)
