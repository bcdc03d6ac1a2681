"""Measuring inside a training loop: tensors that require gradients, on one thread or several."""

from __future__ import annotations

import pytest
import torch

from headwise.attention.statistics import measure


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_that_require_gradients_are_measured(workers, dtype):
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, 3, n, 5, dtype=dtype, requires_grad=True) for n in (13, 17, 17))
    got = measure(q, k, v, workers=workers)
    right = measure(q.detach(), k.detach(), v.detach(), workers=1)
    assert not got.entropy.requires_grad
    assert torch.equal(got.entropy, right.entropy)
    assert got.output is not None
    assert torch.equal(got.output, right.output)
