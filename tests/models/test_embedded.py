"""The model inside the package: its size, its loss on the packaged text, its known heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from headwise.models import Decoder, fused
from headwise.models.checkpoints import Checkpoint, load
from headwise.models.embedded import embedded_folder, embedded_model
from headwise.observation.reading import default_text

LOSS = 3.36312  # nats per token over the first windows of the packaged text
HERE = 0.4  # a head that has a share of it from here on (theory: a heuristic of this project)


@pytest.fixture(scope="module")
def found() -> Checkpoint:
    return load(embedded_model())


def test_it_is_small_and_long_enough(found: Checkpoint) -> None:
    assert isinstance(found.model, Decoder)
    a = found.model.architecture
    assert 1e6 <= sum(p.numel() for p in found.model.parameters()) <= 3e6
    assert a.stack.layers >= 4
    assert a.stack.heads >= 4
    assert a.context >= 1024
    assert a.stack.rotary is not None
    assert (a.stack.norm, a.stack.activation, a.stack.gated) == ("rms", "silu", True)
    assert sum(file.stat().st_size for file in embedded_folder().iterdir()) <= 6e6
    assert {p.dtype for p in found.model.parameters()} == {torch.float32}


def test_the_packaged_text_is_long_enough_and_has_a_fixed_loss(found: Checkpoint) -> None:
    assert found.tokenizer is not None
    ids = torch.tensor(found.tokenizer.encode(default_text()).ids)
    assert len(ids) >= 8000
    windows = ids[: 4 * 1024].view(4, 1024)
    with torch.inference_mode():
        logits = found.model(windows)
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten())
    # Float32 sums in another order on another machine: far below what another model would give.
    assert float(loss) == pytest.approx(LOSS, abs=1e-4)


def heads_of(model: Decoder, period: int = 25, copies: int = 4) -> tuple[Tensor, Tensor]:
    """Mean A[i, i−1] and, from the second copy on, mean A[i, i−T+1]: ``layer head``."""
    generator = torch.Generator().manual_seed(0)
    block = torch.randint(1, model.architecture.vocab, (16, period), generator=generator)
    ids = block.repeat(1, copies)
    maps: list[Tensor] = []

    def watch(call: fused.Attending) -> Tensor:
        maps.append(fused.weights(call))
        return fused.output(call)

    token = fused.WATCHER.set(watch)
    try:
        with torch.inference_mode():
            model(ids)
    finally:
        fused.WATCHER.reset(token)
    previous = torch.stack([a.diagonal(-1, 2, 3).mean((0, 2)) for a in maps])
    induction = torch.stack([a.diagonal(1 - period, 2, 3)[..., 1:].mean((0, 2)) for a in maps])
    return previous, induction


def test_it_has_a_previous_token_and_an_induction_head(found: Checkpoint) -> None:
    assert isinstance(found.model, Decoder)
    previous, induction = heads_of(found.model)
    assert float(previous.max()) >= HERE
    assert float(induction.max()) >= HERE
    assert int(previous.max(1).values.argmax()) < int(induction.max(1).values.argmax())


def test_the_scores_can_fail(found: Checkpoint) -> None:
    fresh = found.model.__class__(
        found.model.architecture,
        found.model.embedding,
        type(found.model.decoder)(found.model.decoder.blocks[:1], found.model.decoder.norm),
        found.model.unembedding,
    )
    assert float(heads_of(fresh)[1].max()) < HERE  # one layer has no induction head
