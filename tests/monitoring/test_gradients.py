"""Norms of gradients before clipping, of weights, of updates; and when gradients are read."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from headwise.monitoring.gradients import Weights, after_backward
from headwise.monitoring.monitor import Monitor
from tests.monitoring.test_monitor import batches, small

# Norms are sums of squares in float32 over 2^16 entries at most, then float64: below 1e-5.
CLOSE = 1e-5


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_are_those_before_clipping(micro_batches: int) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Monitor(model, every=1, spectra=0) as monitor:
        for batch in batches(micro_batches):
            model(**batch).loss.backward()
        before = {name: p.grad.norm().item() for name, p in model.named_parameters()}
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    figures = monitor.records[0].weights
    assert figures.keys() == before.keys()
    for name, p in model.named_parameters():
        assert figures[name]["gradient"] == pytest.approx(before[name], rel=CLOSE)
        assert figures[name]["weight"] == pytest.approx(p.detach().norm().item(), rel=CLOSE)
        assert figures[name]["gradient"] > 10 * p.grad.norm().item()
        if p.numel() <= 4096:
            exact = (p.detach().double() - weights[name].double()).norm().item()
            assert figures[name]["update"] == pytest.approx(exact, rel=CLOSE)


def test_a_parameter_without_a_gradient_has_none() -> None:
    model = small()
    model.model.layers[0].requires_grad_(False)
    with Monitor(model, every=1, spectra=0) as monitor:
        loss = model(**batches(1)[0]).loss
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert not any(name.startswith("model.layers.0") for name in monitor.records[0].weights)


def test_the_update_of_a_large_weight_is_unbiased() -> None:
    """Over 300 draws of 4,096 of 65,536 entries, of which few change at all."""
    table = nn.Embedding(512, 128)
    change = torch.zeros(512, 128)
    change[:19] = torch.randn(19, 128, generator=torch.Generator().manual_seed(1))
    squares = []
    for seed in range(300):
        weights = Weights(table, seed)
        weights.remember()
        with torch.no_grad():
            table.weight += change
        squares.append(weights.figures()[0]["weight"]["update"] ** 2)
        with torch.no_grad():
            table.weight -= change
    found = torch.tensor(squares, dtype=torch.float64)
    exact = float(change.double().square().sum())
    error = abs(float(found.mean()) - exact)
    assert error <= 5 * float(found.std()) / math.sqrt(300)  # five standard errors
    assert float(found.std()) > 0


def test_large_half_and_sparse_tensors() -> None:
    generator = torch.Generator().manual_seed(4)
    model = nn.Module()
    model.long = nn.Parameter(torch.randn(1_000_003, generator=generator))
    model.narrow = nn.Parameter(torch.randn(97, 1009, generator=generator).bfloat16())
    model.turned = nn.Parameter(torch.randn(53, 71, generator=generator).t())
    model.table = nn.Embedding(31, 7, sparse=True)
    model.table(torch.tensor([3, 5, 3])).square().sum().backward()
    model.long.grad = torch.randn(1_000_003, generator=generator)
    weights = Weights(model)
    assert weights.read_gradients(scale=4.0) == ""
    figures, bad = weights.figures()
    assert bad == ""
    for name, p in model.named_parameters():
        exact = p.detach().double().norm().item()
        assert figures[name]["weight"] == pytest.approx(exact, rel=CLOSE)
    long = model.long.grad.double().norm().item()
    assert figures["long"]["gradient"] == pytest.approx(long / 4, rel=CLOSE)
    sparse = model.table.weight.grad.to_dense().norm().item()
    assert figures["table.weight"]["gradient"] == pytest.approx(sparse / 4, rel=CLOSE)
    assert math.isnan(figures["narrow"]["gradient"])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_named(value: float) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model(torch.ones(1, 3)).sum().backward()
    model[0].weight.grad[1, 1] = value
    weights = Weights(model)
    assert weights.read_gradients() == "the gradient of 0.weight"
    model[1].bias.grad[0] = value  # a backward pass meets this one first
    assert weights.read_gradients() == "the gradient of 1.bias"
    with torch.no_grad():
        model[1].weight[0, 0] = value
    assert weights.figures()[1] == "the weight of 1.weight"


def test_a_norm_too_large_for_its_squares_is_not_called_infinite() -> None:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(1e30)
    assert Weights(model).figures()[1] == ""


def test_the_end_of_a_backward_pass_is_told_once() -> None:
    told: list[int] = []
    x = torch.ones(3, requires_grad=True)
    outputs = {"loss": (x * 2).sum(), "logits": (x * 3, [x * 5])}
    after_backward(outputs, lambda: told.append(x.grad is not None))
    (outputs["loss"] + outputs["logits"][0].sum() + outputs["logits"][1][0].sum()).backward()
    assert told == [True]
