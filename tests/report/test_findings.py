"""Every rule fires when its trouble is planted, past its threshold only, and is silent else."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from headwise.report.findings import findings, healthy, to_json, verdict
from headwise.report.quantities import QUANTITIES
from headwise.report.rules import SEVERITIES, rules
from headwise.results.label import to_dataset
from tests.results.synthetic import make_record

LAYERS, HEADS = 5, 3


def healthy_dataset(**options):
    """Every head in the middle of every range, streams and gradients even: nothing to report."""
    dataset = to_dataset(
        make_record(LAYERS, HEADS, 149, unhealthy=False, gradients=True, **options)
    )
    calm = {
        "max_logit": 9.0,
        "dead_rows_not_sink": 0.01,
        "entropy_without_sink_fraction": 0.5,
        "logit_std": 1.1,
        "entropy_fraction": 0.5,
        "sink_mass": 0.1,
        "previous_mass": 0.1,
    }
    for name, value in calm.items():
        dataset[name][:] = value
    dataset["band_mass"][:] = 1.0 / dataset.sizes["band"]
    for name, value in {
        "stream_in_rms": 1.0,
        "stream_out_rms": 1.1,
        "stream_out_rms_first": 1.3,
        "stream_max_abs": 9.0,
        "attention_write_rms": 0.3,
        "mlp_write_rms": 0.4,
    }.items():
        dataset[name][:] = value
    dataset["gradient_norm"][:] = 0.5
    dataset["rows_empty"][:] = 0
    return dataset


def kinds(dataset):
    return [finding.kind for finding in findings(dataset)]


def found(dataset, kind):
    return next(finding for finding in findings(dataset) if finding.kind == kind)


def about(dataset, **facts):
    dataset.attrs["about"] = json.dumps({**json.loads(dataset.attrs["about"]), **facts})


def test_silent_when_healthy_and_says_so():
    dataset = healthy_dataset()
    assert kinds(dataset) == []
    sentences = [fact.sentence for fact in healthy(dataset)]
    assert "no attention logit above 100 (largest 9)" in sentences
    assert verdict([]) == "Nothing stands out: every check is within its threshold."


# rule, variable, one planted number, the same number on the healthy side of the threshold
ONE_HEAD = [
    ("exploding_logits", "max_logit", 100.5, 100.0, "watch"),
    ("exploding_logits", "max_logit", 1000.5, 100.0, "bad"),
    ("saturated_heads", "dead_rows_not_sink", 0.51, 0.5, "note"),
    ("constant_heads", "logit_std", 0.0009, 0.001, "watch"),
    ("sinks", "sink_mass", 0.31, 0.3, "note"),
    ("near_uniform", "entropy_fraction", 0.951, 0.95, "note"),
    ("previous_token_heads", "previous_mass", 0.41, 0.4, "note"),
]


@pytest.mark.parametrize(("kind", "variable", "beyond", "at", "severity"), ONE_HEAD)
def test_one_head(kind, variable, beyond, at, severity):
    dataset = healthy_dataset()
    dataset[variable][3, 1] = at
    assert kind not in kinds(dataset)
    dataset[variable][3, 1] = beyond
    finding = found(dataset, kind)
    assert finding.severity == severity
    assert finding.places == ((3, 1),)
    assert finding.value == beyond
    assert "L3 · H1" in finding.sentence
    assert finding.evidence in dataset
    assert finding.source
    assert finding.meaning
    assert finding.remedy


def test_resting_heads_count_the_learned_sink():
    dataset = healthy_dataset(null_sink=True)
    dataset["null_mass"][:] = 0.0
    dataset["sink_mass"][2, 0] = 0.5
    dataset["null_mass"][2, 0] = 0.49
    assert "resting_heads" not in kinds(dataset)
    dataset["null_mass"][2, 0] = 0.4951
    assert found(dataset, "resting_heads").places == ((2, 0),)


def test_local_heads_need_a_text_long_enough():
    near = healthy_dataset()
    near["band_mass"][1, 2] = 0.0
    near["band_mass"][1, 2, :5] = [0.1, 0.2, 0.2, 0.2, 0.11]  # bands below 16 tokens
    assert found(near, "local_heads").places == ((1, 2),)
    near["band_mass"][1, 2, 5] = 0.11
    near["band_mass"][1, 2, 4] = 0.0
    assert "local_heads" not in kinds(near)
    short = to_dataset(make_record(LAYERS, HEADS, 127))
    assert "local_heads" not in kinds(short)


@pytest.mark.parametrize(("planted", "severity"), [(3, None), (4, "watch"), (15, "watch")])
def test_entropy_collapse_needs_a_fifth_of_the_heads(planted, severity):
    dataset = healthy_dataset()
    values = dataset["entropy_without_sink_fraction"].values.ravel()
    values[:planted] = 0.049
    dataset["entropy_without_sink_fraction"].values[:] = values.reshape(LAYERS, HEADS)
    if severity is None:
        assert "entropy_collapse" not in kinds(dataset)
    else:
        assert found(dataset, "entropy_collapse").severity == severity
        assert f"{planted} of 15 heads" in found(dataset, "entropy_collapse").sentence


BLOCKS = [
    ("massive_first_token", "stream_out_rms_first", 11.1, 10.9, "note"),
    ("silent_attention", "attention_write_rms", 0.0009, 0.0011, "watch"),
    ("silent_mlp", "mlp_write_rms", 0.0, 0.0011, "watch"),
    ("half_precision_range", "stream_max_abs", 33000.0, 32752.0, "note"),
    ("half_precision_range", "stream_max_abs", 49200.0, 32752.0, "watch"),
    ("half_precision_range", "stream_max_abs", 70000.0, 32752.0, "bad"),
]


@pytest.mark.parametrize(("kind", "variable", "beyond", "at", "severity"), BLOCKS)
def test_one_block(kind, variable, beyond, at, severity):
    dataset = healthy_dataset()
    dataset[variable][2] = at
    assert kind not in kinds(dataset)
    dataset[variable][2] = beyond
    finding = found(dataset, kind)
    assert finding.severity == severity
    assert finding.places == ((2, None),)


def test_stream_growth():
    dataset = healthy_dataset()
    dataset["stream_out_rms"][-1] = 1000.0
    assert "stream_growth" not in kinds(dataset)
    dataset["stream_out_rms"][-1] = 1001.0
    assert found(dataset, "stream_growth").severity == "note"


def test_gradients():
    dataset = healthy_dataset()
    weight = int(np.flatnonzero(dataset["parameter_block"].values >= 0)[0])
    dataset["gradient_norm"][weight] = 0.5 / 101
    assert found(dataset, "gradient_imbalance").value == pytest.approx(101)
    dataset["gradient_norm"][weight] = 0.5 / 99
    assert "gradient_imbalance" not in kinds(dataset)
    size = float(dataset["gradient_size"][weight])
    dataset["gradient_norm"][weight] = 0.99e-7 * size**0.5
    assert str(dataset["parameter"].values[weight]) in (
        found(dataset, "gradient_near_epsilon").sentence
    )


def test_layers_with_nan_come_first_and_hide_nothing_else():
    dataset = to_dataset(make_record(LAYERS, HEADS, 37, nan_layer=1))
    finding = findings(dataset)[0]
    assert (finding.kind, finding.severity, finding.places) == ("non_finite", "bad", ((1, None),))
    assert "L1" in finding.sentence
    assert "exploding_logits" in kinds(dataset)
    assert "every layer finite" not in [fact.sentence for fact in healthy(dataset)]


def test_facts_of_the_run():
    dataset = healthy_dataset()
    dataset["rows_empty"][3] = 7
    assert found(dataset, "empty_rows").value == 7
    about(dataset, interrupted=True)
    assert found(dataset, "interrupted").severity == "watch"
    about(dataset, rows_measured=11, rows_total=44)
    assert "25%" in found(dataset, "sampled_rows").sentence


def test_no_sinks_only_where_sinks_are_to_be_expected():
    dataset = to_dataset(make_record(8, 8, 37, unhealthy=False))
    dataset["sink_mass"][:] = 0.1
    assert "no_sinks" in kinds(dataset)
    dataset["sink_mass"][5, 5] = 0.31
    assert "no_sinks" not in kinds(dataset)
    few = to_dataset(make_record(7, 9, 37, unhealthy=False))
    few["sink_mass"][:] = 0.1
    assert "no_sinks" not in kinds(few)  # 63 heads: too few to say
    encoder = to_dataset(make_record(8, 8, 37, kind="encoder", unhealthy=False))
    encoder["sink_mass"][:] = 0.1
    assert "no_sinks" not in kinds(encoder)


def test_cross_attention_has_no_sinks_and_no_neighbours():
    dataset = to_dataset(make_record(2, 3, 37, kind="encoder-decoder", unhealthy=False))
    dataset["sink_mass"][:] = 0.0
    dataset["sink_mass"].values[dataset["role"].values == "cross"] = 0.9
    assert "sinks" not in kinds(dataset)


def test_ranked_worst_first():
    dataset = to_dataset(make_record(LAYERS, HEADS, 149, nan_layer=0, sampled=11))
    severities = [SEVERITIES.index(finding.severity) for finding in findings(dataset)]
    assert severities == sorted(severities)
    assert len(set(severities)) > 1


def test_accepts_a_scan_as_well_as_its_dataset():
    class Scan:
        dataset = to_dataset(make_record())

    assert findings(Scan()) == findings(Scan.dataset)


def test_json_holds_no_nan():
    dataset = to_dataset(make_record(LAYERS, HEADS, 37, nan_layer=1, gradients=True))
    result = to_json(dataset, findings(dataset))
    text = json.dumps(result, allow_nan=False)
    assert json.loads(text)["heads"]["entropy"][1] == [None, None, None]
    assert result["verdict"] == verdict(findings(dataset))
    assert result["findings"][0]["kind"] == "non_finite"
    assert len(result["blocks"]["stream_out_rms"]) == LAYERS
    assert result["layers"]["module"][0] == str(dataset["module"].values[0])


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.kind)
def test_the_table_is_complete(rule):
    assert rule.quantity in QUANTITIES
    for text in (rule.title, rule.sentence, rule.source, rule.meaning, rule.remedy):
        assert text
    assert rule.severity(-1.0) == "healthy"
    assert rule.severity(float("inf")) == list(rule.levels)[-1]


def test_every_rule_is_planted_above():
    tested = {case[0] for case in (*ONE_HEAD, *BLOCKS)} | {
        "resting_heads",
        "local_heads",
        "entropy_collapse",
        "stream_growth",
        "gradient_imbalance",
        "gradient_near_epsilon",
        "non_finite",
        "empty_rows",
        "interrupted",
        "sampled_rows",
        "no_sinks",
    }
    assert tested == {rule.kind for rule in rules()}


def test_a_record_of_one_head_has_sentences_that_read_well():
    record = make_record(1, 1, 37)
    dataset = to_dataset(replace(record, blocks=()))
    for finding in findings(dataset):
        assert "{" not in finding.sentence
        assert finding.sentence.endswith(".")
