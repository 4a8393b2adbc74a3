import pytest
import torch

from test.unit.offload.stage import ORDER, Run, make_chunks, run_iteration

torch.set_num_threads(1)  # the tensors are tiny; threads that wait for each other would cost a hundred times the work


@pytest.fixture(scope="module")
def plain() -> Run:
    return run_iteration(make_chunks(2), ORDER)
