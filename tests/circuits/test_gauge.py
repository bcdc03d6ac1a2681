"""What a head is, and what is only its coordinates: bases, orders of heads, biases of keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headwise.circuits.head_weights import head_weights
from tests.circuits.known_heads import dense_logits, shown, tiny

SAME, OTHER = 1e-9, 1e-2  # float64 through one inverse; a change that is no rounding


def rand(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "gptj"])
def test_a_change_of_basis(name):
    """(W_Q M, W_K M⁻ᵀ) has the same W_QK; the same logits only where nothing turns."""
    model = tiny(name)
    w = head_weights(model).layers[0]
    x = shown(model).calls[w.module].stream[0]
    m = rand(w.kv_heads, w.key.shape[2], w.key.shape[2], seed=1)
    moved = replace(w, query=w.query @ w.shared(m), key=w.key @ m.inverse().mT)
    if w.query_bias is not None:
        moved = replace(
            moved,
            query_bias=(w.query_bias[:, None] @ w.shared(m))[:, 0],
            key_bias=(w.key_bias[:, None] @ m.inverse().mT)[:, 0],
        )
    assert distance(moved.qk().dense(), w.qk().dense()) < SAME
    change = distance(dense_logits(moved, x, x), dense_logits(w, x, x))
    assert change > OTHER if w.rotary is not None else change < SAME


@pytest.mark.parametrize("name", ["llama", "phi"])
def test_turns_of_a_pair_are_free_under_rotation_too(name):
    """A matrix that commutes with the rotations, scaled turns of each pair, is a gauge still."""
    model = tiny(name)
    w = head_weights(model).layers[0]
    x = shown(model).calls[w.module].stream[0]
    half, width = w.rotary.width // 2, w.query.shape[2]
    m = torch.eye(width, dtype=torch.float64)
    for pair, (size, angle) in enumerate(zip(rand(half, seed=2), rand(half, seed=3), strict=True)):
        a, b = pair, pair + half
        cos, sin = size * angle.cos(), size * angle.sin()
        m[a, a], m[a, b], m[b, a], m[b, b] = cos, sin, -sin, cos
    moved = replace(w, query=w.query @ m, key=w.key @ m.inverse().T)
    if w.query_bias is not None:
        moved = replace(moved, query_bias=w.query_bias @ m, key_bias=w.key_bias @ m.inverse().T)
    assert distance(dense_logits(moved, x, x), dense_logits(w, x, x)) < SAME


def test_a_change_of_basis_of_values():
    w = head_weights(tiny("qwen2")).layers[0]
    n = rand(w.kv_heads, w.value.shape[2], w.value.shape[2], seed=4)
    moved = replace(w, value=w.value @ n, output=w.shared(n).inverse() @ w.output)
    assert distance(moved.ov().dense(), w.ov().dense()) < SAME


def test_heads_in_another_order():
    """Whole groups in another order: products move with their heads, nothing else changes."""
    model = tiny("llama")
    w = head_weights(model).layers[0]
    qk, ov = w.qk().dense(), w.ov().dense()
    groups = torch.tensor([1, 0])
    heads = torch.tensor([2, 3, 0, 1])
    attention = model.layers[0].self_attn
    ids = torch.tensor([[3, 5, 7]])
    with torch.no_grad():
        want = model(ids).last_hidden_state
        for name, order in (("q", heads), ("k", groups), ("v", groups)):
            weight = getattr(attention, f"{name}_proj").weight
            weight.copy_(weight.view(len(order), 16, 64)[order].reshape(-1, 64))
        output = attention.o_proj.weight
        output.copy_(output.view(64, 4, 16)[:, heads].reshape(64, -1))
        assert distance(model(ids).last_hidden_state, want) < SAME
    moved = head_weights(model).layers[0]
    assert distance(moved.qk().dense(), qk[heads]) < SAME
    assert distance(moved.ov().dense(), ov[heads]) < SAME
    mixed = replace(moved, query=moved.query[[0, 2, 1, 3]])  # not by whole groups
    assert distance(mixed.qk().dense(), qk[heads][[0, 2, 1, 3]]) > OTHER


def test_grouped_keys_are_repeated_side_by_side():
    w = head_weights(tiny("llama")).layers[0]
    dense = w.qk().dense()
    for head in range(4):
        want = w.query[head] @ w.key[head // 2].T
        assert distance(dense[head], want) < SAME
    tiled = w.query @ w.key.repeat(2, 1, 1).mT
    assert distance(tiled, dense) > OTHER


@pytest.mark.parametrize(("name", "free"), [("bert", True), ("opt", True), ("gpt_neox", False)])
def test_key_biases(name, free):
    """A key's bias adds the same number to a row of logits, unless keys turn after it."""
    model = tiny(name)
    w = head_weights(model).layers[1]
    x = shown(model).calls[w.module].stream[0]
    without = dense_logits(replace(w, key_bias=None), x, x)
    added = dense_logits(w, x, x) - without
    constant = added - added.mean(-1, keepdim=True)
    assert float(added.abs().max()) > OTHER
    size = float(constant.abs().max() / added.abs().max())
    assert size < SAME if free else size > OTHER
    weights = dense_logits(w, x, x).softmax(-1)
    change = distance(without.softmax(-1), weights)
    assert change < SAME if free else change > OTHER / 10
