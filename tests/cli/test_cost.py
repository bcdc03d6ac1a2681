"""``headwise cost`` as a user types it."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace

import pytest

import headwise as hw
from headwise.cli.app import run
from headwise.cost.hardware import Figure, Hardware, hardware_from
from headwise.observation import counted, machine
from tests.cost.as_files import BIG, TINY, TRILLION, config, write

EXPLICIT = ["--d-model", "40", "--layers", "3", "--heads", "4", "--vocab", "97"]
MEASURED = Hardware(
    name="this-machine", title="a machine that was not measured", kind="CPU",
    memory=Figure(2**34, "made up", "2026-01-02"),
    bandwidth=Figure(10**10, "made up", "2026-01-02"),
    peaks=(("bfloat16", Figure(10**12, "made up", "2026-01-02")),),
)  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADWISE_TRACEBACK", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    write(tmp_path, big=BIG, trillion=TRILLION, **{kind: config(kind) for kind in TINY})
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".json")


def found(capsys, *arguments):
    """The JSON of a run, which prints nothing else."""
    code = run(["cost", *arguments, "--json", "--quiet"])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return json.loads(out)


def said(capsys, *arguments):
    """What a run prints, line breaks taken out."""
    code = run(["cost", *arguments])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return " ".join(out.split())


# ------------------------------------------------------------------ what is printed and written


def test_one_model_in_the_terminal(here, capsys):
    out = said(capsys, "big.json")
    assert "LlamaForCausalLM · 32 layers, d_model 4,096 · 32 heads over 8 of 128" in out
    assert "total 8,030,261,248" in out
    counts = hw.cost(BIG, length=8192)
    assert f"{counts.forward.macs:,} multiply-adds = {counts.flops:,} FLOPs forward" in out
    assert "1 multiply-add = 2 FLOPs" in out
    assert "the MLP all pairs 21,504 n* = m d f / (2a)" in out
    assert "all linear layers causal mask 53,247" in out
    assert names(here) == []


def test_a_trillion_parameters(here, capsys):
    assert "total 1,026,408,209,408" in said(capsys, "trillion.json")
    got = found(capsys, "trillion.json")
    assert got["parameters"]["total"] == 1_026_408_209_408
    assert got["parameters"]["active"] == 32_861_477_888


@pytest.mark.parametrize("kind", TINY)
def test_json_has_the_integers_of_the_library(here, capsys, kind):
    got = found(capsys, f"{kind}.json", "--length", "17", "--batch", "3")
    counts = hw.cost(config(kind), length=17, batch=3)
    assert got["parameters"]["total"] == counts.parameters
    assert got["forward"]["flops"] == counts.flops == 2 * got["forward"]["multiply_adds"]
    assert got["training_step"]["flops"] == counts.training_flops
    assert sum(got["parameters"]["by_component"].values()) == counts.parameters
    assert sum(got["forward"]["multiply_adds_by_component"].values()) == counts.forward.macs
    assert got["memory_bytes"]["forward"]["total"] == counts.inference.total
    assert got["memory_bytes"]["training_step"]["total"] == counts.training.total
    assert got["keys_and_values_bytes"]["transformers"] == counts.cache_bytes
    if counts.decode is not None:
        assert got["one_more_token"]["flops"] == counts.decode.flops
    for value in (got["parameters"], got["training_step"], got["memory_bytes"]["forward"]):
        assert all(
            type(each) is int for each in value.values() if not isinstance(each, dict | list)
        )


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "t5", "vit"])
def test_csv_adds_up_to_the_json(here, capsys, kind):
    got = found(capsys, f"{kind}.json", "--length", "17", "--batch", "3", "--csv", "parts.csv")
    with open("parts.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))

    def total(column):
        return sum(int(row[column]) for row in rows)

    assert total("parameters") == got["parameters"]["total"]
    assert total("active") == got["parameters"]["active"]
    assert total("multiply_adds") == got["forward"]["multiply_adds"]
    assert total("flops") == got["forward"]["flops"]
    whole = ("multiply_adds", "backward_multiply_adds", "recomputed_multiply_adds")
    assert 2 * sum(total(column) for column in whole) == got["training_step"]["flops"]
    layers = {row["layer"] for row in rows} - {""}
    assert layers == {str(i) for i in range(len(layers))}


def test_several_models_and_lengths_are_compared(here, capsys):
    got = found(capsys, "llama.json", "gpt2.json", *EXPLICIT, "--length", "16,1k", "--csv", "c.csv")
    assert [each["model"] for each in got] == [
        "llama.json", "llama.json", "gpt2.json", "gpt2.json", "explicit sizes", "explicit sizes"
    ]  # fmt: skip
    assert [each["workload"]["length"] for each in got] == [16, 1024] * 3
    with open("c.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for each in got:
        key = (each["model"], str(each["workload"]["length"]))
        mine = [int(r["flops"]) for r in rows if (r["model"], r["length"]) == key]
        assert sum(mine) == each["forward"]["flops"]
    out = said(capsys, "llama.json", "gpt2.json", "--length", "16,1k")
    assert "llama llama gpt2 gpt2" in out
    assert "tokens 1 × 16 1 × 1,024 1 × 16 1 × 1,024" in out


def test_json_alone_on_standard_output(here, capsys):
    assert run(["cost", "gpt2.json", "--json", "--length", "7"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["workload"]["length"] == 7
    assert "GPT2LMHeadModel" in err


def test_files_and_what_is_said_of_them(here, capsys):
    line = ["cost", "gpt2.json", "--length", "7", "--out", "p.html", "--csv", "p.csv"]
    assert run([*line, "--json", "out/p.json"]) == 2
    assert "there is no folder out" in capsys.readouterr().err
    assert names(here) == []
    assert run([*line, "--json", "p.json"]) == 0
    assert capsys.readouterr().out.endswith("wrote p.csv\nwrote p.html\nwrote p.json\n")
    assert names(here) == ["p.csv", "p.html"]
    assert json.loads((here / "p.json").read_text(encoding="utf-8"))["model"] == "gpt2.json"
    assert "<title>The cost of gpt2 · Headwise</title>" in (here / "p.html").read_text("utf-8")
    assert run([*line, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_folder_with_a_config(here, capsys):
    (here / "model").mkdir()
    write(here / "model", config=config("llama"))
    assert found(capsys, "model")["parameters"] == found(capsys, "llama.json")["parameters"]


# ------------------------------------------------------------------ every option


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("--length 13", {"length": 13}),
        ("--batch 5", {"batch": 5}),
        ("--cached 11", {"cached": 11}),
        ("--length 13 --documents 6,7", {"length": 13, "documents": (6, 7)}),
        ("--pairs visible", {"pairs": "visible"}),
        ("--logits last", {"logits": "last"}),
        ("--attention materialised", {"attention": "materialised"}),
        ("--recompute selective", {"recompute": "selective"}),
        ("--recompute full", {"recompute": "full"}),
        ("--weights float32", {"weights": "float32"}),
        ("--weights q4_k", {"weights": "q4_k"}),
        ("--cache float8", {"cache": "float8"}),
        ("--optimizer sgd", {"optimizer": "sgd"}),
        ("--memory 3MiB", {"memory_bytes": 3 * 2**20}),
        ("--on h100-sxm", {"on": "h100-sxm"}),
        ("--on h100-sxm --efficiency 0.5", {"on": "h100-sxm", "efficiency": 0.5}),
    ],
)
def test_every_option_reaches_the_planner(here, capsys, line, arguments):
    got = found(capsys, "mistral.json", *line.split())
    counts = hw.cost(config("mistral"), **arguments)
    assert got["forward"]["flops"] == counts.flops
    assert got["training_step"]["flops"] == counts.training_flops
    assert got["memory_bytes"]["forward"]["total"] == counts.inference.total
    assert (got["memory_bytes"]["training_step"] is None) == (counts.training is None)
    if counts.training is not None:
        assert got["memory_bytes"]["training_step"]["total"] == counts.training.total
    assert {name: fit["largest"] for name, fit in got["fits"].items()} == {
        name: fit.largest for name, fit in counts.fits.items()
    }
    if counts.time is not None:
        assert got["time"]["forward"]["seconds"] == counts.time.prefill.seconds
    assert got != found(capsys, "mistral.json")


def test_source_is_of_the_encoder(here, capsys):
    got = found(capsys, "t5.json", "--length", "7", "--source", "19")
    assert got["forward"]["flops"] == hw.cost(config("t5"), length=7, source_length=19).flops


@pytest.mark.parametrize(
    ("line", "sizes"),
    [
        ("--kv-heads 2", {"kv_heads": 2}), ("--d-head 7", {"d_head": 7}),
        ("--d-ff 53", {"d_ff": 53}), ("--window 5", {"window": 5}),
        ("--context 31", {"context": 31}), ("--gated", {"gated": True}),
        ("--experts 5", {"experts": 5}), ("--bias", {"bias": True}), ("--tied", {"tied": True}),
        ("--experts 5 --experts-used 2", {"experts": 5, "experts_used": 2}),
        ("--experts 5 --shared-experts 3", {"experts": 5, "shared_experts": 3}),
        ("--encoder", {"causal": False}),
    ],
)  # fmt: skip
def test_explicit_sizes(here, capsys, line, sizes):
    from headwise.cost.explicit import explicit

    got = found(capsys, *EXPLICIT, *line.split(), "--pairs", "visible")
    parts = explicit(d_model=40, layers=3, heads=4, vocab=97, **sizes)
    counts = hw.cost(parts, pairs="visible")
    assert got["parameters"]["total"] == counts.parameters
    assert got["forward"]["flops"] == counts.flops
    assert got != found(capsys, *EXPLICIT, "--pairs", "visible")


def test_utilisation(here, capsys):
    out = said(
        capsys, "big.json", "--on", "h100-sxm", "--tokens-per-second", "39000", "--devices", "3"
    )
    share = hw.cost(BIG, length=8192, attention="materialised").training_flops / 8192 * 39_000
    assert f"MFU, exact {_si_of(share / 39_000)} {share / (3 * 989.4e12):.1%}" in out


def _si_of(value):
    from headwise.report.cost_facts import si

    return si(value)


def test_a_machine_of_ones_own(here, capsys, monkeypatch):
    monkeypatch.setattr(machine, "calibrate", lambda progress: MEASURED)
    assert run(["cost", "gpt2.json", "--calibrate", "--save-machine", "mine.toml"]) == 0
    assert capsys.readouterr().out.endswith("wrote mine.toml\n")
    assert hardware_from(here / "mine.toml").peak("bfloat16") == 10**12
    again = found(capsys, "gpt2.json", "--on", "mine.toml")
    assert again["time"]["machine"] == "this-machine"
    assert again["time"]["forward"] == found(capsys, "gpt2.json", "--calibrate")["time"]["forward"]


def test_nothing_is_measured_for_a_model_that_cannot_be_read(here, capsys, monkeypatch):
    monkeypatch.setattr(machine, "calibrate", lambda progress: pytest.fail("measured"))
    line = "none.json --calibrate --save-machine m.toml"
    assert run(["cost", *line.split()]) == 2
    assert names(here) == []


def test_beyond_the_trained_context_is_said(here, capsys):
    assert "beyond the 61 tokens it was trained for" in said(capsys, "gpt2.json", "--length", "62")
    assert "beyond" not in said(capsys, "gpt2.json", "--length", "61")


# ------------------------------------------------------------------ --verify


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral", "bert", "t5", "vit"])
def test_verify_counts_the_same(here, capsys, kind):
    got = found(capsys, f"{kind}.json", "--length", "17", "--verify")["counted"]
    assert got["equal"]
    assert got["forward"] == got["counted_forward"]


def test_verify_in_the_terminal(here, capsys):
    out = said(capsys, "gpt2.json", "--length", "17", "--verify")
    assert "Counted on the meta device: GPT2LMHeadModel, 1 × 17" in out
    assert out.count(" equal") == 3


def test_verify_fails_where_the_counts_differ(here, capsys, monkeypatch):
    def wrong(parts, workload):
        right = counts(parts, workload)
        lines = (
            replace(right.lines[0], parameters=right.lines[0].parameters + 1),
            *right.lines[1:],
        )
        return replace(right, lines=lines)

    counts = counted.count
    monkeypatch.setattr(counted, "count", wrong)
    assert run(["cost", "gpt2.json", "--length", "17", "--verify"]) == 2
    assert "differs by -1" in capsys.readouterr().out
    assert run(["cost", "gpt2.json", "--length", "17", "--verify", "--json", "-q"]) == 2
    assert not json.loads(capsys.readouterr().out)["counted"]["equal"]


def test_markup_in_a_name_is_text(here, capsys):
    (here / "[bold]x").mkdir()
    write(here / "[bold]x", config=config("gpt2"))
    assert "[bold]x/config.json" in said(capsys, "[bold]x")
    assert "[bold]x gpt2" in said(capsys, "[bold]x", "gpt2.json")


def test_names_do_not_reach_the_terminal_as_control_characters(here, capsys):
    (here / "x\x1b[31m").mkdir()
    write(here / "x\x1b[31m", config=config("clip"))  # whose file is named in its notes
    assert "x\ufffd[31m/config.json" in said(capsys, "x\x1b[31m")
    assert "\x1b" not in said(capsys, "x\x1b[31m")
    assert "\x1b" not in said(capsys, "x\x1b[31m", "gpt2.json")


def test_torch_is_not_needed(here, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert found(capsys, "trillion.json", "--on", "h100-sxm", "--out", "p.html")["time"]
