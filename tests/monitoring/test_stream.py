"""The residual stream: its size, first tokens apart, and the gradient there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.monitoring.monitor import Monitor
from tests.monitoring.test_head_sums import words
from tests.monitoring.test_monitor import batches, checkpointed, small
from tests.observation.own_models import VOCABULARY, own

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*")


def kept(model: Any, blocks: Any, losses: Any) -> dict[str, list[Tensor]]:
    """The outputs of the blocks in all micro-batches, with the gradients that reached them."""
    found: dict[str, list[Tensor]] = {}

    def hook(path: str) -> Any:
        def after(module: Any, args: Any, output: Any) -> None:
            x = output[0] if isinstance(output, tuple) else output
            x.retain_grad()
            found.setdefault(path, []).append(x)

        return after

    handles = [m.register_forward_hook(hook(path)) for path, m in blocks.items()]
    for loss in losses(model):
        loss.backward()
    for handle in handles:
        handle.remove()
    return found


def of_llama(model: Any) -> Any:
    return (model(**batch).loss for batch in batches(3))


def of_own(model: Any) -> Any:
    return (model(words(2, n, most=VOCABULARY)).square().mean() for n in (23, 11))


@pytest.mark.parametrize("kind", ["llama", "own", "checkpointing", "reentrant"])
def test_norms_and_gradients_are_those_that_autograd_keeps(kind: str) -> None:
    make, losses = {
        "llama": (small, of_llama),
        "own": (lambda: own("grouped").train(), of_own),
        "checkpointing": (lambda: checkpointed(False), of_llama),
        "reentrant": (lambda: checkpointed(True), of_llama),
    }[kind]
    plain = small() if kind != "own" else own("grouped").train()
    with Monitor(plain) as monitor:
        paths = [block.path for block in monitor._found.blocks]
    modules = dict(plain.named_modules())
    want = kept(plain, {path: modules[path] for path in paths}, losses)
    model = make()
    with Monitor(model, every=1, spectra=0) as monitor:
        for loss in losses(model):
            loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    figures = monitor.records[0].stream
    assert list(figures) == paths
    for path, tensors in want.items():
        first = torch.cat([x.detach()[:, 0].flatten() for x in tensors]).double()
        others = torch.cat([x.detach()[:, 1:].flatten() for x in tensors]).double()
        gradient = torch.cat([x.grad.flatten() for x in tensors]).double()
        # Squares are taken in float32; checkpoints add gradients up in another order.
        near = {"rel": 1e-5}
        assert figures[path]["rms_first"] == pytest.approx(
            float(first.square().mean().sqrt()), **near
        )
        assert figures[path]["rms"] == pytest.approx(float(others.square().mean().sqrt()), **near)
        assert figures[path]["gradient"] == pytest.approx(float(gradient.norm()), **near)


def test_a_block_that_did_not_run_has_no_figures() -> None:
    model = small()
    with Monitor(model, every=1, spectra=0) as monitor:
        model.get_input_embeddings().weight.grad = torch.ones_like(model.model.embed_tokens.weight)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    for values in monitor.records[0].stream.values():
        assert all(value != value for value in values.values())
    assert monitor.records[0].layers == ()
