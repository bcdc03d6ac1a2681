"""Gradients: equal to a plain backward pass, in bounded memory, and the model is left as it was."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from headwise.errors import OptionError
from headwise.observation import gradients as module
from headwise.observation import loss
from headwise.observation.driver import Document
from headwise.observation.gradients import check_loss, measure_gradients
from headwise.observation.loading import LoadedModel, wrap_model
from headwise.observation.projections import blocks, projection
from headwise.results.records import PROJECTIONS
from tests.observation import tiny_models
from tests.observation.tiny_models import VOCABULARY

HEADS = {"bert": "masked", "t5": "seq2seq"}


def loaded(architecture: str, **changes: Any) -> LoadedModel:
    built = tiny_models.build(architecture, HEADS.get(architecture, "causal"), **changes)
    return wrap_model(built, tiny_models.tokenizer(around=architecture == "bert"), name="tiny")


def documents(model: LoadedModel, *sizes: int) -> list[Document]:
    torch.manual_seed(11)

    def draw(n: int) -> torch.Tensor:
        return torch.randint(5, VOCABULARY, (n,))

    if model.kind == "encoder-decoder":
        return [Document(draw(n), draw(n + 2)) for n in sizes]
    return [Document(draw(n)) for n in sizes]


def plain_loss(model: LoadedModel, read: list[Document]) -> torch.Tensor:
    """The definition: mean cross-entropy over every predicted token of every document."""
    terms = []
    for d in read:
        if d.target is not None:
            logits = model.model(input_ids=d.ids[None], decoder_input_ids=d.target[None]).logits
            terms.append(F.cross_entropy(logits[0, :-1], d.target[1:], reduction="none"))
        elif model.kind == "encoder":
            hidden = torch.arange(len(d.ids)) % 7 == 3
            logits = model.model(input_ids=torch.where(hidden, 3, d.ids)[None]).logits
            terms.append(F.cross_entropy(logits[0, hidden], d.ids[hidden], reduction="none"))
        else:
            logits = model.model(input_ids=d.ids[None]).logits
            terms.append(F.cross_entropy(logits[0, :-1], d.ids[1:], reduction="none"))
    return torch.cat(terms).mean()


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "opt", "bert", "t5"])
def test_equal_to_a_plain_backward_pass(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(architecture)
    model.model.double()
    read = documents(model, 41, 23)
    monkeypatch.setattr(module, "LOGITS", 7 * VOCABULARY)  # runs of 7 tokens, ragged at the end
    found = measure_gradients(model, read)
    states: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            state = output[0] if isinstance(output, tuple) else output
            state.retain_grad()
            states[f"{name}#{len(states)}"] = state

        return hook

    handles = [block.register_forward_hook(keep(name)) for name, _, block in blocks(model.model)]
    loss = plain_loss(model, read)
    loss.backward()
    for handle in handles:
        handle.remove()
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-12)
    parameters = dict(model.model.named_parameters())
    expected = {n: float(p.grad.norm()) for n, p in parameters.items() if p.grad is not None}
    assert {r.parameter: r.norm for r in found.parameters} == pytest.approx(
        expected, rel=1e-9, abs=1e-15
    )
    assert {r.parameter: r.size for r in found.parameters} == {
        name: parameters[name].numel() for name in expected
    }
    for name in found.stream_rms:
        both = [s.grad for key, s in states.items() if key.startswith(f"{name}#")]
        flat = torch.cat([g.reshape(-1) for g in both if g is not None])
        assert found.stream_rms[name] == pytest.approx(float(flat.pow(2).mean() ** 0.5), rel=1e-9)
    assert set(found.stream_rms) == {name for name, _, _ in blocks(model.model)}


def test_the_logits_of_the_whole_text_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("llama")
    sizes: list[int] = []
    model.model.lm_head.register_forward_hook(lambda m, i, o: sizes.append(o.shape[1]))
    monkeypatch.setattr(module, "LOGITS", 5 * VOCABULARY)
    measure_gradients(model, documents(model, 43))
    assert max(sizes) == 5
    assert sum(sizes) == 43 - 1 + 2  # and the probe of two tokens


def test_activations_are_recomputed_not_kept() -> None:
    model = loaded("llama", num_hidden_layers=5)
    calls: list[int] = []
    model.model.model.layers[2].self_attn.register_forward_hook(lambda m, i, o: calls.append(1))
    measure_gradients(model, documents(model, 13))
    assert len(calls) == 1 + 1 + 1  # the probe, the forward pass, the recomputation


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("llama")
    parameters = list(model.model.parameters())
    parameters[2].requires_grad_(False)
    parameters[3].grad = torch.ones_like(parameters[3])
    if fails:
        monkeypatch.setattr(module, "_records", lambda model: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            measure_gradients(model, documents(model, 13))
    else:
        measure_gradients(model, documents(model, 13))
    assert [p.requires_grad for p in parameters] == [i != 2 for i in range(len(parameters))]
    assert [p.grad is not None for p in parameters] == [i == 3 for i in range(len(parameters))]
    assert bool((parameters[3].grad == 1).all())
    assert all("forward" not in part.__dict__ for part in model.model.modules())


def test_it_works_where_gradients_are_switched_off() -> None:
    model = loaded("llama")
    with torch.no_grad():
        assert measure_gradients(model, documents(model, 13)).loss > 0


def test_half_precision_and_documents_without_a_target() -> None:
    model = loaded("llama")
    model.model.to(torch.bfloat16)
    found = measure_gradients(model, [Document(torch.tensor([5])), *documents(model, 13)])
    assert found.predicted == 12
    assert all(math.isfinite(r.norm) for r in found.parameters)


def test_progress_is_told() -> None:
    model = loaded("llama")
    told: list[tuple[int, int, str]] = []
    measure_gradients(model, documents(model, 13, 11), progress=lambda *a: told.append(a))
    assert told == [(0, 2, "gradients"), (1, 2, "gradients")]


def test_without_a_head_there_is_no_loss() -> None:
    with pytest.raises(OptionError) as caught:
        check_loss(wrap_model(tiny_models.build("llama", None), name="tiny"))
    assert str(caught.value) == (
        "--gradients needs a loss, and tiny (LlamaModel) has no language-model head; leave"
        " --gradients out"
    )
    with pytest.raises(OptionError) as caught:
        check_loss(wrap_model(tiny_models.build("bert", "masked"), name="tiny"))
    assert str(caught.value) == (
        "--gradients of the encoder tiny needs a tokenizer with a mask token; leave --gradients out"
    )


def test_special_tokens_are_not_predicted() -> None:
    model = loaded("bert")
    ids = torch.tensor([1, 5, 6, 2, 7, 8, 9, 10, 11, 12, 13, 2])
    assert loss._hidden(model, ids).nonzero().flatten().tolist() == [10]


@pytest.mark.parametrize(
    ("architecture", "parameter", "expected"),
    [
        ("llama", "model.layers.1.self_attn.q_proj.weight", (1, "q")),
        ("llama", "model.layers.2.self_attn.o_proj.weight", (2, "o")),
        ("llama", "model.layers.0.mlp.gate_proj.weight", (0, "mlp")),
        ("llama", "model.layers.0.input_layernorm.weight", (0, "norm")),
        ("llama", "model.norm.weight", (None, "norm")),
        ("llama", "model.embed_tokens.weight", (None, "embedding")),
        ("llama", "lm_head.weight", (None, "other")),
        ("gpt2", "transformer.h.1.attn.c_attn.bias", (1, "qkv")),
        ("gpt2", "transformer.h.1.attn.c_proj.weight", (1, "o")),
        ("gpt2", "transformer.h.1.mlp.c_proj.weight", (1, "mlp")),
        ("opt", "model.decoder.layers.1.fc2.weight", (1, "mlp")),
        ("opt", "model.decoder.layers.0.self_attn.v_proj.bias", (0, "v")),
        ("bert", "bert.encoder.layer.1.attention.self.key.weight", (1, "k")),
        ("bert", "bert.encoder.layer.1.attention.output.dense.weight", (1, "o")),
        ("bert", "bert.encoder.layer.0.attention.output.LayerNorm.bias", (0, "norm")),
        ("bert", "bert.encoder.layer.0.intermediate.dense.weight", (0, "mlp")),
        ("bert", "bert.encoder.layer.0.output.dense.weight", (0, "mlp")),
        ("t5", "decoder.block.1.layer.1.EncDecAttention.k.weight", (1, "k")),
        ("t5", "encoder.block.0.layer.1.DenseReluDense.wo.weight", (0, "mlp")),
        ("t5", "shared.weight", (None, "embedding")),
    ],
)
def test_where_a_parameter_stands(
    architecture: str, parameter: str, expected: tuple[int | None, str]
) -> None:
    model = tiny_models.build(architecture, HEADS.get(architecture, "causal"))
    assert parameter in dict(model.named_parameters()) or parameter == "lm_head.weight"
    assert projection(model, parameter) == expected
    assert expected[1] in PROJECTIONS


def test_blocks_are_found_once_each() -> None:
    model = tiny_models.build("t5", "seq2seq")
    assert [(name, number) for name, number, _ in blocks(model)] == [
        ("encoder.block.0", 0),
        ("encoder.block.1", 1),
        ("decoder.block.0", 0),
        ("decoder.block.1", 1),
    ]
