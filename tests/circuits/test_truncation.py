"""The loss against the rank of the heads: labels, suggestion, single heads, and what is saved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import headwise as hw
from headwise.circuits.head_weights import head_weights
from headwise.circuits.surgery import loss_by_rank, truncated
from headwise.circuits.truncation import parsed_tolerance, truncate
from headwise.errors import FileError, HeadwiseError, ModelError, OptionError, TextError
from headwise.models import choice, generate
from headwise.observation.loading import load_model, wrap_model
from headwise.observation.loss import mean_loss
from headwise.observation.text import tokenize
from tests.circuits.known_heads import tiny
from tests.circuits.test_surgery import IDS, ROUNDING, qwen, same, state
from tests.observation.own_models import own
from tests.observation.tiny_models import build

WIDTH = 6  # d_head of every model here
BOUND = 1e4 * ROUNDING  # three layers and logits of order 10², see test_surgery


def gpt2() -> Any:
    return build("gpt2").double()


def planted(rank: int, heads: list[tuple[int, int]] | None) -> Any:
    """A model whose W_QK and W_OV of these heads are of a rank."""
    model = own("alibi")
    with truncated(model, rank, circuits=["qk", "ov"], heads=heads):
        low = state(model)
    model.load_state_dict(low)
    return model


def drawn(model: Any) -> list[torch.Tensor]:
    """Texts drawn from the model: no other model can expect a lower loss on them (Gibbs).

    41·109 tokens: the loss of a model at a distance of KL varies by √(2 KL / 4469), less than KL
    from 0.0005 nats on.
    """
    start = torch.arange(1, 42)[:, None]
    new = generate(model, start, tokens=109, choose=choice(temperature=1.0)).ids
    return list(torch.cat([start, new], 1))


def llama() -> Any:
    return tiny("llama", AutoModelForCausalLM)


@pytest.mark.parametrize("name", ["gpt2", "alibi"])
def test_the_losses_are_those_of_the_cut_model_and_the_model_is_left_as_it_was(name):
    model = gpt2() if name == "gpt2" else own("alibi")
    before = state(model)
    found = truncate(model, IDS, circuits=["qk", "ov"])
    assert found.losses.ranks == (1, 2, 4, WIDTH)
    want = loss_by_rank(model, IDS, [1, 2, 4, WIDTH], circuits=["qk", "ov"])
    assert found.losses == want
    assert found.dataset["loss"].values.tolist() == list(want.losses)
    assert found.dataset["change"].values.tolist() == list(want.changes)
    assert abs(found.losses.changes[-1]) < BOUND < abs(found.losses.changes[0])
    assert found.saved is None
    assert same(before, state(model))


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("heads", [None, [(1, 2)]])
def test_the_suggestion_for_a_planted_rank_is_that_rank(rank, heads):
    chosen = {} if heads is None else {"layers": [1], "heads": [2]}
    model = planted(rank, heads)
    found = truncate(
        model,
        drawn(model),
        ranks=[6, 1, 2, 3, 5],
        circuits=["qk", "ov"],
        tolerance=BOUND,
        **chosen,
    )
    assert found.suggested == rank
    energy = found.dataset["energy"]
    # what is left of σ² after rounding: a few u times the largest σ, squared, over WIDTH of them
    assert float(1 - energy.sel(rank=rank).min()) < WIDTH * ROUNDING**2
    if rank > 1:
        assert float(1 - energy.sel(rank=rank - 1).max()) > ROUNDING


def test_no_rank_is_suggested_where_none_is_within_the_tolerance():
    found = truncate(own("alibi"), IDS, ranks=[1, 2], tolerance=0)
    assert found.suggested is None


def test_the_energy_is_that_of_the_dense_products():
    model = tiny("gpt2", AutoModelForCausalLM)
    width = model.config.n_embd // model.config.n_head
    layers = head_weights(model).layers
    found = truncate(model, IDS, ranks=[1, 4], circuits=["qk", "ov"], heads=[0, 3]).dataset
    assert found["energy"].dims == ("matrix", "rank", "layer", "head")
    assert found["head"].values.tolist() == [0, 3]
    for layer in found["layer"].values:
        for matrix in ("qk", "ov"):
            values = torch.linalg.svdvals(getattr(layers[layer], matrix)().dense())[:, :width]
            share = (values.square().cumsum(-1) / values.square().sum(-1, keepdim=True)).numpy()
            for rank in (1, 4):
                got = found["energy"].sel(matrix=matrix, rank=rank, layer=layer).values
                np.testing.assert_allclose(got, share[[0, 3], rank - 1], rtol=ROUNDING, atol=0)


def test_parameters_are_those_of_products_and_shared_values_are_stored_once():
    model = qwen()  # d_model 24, 4 heads over 2, 2 layers
    found = truncate(model, IDS, ranks=[1, 5])
    assert found.dataset["parameters"].values.tolist() == [8 * 47, 8 * 5 * 43]
    assert found.facts["stored"] == 2 * (4 + 2) * 24 * WIDTH
    one = truncate(model, IDS, ranks=[1], layers=[1], heads=[3])
    assert one.dataset["parameters"].values.tolist() == [47]
    assert one.facts["stored"] == 2 * 24 * WIDTH
    assert one.facts["heads"] == 1


@pytest.mark.parametrize(
    ("model", "circuits"), [(gpt2, ["qk", "ov"]), (qwen, ["ov"])], ids=["gpt2", "qwen"]
)
def test_one_head_at_a_time_is_that_head_cut_alone(model, circuits):
    made = model()
    before = state(made)
    found = truncate(made, IDS, ranks=[3], circuits=circuits, each=2)
    alone = found.dataset["change_alone"]
    assert alone.shape == (2, 4)
    for layer in range(2):
        for head in range(4):
            want = loss_by_rank(made, IDS, [2], circuits=circuits, heads=[(layer, head)])
            assert float(alone.sel(layer=layer, head=head)) == want.changes[0]
    assert len(set(alone.values.ravel().tolist())) == 8
    assert same(before, state(made))


def test_folded_reaches_the_cut():
    model = llama()
    found = truncate(model, IDS, ranks=[2], folded=True)
    assert found.losses == loss_by_rank(model, IDS, [2], folded=True)
    assert found.losses != truncate(model, IDS, ranks=[2]).losses


def test_layers_of_an_encoder_decoder_are_chosen_by_their_number():
    model = build("t5", "seq2seq").double()
    found = truncate(model, (torch.tensor(IDS[:11]), torch.tensor(IDS[11:])), ranks=[1], layers=[1])
    assert found.dataset["number"].values.tolist() == [1, 1, 1]
    assert sorted(found.dataset["role"].values.tolist()) == ["cross", "decoder", "encoder"]
    assert found.losses.changes[0] != 0


# ---------------------------------------------------------------- saving


@pytest.mark.parametrize("name", ["gpt2", "llama", "alibi", "grouped"])
def test_a_saved_model_is_the_cut_one(tmp_path, name):
    model = llama() if name == "llama" else gpt2() if name == "gpt2" else own(name)
    before = state(model)
    found = truncate(model, IDS, ranks=[2, 5], save=tmp_path / "cut", save_rank=2)
    assert found.saved == tmp_path / "cut"
    assert same(before, state(model))
    again = load_model(tmp_path / "cut")
    with truncated(model, 2):
        assert same(state(model), state(again.model))
    loss = mean_loss(again, tokenize(again, IDS))
    assert abs(loss - found.losses.losses[0]) < BOUND
    assert abs(loss - found.losses.whole) > BOUND
    kept = truncate(again, IDS, ranks=[2])  # its heads have rank 2 already
    assert abs(kept.losses.changes[0]) < BOUND


def test_the_suggested_rank_is_saved_and_nothing_where_there_is_none(tmp_path):
    model = planted(2, None)
    options = {"ranks": [1, 2, 3], "circuits": ["qk", "ov"]}
    found = truncate(model, drawn(model), tolerance=BOUND, save=tmp_path / "cut", **options)
    assert found.suggested == 2
    assert found.saved == tmp_path / "cut"
    none = truncate(own("alibi"), IDS, tolerance=0, ranks=[1, 2], save=tmp_path / "none")
    assert none.saved is None
    assert [each.name for each in tmp_path.iterdir()] == ["cut"]


def test_a_bias_without_a_place_in_the_checkpoint_is_refused(tmp_path):
    model = qwen()  # biased values that heads share: what W_O loses needs a bias of the output
    before = state(model)
    with pytest.raises(ModelError, match="a checkpoint of qwen2 has no place for it"):
        truncate(model, IDS, ranks=[2], save=tmp_path / "cut", save_rank=2)
    assert list(tmp_path.iterdir()) == []
    assert same(before, state(model))


@pytest.mark.parametrize(
    ("error", "kind"), [(OSError(28, "No space left"), FileError), (ValueError("odd"), ModelError)]
)
def test_a_save_that_fails_leaves_no_folder_and_the_model_as_it_was(
    tmp_path, monkeypatch, error, kind
):
    model = gpt2()
    before = state(model)

    def half(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise error

    monkeypatch.setattr(model, "save_pretrained", half)
    with pytest.raises(kind):
        truncate(model, IDS, ranks=[2], save=tmp_path / "cut", save_rank=2)
    assert list(tmp_path.iterdir()) == []
    assert same(before, state(model))


def test_a_folder_that_holds_something_is_not_replaced(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    steps: list[Any] = []
    with pytest.raises(FileError, match=r"holds config\.json, which would be lost"):
        truncate(gpt2(), IDS, ranks=[2], save=tmp_path, progress=lambda *step: steps.append(step))
    assert steps == []  # said before anything was computed


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ranks": [0]}, "the rank is 0; allowed: 1 to 6"),
        ({"ranks": [1, 7]}, "the rank is 7; allowed: 1 to 6"),
        ({"ranks": []}, "no rank is named"),
        ({"each": 7}, "the rank is 7; allowed: 1 to 6"),
        ({"each": 0}, "the rank is 0; allowed: 1 to 6"),
        ({"save": "x", "save_rank": 9}, "the rank is 9; allowed: 1 to 6"),
        ({"save_rank": 2}, "a rank to save is named; name the folder: --save DIR"),
        ({"layers": [2]}, "the model has no layer 2; allowed: 0 to 1"),
        ({"layers": []}, "no layer is named"),
        ({"heads": [4]}, "the model has no head 4; allowed: 0 to 3"),
        ({"tolerance": -1}, "the tolerance is -1; allowed: 0 or more"),
        ({"tolerance": "a bit"}, "the tolerance is a bit"),
        ({"circuits": ["vo"]}, "the circuits are"),
    ],
)
def test_what_is_not_there_is_refused(options, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = gpt2()
    before = state(model)
    with pytest.raises(OptionError, match=says):
        truncate(model, IDS, **options)
    assert same(before, state(model))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("model", "text", "kind", "says"),
    [
        (lambda: build("bert", None), IDS, ModelError, "no language-model head, so it has no loss"),
        (gpt2, [5], TextError, "the text has 1 token"),
        (gpt2, "To be", ModelError, "has no tokenizer"),
        (llama, IDS, OptionError, "turns with the distance"),
    ],
)
def test_models_and_texts_without_an_answer_are_refused(model, text, kind, says):
    with pytest.raises(kind, match=says) as caught:
        truncate(model(), text, circuits=["qk", "ov"])
    assert isinstance(caught.value, HeadwiseError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["nan", "inf", "-0.1", "%", "", "1%%"])
def test_a_tolerance_is_a_finite_number(text):
    with pytest.raises(OptionError, match="the tolerance is"):
        parsed_tolerance(text)


def test_a_share_is_of_the_loss():
    loaded = wrap_model(gpt2())
    found = truncate(loaded, IDS, ranks=[1], tolerance="2%")
    assert found.tolerance == 0.02 * found.losses.whole
    assert truncate(loaded, IDS, ranks=[1], tolerance=0.3).tolerance == 0.3


def test_it_is_a_public_name_and_says_how_far_it_is():
    steps: list[tuple[int, int, str]] = []
    hw.truncate(gpt2(), IDS, ranks=[1, 2], each=1, progress=lambda *step: steps.append(step))
    assert [step[:2] for step in steps] == [(0, 11), *((i, 11) for i in range(11))]
    assert [step[2] for step in steps[:5]] == [
        "singular directions", "the whole model", "rank 1", "rank 2", "head 1 of 8"
    ]  # fmt: skip


@pytest.mark.real_model
def test_a_real_model_from_a_gguf_file_is_saved_and_loaded_again(tmp_path):
    file = Path(os.environ["HEADWISE_MODELS"]) / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    found = truncate(file, tokens=64, ranks=[32, 56, 64], save=tmp_path / "cut", save_rank=56)
    assert found.suggested == 64
    assert found.losses.losses[0] > found.losses.losses[1] > found.losses.losses[2] + 0.1
    again = truncate(tmp_path / "cut", tokens=64, ranks=[56])
    # float32: 30 layers of sums over 576 entries
    rounding = 30 * 576 * 2**-24
    assert again.losses.whole == pytest.approx(found.losses.losses[1], rel=rounding)
    assert abs(again.losses.changes[0]) < rounding * again.losses.whole
    assert again.suggested == 56
