"""What the report says of circuits, and what it does where there are none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import GPT2Config, GPT2LMHeadModel

import headwise as hw
from headwise.circuits.dataset import add_circuits
from headwise.cli.app import run
from headwise.observation.loading import wrap_model
from headwise.report.circuit_facts import edges, labelled_heads, strongest
from headwise.report.circuit_terminal import circuit_summary
from headwise.report.page import render
from headwise.results.validate import about, check


@pytest.fixture(scope="module")
def embedded():
    return hw.circuits().dataset


def test_the_summary_fits_in_80_columns(embedded):
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        console.print(circuit_summary(embedded))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("induction       L2 · H4") for line in lines)


def test_edges_are_the_largest_of_all(embedded):
    found = edges(embedded, most=5)
    z = np.stack([embedded[f"composition_{k}_z"].values for k in "qkv"])
    assert found.pairs == np.isfinite(z).sum()
    assert found.above == (z > 8).sum()
    np.testing.assert_allclose([e.z for e in found.shown], np.sort(z[np.isfinite(z)])[:-6:-1])
    kinds = {"Q": 0, "K": 1, "V": 2}
    for edge in found.shown:
        assert z[(kinds[edge.kind], *edge.later, *edge.earlier)] == edge.z


def test_strongest_and_labels(embedded):
    (place, value), *_ = strongest(embedded, "qk_sign")
    values = embedded["qk_sign"].values
    assert value == values[place] == values.ravel()[np.abs(values).argmax()]
    for heads in labelled_heads(embedded).values():
        scores = [score for _, score in heads]
        assert scores == sorted(scores, reverse=True)


def test_weights_that_are_not_finite_leave_a_note():
    model = GPT2LMHeadModel(
        GPT2Config(n_embd=12, n_head=3, n_layer=2, vocab_size=31, bos_token_id=0, eos_token_id=0)
    ).eval()
    scan = hw.scan(model, [1, 2, 3, 4]).dataset
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.weight[1, 2] = torch.nan
    noted = add_circuits(scan, wrap_model(model))
    check(noted)
    (note,) = [n for n in about(noted)["notes"] if n.startswith("no circuits: ")]
    assert "h.0.attn" in note
    assert 'id="circuits"' not in render(noted)
    assert "no circuits: " in render(noted)


def test_no_circuits_turns_the_section_off(tmp_path, capsys):
    for options, there in (([], True), (["--no-circuits"], False)):
        page = tmp_path / "page.html"
        assert run(["report", "--tokens", "40", "--out", str(page), "-q", *options]) == 0
        assert ('id="circuits"' in page.read_text(encoding="utf-8")) is there
