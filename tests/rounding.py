"""How int8 products round activations, in plain PyTorch."""

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
