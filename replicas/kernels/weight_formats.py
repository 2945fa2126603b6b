"""How the weights of products lie in memory, and which of their numbers share a scale.

Owns:      the names of the formats, and the rule of the groups, which is part of the meaning of K and V: engines with
           different rules hold different numbers.
Invariant: the groups of a row are the same on any number of ranks, but fp8's; a number of ranks that would cut one is
           refused.
"""

from typing import Literal

WeightFormat = Literal["float32", "bfloat16", "float16", "int8", "q8_0", "q4_1", "mxfp4", "fp8"]
GROUP = 32  # numbers that share a scale: one that is large costs the others of its group their precision
RULES = {
    "int8": f"int8, groups of {GROUP} inputs",
    "int4": f"Q4_1, the vocabulary's tables Q8_0: groups of {GROUP} inputs",
    "fp8": "e4m3, a scale a row of a rank's share",
}

# twice what each of the sixteen 4-bit floats is: a sign, two bits of exponent, one of mantissa (OCP MX v1.0, 5.3.3)
E2M1_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
E8M0_BIAS, E8M0_NAN = 127, 255  # a scale's byte is 2 ** (byte - 127), but the last, which is no number
E8M0_LEAST = 0x0040_0000  # the bits of 2 ** -127 as a float, which is subnormal: what byte 0 is

# of a number, with its part of what a group of 32 has in common
NUMBER_BYTES: dict[WeightFormat, float] = {
    "float32": 4, "bfloat16": 2, "float16": 2, "int8": 34 / 32, "q8_0": 34 / 32, "q4_1": 20 / 32,
    "mxfp4": 17 / 32, "fp8": 1,
}  # fmt: skip


def table_format(format_: WeightFormat) -> WeightFormat:
    """Return the format of the vocabulary's tables beside products by weights in ``format_``: 4 bits are too few."""
    return "q8_0" if format_ == "q4_1" else format_


def group_length(inputs: int) -> int:
    """Choose the group length for a row of ``inputs``: `GROUP`, half of it if that does not fit, else the whole row."""
    return next((length for length in (GROUP, GROUP // 2) if inputs % length == 0), inputs)


def cut_by(inputs: int, ranks: int) -> bool:
    """Tell whether ``ranks`` that share a row of inputs evenly would cut a group."""
    return group_length(inputs // ranks) != group_length(inputs)
