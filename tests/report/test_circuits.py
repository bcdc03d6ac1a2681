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
from headwise.report.circuit_facts import Told, compared, edges, labelled_heads, strongest
from headwise.report.circuit_figures import behaviours
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


def both_kinds():
    """Circuits with a text, in which two heads' scores are set by hand."""
    found = hw.circuits(tokens=40, layers=[2], behaviours=True).dataset.copy(deep=True)
    for prefix, names in (("repeated_", "behaviours"), ("text_", "text_behaviours")):
        found[names][:] = ""
        found[f"{prefix}induction"][:] = 0.0
    found["behaviours"][0, :2] = "induction, sink"
    found["text_behaviours"][0, 1:3] = "induction, local"
    found["repeated_induction"][0] = [0.9, 0.8, 0.1, 0.0, 0.0]
    found["text_induction"][0] = [0.2, 0.95, 0.5, 0.0, 0.0]
    found["text_local"] = found["text_induction"]
    return found


def test_heads_are_compared_on_both_kinds_of_data():
    found = both_kinds()
    induction, sink, local = compared(found)
    assert (induction.word, induction.scored_on_both) == ("induction", True)
    assert induction.both == (Told((0, 1), 0.8, 0.95),)
    assert induction.repeated == (Told((0, 0), 0.9, 0.2),)
    assert induction.text == (Told((0, 2), 0.1, 0.5),)
    assert {h.place for h in sink.repeated} == {(0, 0), (0, 1)}
    assert (local.both, local.scored_on_both) == ((), False)
    assert [h.place for h in local.text] == [(0, 1), (0, 2)]
    table = behaviours(found)
    assert table["rows"][0]["cells"] == [
        [(0, 1, "0.80 / 0.95")], [(0, 0, "0.90 / 0.20")], [(0, 2, "0.10 / 0.50")]
    ]  # fmt: skip
    assert table["rows"][2]["cells"][:2] == [None, None]
    assert table["rows"][2]["cells"][2][0] == (0, 1, "– / 0.95")
    page = render(found)
    assert "only on repeated tokens" in page
    assert "not scored there" in page
    assert f"chance {float(found['text_induction_uniform'][0]):.2f}" in page
    alone = found.drop_vars([name for name in found if str(name).startswith("text_")])
    assert compared(alone) == []


def test_the_summary_has_both_kinds_of_data():
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        console.print(circuit_summary(both_kinds()))
    shown = captured.get()
    assert max(map(len, shown.splitlines())) <= 80
    words = " ".join(shown.split())
    assert "Of 5 heads: induction 2, sink 2, no label 3. On 25 random tokens" in words
    assert "Of 5 heads: induction 2, local 2, no label 3. On 40 tokens of text." in words
    assert (
        "On both: induction 1; only on repeated tokens: induction 1, sink 2; only on the text:"
        " induction 1." in words
    )
    assert "L2 · H1 (0.800 / 0.950), L2 · H0 (0.900 / 0.200)" in words
    assert "L2 · H1 (– / 0.950)" in words


def test_a_text_alone():
    found = hw.circuits(tokens=200, behaviours=False).dataset
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        console.print(circuit_summary(found))
    assert "On 200 tokens of text." in captured.get()
    assert "On both" not in captured.get()
    page = render(found)
    assert "What heads do on the text" in page
    assert "repeated random tokens</h3>" not in page


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
