"""Spectral norms of W_QK and W_OV against the singular values of the factored products."""

from __future__ import annotations

import pytest
import torch

from headwise.circuits.head_weights import head_weights
from headwise.monitoring.monitor import Monitor
from headwise.monitoring.spectra import spectral_norms
from tests.monitoring.dense import trained
from tests.monitoring.test_monitor import batches, small
from tests.observation.own_models import own


def models() -> dict[str, torch.nn.Module]:
    return {
        "llama": trained("llama"),
        "gpt2": trained("gpt2"),
        "bert": trained("bert"),
        "grouped": own("grouped"),
        "encoder-decoder": own("encoder-decoder"),
    }


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "grouped", "encoder-decoder"])
def test_they_are_the_largest_singular_values(name: str) -> None:
    for layer in head_weights(models()[name], validate=False).layers:
        qk, ov = spectral_norms(layer)
        for got, want in ((qk, layer.qk()), (ov, layer.ov())):
            # The Rayleigh quotient of a vector that settled to 1e-10 in its norm.
            exact = want.singular_values()[:, 0].double()
            torch.testing.assert_close(got, exact, rtol=1e-6, atol=0.0)


def test_a_head_of_zeros_has_none() -> None:
    model = small()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[:16] = 0
    qk, _ = spectral_norms(head_weights(model, validate=False).layers[0])
    assert qk[0] == 0
    assert bool((qk[1:] > 0).all())


def test_they_are_in_every_so_many_th_record() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Monitor(model, every=1, spectra=2) as monitor:
        for _ in range(4):
            model(**batches(1)[0]).loss.backward()
            optimizer.step()
    layer = head_weights(model, validate=False).layers[1]
    qk, ov = spectral_norms(layer)
    for number, record in enumerate(monitor.records):
        figures = record.layers[1].figures
        assert ("qk_norm" in figures) == (number % 2 == 0)
        if "qk_norm" in figures:
            assert figures["qk_norm"] == qk.tolist()
            assert figures["ov_norm"] == ov.tolist()


def test_a_model_whose_weights_cannot_be_read_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from headwise.errors import ModelError
    from headwise.monitoring import monitor as module

    def refuse(*_: object, **__: object) -> None:
        raise ModelError("no such family")

    monkeypatch.setattr(module, "head_weights", refuse)
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Monitor(model, every=1, spectra=1) as monitor:
        model(**batches(1)[0]).loss.backward()
        with pytest.warns(UserWarning, match="no spectral norms: no such family"):
            optimizer.step()
        model(**batches(1)[0]).loss.backward()
        optimizer.step()  # warnings are errors in the tests
    assert len(monitor.records) == 2
