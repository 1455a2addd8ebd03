"""Small tensors: one thread is faster than several that wait for each other."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch

# What cuDNN's frontend says is asked where it is installed (make setup); no GPU is needed.
collect_ignore = [] if importlib.util.find_spec("cudnn") else ["test_cudnn_graph.py"]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
