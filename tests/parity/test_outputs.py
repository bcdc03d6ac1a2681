"""Observed models compute what they computed before, on tiny models of many families."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headwise.errors import MeasurementError, ModelError
from headwise.observation.attach import observe
from headwise.observation.call import Call
from headwise.observation.interface import NAME
from tests.parity.families import FAMILIES, REFUSED, build, hidden, in_double, inputs
from tests.parity.watching import run

# transformers itself: a fallback it announces, and masks it converts in its own eager code.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*")


def doubled(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: x.double() if x.is_floating_point() else x for k, x in given.items()}


def distance(a: Tensor, b: Tensor, real: Tensor | None) -> float:
    error = (a.double() - b.double()).abs()
    return float(error.max() if real is None else error[real].max())


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_are_as_right_as_the_plain_forward(name: str) -> None:
    """Both are float32; the judge is the same model in float64. The observed one may be as far from
    it as the plain one, times two for another order of summation, or a few units of rounding."""
    model = build(name)
    given, real = inputs(name)
    plain = hidden(run(model, given))
    with observe(model) as scan:
        observed = hidden(run(model, given))
    judge = hidden(run(in_double(model), doubled(given)))
    rounding = 8 * torch.finfo(torch.float32).eps * float(judge.abs().max())
    allowed = 2 * distance(plain, judge, real) + rounding
    assert distance(observed, judge, real) <= allowed
    assert all(layer.rows > 0 for layer in scan.record.layers)
    assert set(scan.dataset["module"].values) == {x.module for x in scan.record.layers}


@pytest.mark.parametrize("name", ["llama", "t5", "gemma2", "gpt_oss"])
def test_the_comparison_can_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Call.part
    monkeypatch.setattr(Call, "part", lambda self, p: tuple(1.01 * x for x in original(self, p)))
    with pytest.raises(AssertionError):
        test_outputs_are_as_right_as_the_plain_forward(name)


@pytest.mark.parametrize("name", REFUSED)
def test_models_with_attention_of_their_own_are_refused(name: str) -> None:
    model = build(name)
    before = model.config._attn_implementation
    kind = type(model).__name__
    with (
        pytest.raises(
            ModelError, match=f"{kind} .* computes attention in its own code and does not"
        ),
        observe(model),
    ):
        pytest.fail("the block must not be entered")
    assert model.config._attn_implementation == before


def test_a_model_without_attention_is_refused() -> None:
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.for_model(
        "mamba", hidden_size=16, num_hidden_layers=1, vocab_size=11, state_size=4
    )
    with (
        pytest.raises(ModelError, match="no attention module that routes"),
        observe(AutoModel.from_config(config)),
    ):
        pass


def test_what_is_not_a_transformers_model_is_refused() -> None:
    with (
        pytest.raises(ModelError, match="Linear is neither a transformers model nor one of Head"),
        observe(torch.nn.Linear(2, 3)),
    ):
        pass


def test_unknown_mathematics_is_refused() -> None:
    model = build("llama")
    given, _ = inputs("llama")
    with (
        pytest.raises(MeasurementError, match="LlamaAttention passes block_indices"),
        observe(model),
    ):
        run(model, {**given, "block_indices": torch.ones(2, 2)})


def test_outside_an_observation_the_name_still_computes_right_attention() -> None:
    model = build("gemma2")
    given, real = inputs("gemma2")
    plain = hidden(run(model, given))
    model.set_attn_implementation(NAME)
    other = hidden(run(model, given))
    assert distance(plain, other, real) <= 64 * torch.finfo(torch.float32).eps * float(
        plain.abs().max()
    )
