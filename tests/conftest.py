"""What has to be so before any test module is imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which Transformers does too


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: the processes of a run that share its files end together then."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
