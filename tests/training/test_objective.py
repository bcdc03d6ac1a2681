"""The loss in chunks is the cross-entropy, and so is its gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy, linear

from headwise.training.objective import next_token_loss
from tests.tolerance import UNIT


def problem(seed, tokens, width, vocab, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=g, dtype=dtype).requires_grad_()
    table = torch.randn(vocab, width, generator=g, dtype=dtype).requires_grad_()
    targets = torch.randint(vocab, (tokens,), generator=g)
    weights = torch.rand(tokens, generator=g, dtype=dtype)
    return hidden, table, targets, weights


@given(st.integers(0, 99), st.integers(1, 19), st.integers(1, 7), st.integers(2, 13), st.data())
def test_it_is_the_plain_cross_entropy(seed, tokens, width, vocab, data):
    hidden, table, targets, weights = problem(seed, tokens, width, vocab)
    chunk = data.draw(st.integers(1, 20))
    loss, each = next_token_loss(
        hidden, targets, weights, lambda h: linear(h, table), [table], chunk=chunk
    )
    plain = cross_entropy(linear(hidden, table), targets, reduction="none")
    # Sums of `width`, `vocab` and `tokens` terms, each rounded once.
    reach = 1 + float((hidden.abs() @ table.abs().T).detach().max())
    bound = 16 * UNIT[torch.float64] * (width + vocab + tokens) * reach
    assert float((each - plain).detach().abs().max()) <= bound
    ours = torch.autograd.grad(2 * loss, [hidden, table])
    theirs = torch.autograd.grad(2 * (plain * weights).sum(), [hidden, table])
    largest = max(1.0, *(float(x.detach().abs().max()) for x in (hidden, table)))
    for mine, want in zip(ours, theirs, strict=True):
        assert float((mine - want).abs().max()) <= bound * 4 * largest * tokens


def test_gradcheck():
    hidden, table, targets, weights = problem(5, 11, 3, 7)
    bias = torch.randn(7, dtype=torch.float64, requires_grad=True)

    def loss(hidden, table, bias):
        def unembed(h):
            return 3 * torch.tanh(linear(h, table, bias) / 3)

        return next_token_loss(hidden, targets, weights, unembed, [table, bias], chunk=4)[0]

    assert torch.autograd.gradcheck(loss, (hidden, table, bias))


def test_frozen_parameters_get_no_gradient():
    hidden, table, targets, weights = problem(1, 5, 3, 7)
    frozen = table.detach()
    loss, each = next_token_loss(hidden, targets, weights, lambda h: linear(h, frozen), [frozen])
    loss.backward()
    assert hidden.grad is not None
    assert frozen.grad is None
    assert not each.requires_grad


def test_without_gradients_nothing_is_kept():
    hidden, table, targets, weights = problem(1, 5, 3, 7)
    with torch.no_grad():
        loss, _ = next_token_loss(hidden, targets, weights, lambda h: linear(h, table), [table])
    assert loss.grad_fn is None


def test_it_refuses_to_be_differentiated_twice():
    hidden, table, targets, weights = problem(1, 5, 3, 7)
    loss, _ = next_token_loss(hidden, targets, weights, lambda h: linear(h, table), [table])
    factor = torch.ones((), dtype=torch.float64, requires_grad=True)
    (once,) = torch.autograd.grad(loss * factor, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        once.sum().backward()


def test_one_chunk_of_logits_is_alive_at_a_time():
    hidden, table, targets, weights = problem(2, 1021, 3, 257, torch.float32)
    sizes = []

    def unembed(h):
        logits = linear(h, table)
        sizes.append(logits.numel())
        return logits

    next_token_loss(hidden, targets, weights, unembed, [table], chunk=101)[0].backward()
    assert max(sizes) == 101 * 257
    assert sum(sizes) == 1021 * 257
