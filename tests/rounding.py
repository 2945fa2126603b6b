"""How int8 products round activations, and how bfmmla rounds sums, in plain PyTorch."""

import torch
from torch import Tensor

from replicas.kernels.weight_formats import group_length


def num_groups(inputs: int) -> int:
    """How many groups a row of ``inputs`` has."""
    return inputs // group_length(inputs)


def round_activations(x: Tensor, groups: int) -> Tensor:
    """[M, K] -> the same in steps of each group's largest magnitude / 127, as our kernels round them."""
    parts = x.reshape(len(x), groups, -1)
    largest = parts.abs().amax(dim=2, keepdim=True).double()  # steps are made in double precision, and then rounded
    factor = torch.where(largest > 0, 127.0 / largest, 0.0).float()
    return (parts * factor).round_().mul_((largest / 127.0).float()).flatten(1)


def add_to_odd(a: Tensor, b: Tensor) -> Tensor:
    """Add floats [..] as Arm's bfmmla does: what is inexact is cut off, its last bit set; below 2 ** -126 it is 0."""
    a, b = (torch.where(each.abs() < 2.0**-126, 0.0, each).double() for each in (a, b))
    wide = a + b
    second = wide - a
    lost = (a - (wide - second)) + (b - second)  # of a + b, whose exact sum is wide + lost
    near = wide.float()
    left = (wide - near.double()) + lost
    bits = near.view(torch.int32)
    cut = torch.where(left * near.double() < 0, bits - 1, bits)  # the magnitude is in the low bits
    made = torch.where((left != 0) & near.isfinite(), cut | 1, bits).view(torch.float32)
    return torch.where(made.abs() < 2.0**-126, 0.0, made)
