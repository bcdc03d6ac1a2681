"""Behaviours on a text and shares of pairs in the labelled data set, from one pass or from two."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.circuits.dataset import add_circuits, text_reader
from headwise.circuits.head_weights import head_weights
from headwise.circuits.rotary import incomplete
from headwise.circuits.text_reader import TextReader
from headwise.errors import TextError
from headwise.observation.loading import wrap_model
from headwise.results import io
from headwise.results.circuit_definitions import CIRCUITS
from headwise.results.validate import about, check
from tests.circuits.test_text_reader import planted, text
from tests.observation.tiny_models import build

ON_TEXT = [name for name in CIRCUITS if name.startswith("text_") or name.endswith("_on_text")]


@pytest.fixture(scope="module")
def loaded():
    return wrap_model(build("llama", max_position_embeddings=211))


@pytest.fixture(scope="module")
def words():
    return text(3, 149).tolist()


@pytest.fixture(scope="module")
def found(loaded, words):
    return hw.circuits(loaded, text=words).dataset


def test_the_data_set_holds_what_the_reader_found(loaded, words, found):
    check(found)
    reader = TextReader(head_weights(loaded.model))
    read = reader.finish(hw.scan(loaded, words, each=reader.absorb))
    assert set(ON_TEXT) - set(found) == {"text_next_token"}  # a decoder's
    for i, layer in enumerate(read.labels.layers):
        for name, score in layer.scores.items():
            np.testing.assert_array_equal(found[f"text_{name}"][i], score)
        for name in ("induction", "duplicate_token"):
            assert found[f"text_{name}_uniform"].values[i] == layer.uniform[name]
            assert found[f"text_{name}_rows"].values[i] == layer.rows[name]
        shares = read.shares[layer.module]
        np.testing.assert_array_equal(found["rotary_share_on_text"][i], shares[:, :-1])
        slow = incomplete(read.weights.layers[i].rotary, 211)
        np.testing.assert_allclose(
            found["rotary_slow_share_on_text"][i], shares[:, :-1][:, slow].sum(-1)
        )
    assert about(found)["text"] == "149 tokens of text"


def test_one_pass_gives_what_two_give(loaded, words, found, tmp_path):
    reader = text_reader(loaded)
    scan = hw.scan(loaded, words, each=reader.absorb)
    both = add_circuits(scan.dataset, loaded, on_text=reader.finish(scan))
    for name in found.data_vars:
        np.testing.assert_array_equal(both[name].values, found[name].values, err_msg=str(name))
    np.testing.assert_array_equal(both["text_previous_token"], both["previous_mass"])
    assert hw.load_scan(io.save(both, tmp_path / "both.nc")).identical(both)
    assert not set(ON_TEXT) & set(add_circuits(scan.dataset, loaded))  # nobody read for it


def test_layers_and_windows_are_those_asked_for(loaded, words, found):
    part = hw.circuits(loaded, text=words, layers=[0], behaviours=False).dataset
    assert part["number"].values.tolist() == [0]
    assert "behaviours" not in part
    np.testing.assert_array_equal(part["text_induction"][0], found["text_induction"][0])
    cut = hw.circuits(loaded, text=words, window=50, behaviours=False).dataset
    assert about(cut)["text"] == "149 tokens of text in 3 documents"
    assert "text_local" not in cut  # in 50 tokens everything is near
    assert (cut["text_induction_rows"] < found["text_induction_rows"]).all()


def test_names_are_those_above_the_threshold():
    ids = text(6, 61)
    names = hw.circuits(planted(ids), text=ids.tolist()).dataset["text_behaviours"]
    assert names.values.tolist() == [["induction", "duplicate token", ""]]


def test_without_a_text_none_is_read(loaded):
    assert not set(ON_TEXT) & set(hw.circuits(loaded, behaviours=False).dataset)
    embedded = hw.circuits(tokens=40, behaviours=False).dataset  # of the text of the package
    assert about(embedded)["text"] == "40 tokens of text"
    with pytest.raises(TextError):
        hw.circuits(loaded, text=[])


def test_a_layer_that_is_not_finite_has_no_scores(words):
    model = build("llama", max_position_embeddings=211)
    reader = TextReader(head_weights(model))
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = torch.nan
    read = reader.finish(hw.scan(model, words[:40], each=reader.absorb))
    first, broken, _ = read.labels.layers
    assert bool(torch.isfinite(first.scores["induction"]).all())
    assert "induction" not in broken.scores
    assert bool(broken.scores["previous_token"].isnan().all())
    assert text_reader(wrap_model(model)) is None  # and ``add_circuits`` says why


def test_stopped_is_stopped(loaded, words, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(
        sys.modules["headwise.circuits.text_reader"], "same_token_mass", interrupted
    )
    with pytest.raises(KeyboardInterrupt):
        hw.circuits(loaded, text=words)
