"""The residual stream against hidden states that transformers returns itself."""

from __future__ import annotations

import pytest
import torch

from headwise.observation.attach import observe
from tests.observation.test_laws_of_observation import watched
from tests.parity.families import FAMILIES, build, inputs
from tests.parity.watching import run

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*")

POST_NORM = ("bert", "roberta", "electra", "albert", "distilbert", "marian", "bart", "wav2vec2",
             "hubert")  # fmt: skip
# Blocks whose mixer is not attention write with something that is not measured here.
MIXED = {"jamba": [False, True, False, True], "qwen3_next": [False, True],
         "recurrent_gemma": [False, True]}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_writes_add_up_wherever_the_stream_is_a_sum(name: str) -> None:
    model = build(name)
    record = watched(model, inputs(name)[0]).record
    verified = [block.writes_verified for block in record.blocks]
    if name in POST_NORM:
        assert not any(verified)
    else:
        assert verified == MIXED.get(name, [True] * len(verified))
    assert record.blocks
    assert all(block.stream_out_rms > 0 for block in record.blocks)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "mistral"])
def test_against_hidden_states(name: str) -> None:
    model = build(name)
    given, real = inputs(name)
    assert real is not None
    with observe(model) as scan, torch.no_grad():
        states = model(**given, output_hidden_states=True).hidden_states
    first = torch.zeros_like(real)
    first[:, 0] = True
    for i, block in enumerate(scan.record.blocks):
        x = states[i].double()
        rest = x[real & ~first].square().mean().sqrt()
        assert abs(block.stream_in_rms - float(rest)) <= 1e-6 * float(rest)
        alone = x[first].square().mean().sqrt()
        assert abs(block.stream_in_rms_first - float(alone)) <= 1e-6 * float(alone)
        if i + 1 < len(scan.record.blocks):  # the last hidden state is after the final norm
            assert block.stream_max_abs == float(states[i + 1][real].abs().max())


def test_a_write_is_what_the_module_adds() -> None:
    model = build("llama")
    given, real = inputs("llama")
    assert real is not None
    wrote: list[torch.Tensor] = []
    handle = model.layers[1].mlp.register_forward_hook(lambda m, a, out: wrote.append(out))
    block = watched(model, given).record.blocks[1]
    handle.remove()
    rest = real.clone()
    rest[:, 0] = False
    want = float(wrote[0][rest].double().square().mean().sqrt())
    assert abs(block.mlp_write_rms - want) <= 1e-6 * want


def test_a_stream_that_does_not_add_up_is_not_called_verified() -> None:
    model = build("llama")
    given, _ = inputs("llama")
    handle = model.layers[1].register_forward_hook(lambda m, a, out: 1.001 * out)
    blocks = watched(model, given).record.blocks
    handle.remove()
    assert [block.writes_verified for block in blocks] == [True, False]


def test_the_stream_can_be_left_out() -> None:
    model = build("llama")
    with observe(model, stream=False) as scan:
        assert not model.layers[0]._forward_hooks
        run(model, inputs("llama")[0])
    assert scan.record.blocks == ()
