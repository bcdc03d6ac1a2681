"""Alarms: silent on healthy runs, raised by planted faults at their step and place."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from headwise.models import Architecture, build, decoder_sizes
from headwise.models.embedded import embedded_folder
from headwise.monitoring import remedies
from headwise.monitoring.alarm_rules import SEVERITIES, AlarmRule, alarm_rules
from headwise.monitoring.alarms import Alarm, Watch, alarms
from headwise.monitoring.history import History, block_of, straight
from headwise.monitoring.monitor import Monitor
from headwise.monitoring.record import LayerRecord, StepRecord, read_run
from headwise.monitoring.signs import QUANTITIES

ENTROPY = "entropy_without_sink_fraction"
DEAD = "dead_rows_not_sink"


def record(
    step: int,
    *,
    weights: dict[str, dict[str, float]] | None = None,
    stream: dict[str, float] | None = None,
    non_finite: str = "",
    loss: float | None = None,
    **figures: dict[str, list[float]],
) -> StepRecord:
    """``figures``: name → module → a number for each head."""
    modules = dict.fromkeys(module for each in figures.values() for module in each)
    layers = tuple(
        LayerRecord(
            module=module, number=i, role="self",
            figures={name: each[module] for name, each in figures.items() if module in each},
        )
        for i, module in enumerate(modules)
    )  # fmt: skip
    # Heads are counted by their logits.
    for layer in layers:
        layer.figures.setdefault("max_logit", [1.0] * len(next(iter(layer.figures.values()))))
    return StepRecord(
        step=step, time=0.0, layers=layers, weights=weights or {}, non_finite=non_finite,
        stream={path: {"rms": rms} for path, rms in (stream or {}).items()},
        values={} if loss is None else {"loss": loss},
    )  # fmt: skip


def told(records: list[StepRecord], **more: Any) -> list[tuple[str, int, str]]:
    return [(a.kind, a.step, a.severity) for a in alarms(records, **more)]


# ----------------------------------------------------------------------------------- the table


def test_the_table_is_whole():
    rules = alarm_rules()
    assert {rule.quantity for rule in rules} == set(QUANTITIES)
    assert len({rule.kind for rule in rules}) == len(rules)
    for rule in rules:
        words = {"value": "1", "threshold": "2", "place": "3", "count": 4, "forecast": "5"}
        assert rule.sentence.format(**words) != rule.sentence or rule.kind == "none"
        assert all((rule.title, rule.source, rule.meaning, rule.remedy))
        if "arXiv" not in rule.source:
            assert "ours" in rule.source or "arithmetic" in rule.source
        for name in re.findall(r"remedies\.(\w+)", rule.remedy):
            assert name in remedies.__all__
    sources = {rule.kind: rule.source for rule in rules}
    assert "2507.20534" in sources["max_logit_100"]
    assert "2309.14322" in sources["max_logit_1000"]
    assert "2309.14322" in sources["max_logit_10000"]


def test_a_broken_row_is_noticed():
    row: dict[str, Any] = {
        "kind": "a", "title": "b", "quantity": "max_logit", "threshold": 1.0, "sentence": "",
        "source": "", "meaning": "", "remedy": "",
    }  # fmt: skip
    assert AlarmRule(**row, levels={"note": 1.0, "bad": 2.0}).severity(3.0) == "bad"
    for levels in ({}, {"odd": 1.0}, {"bad": 1.0, "note": 2.0}, {"note": 2.0, "bad": 1.0}):
        with pytest.raises(AssertionError):
            AlarmRule(**row, levels=levels)


# -------------------------------------------------------------------------------------- logits


def test_fixed_thresholds_name_the_first_step_layer_and_head():
    values = {1: 3.0, 2: 99.9, 3: 100.0, 4: 400.0, 5: 1000.0, 6: 10000.0, 7: 12000.0}
    records = [
        record(step, max_logit={"a": [1.0, 2.0], "b": [0.5, value]})
        for step, value in values.items()
    ]
    fixed = [a for a in alarms(records) if a.kind.startswith("max_logit")]
    assert [(a.kind, a.step, a.severity) for a in fixed] == [
        ("max_logit_100", 3, "watch"),
        ("max_logit_1000", 5, "bad"),
        ("max_logit_10000", 6, "bad"),
    ]
    assert {(a.module, a.head, a.count) for a in fixed} == {("b", 1, 1)}
    assert "b head 1 is 1,000" in fixed[1].sentence


def test_the_worst_head_of_each_layer_is_named():
    found = alarms([record(1, max_logit={"a": [150.0, 300.0, 7.0], "b": [120.0]})])
    assert [(a.module, a.head, a.count, a.value) for a in found] == [
        ("a", 1, 2, 300.0),
        ("b", 0, 1, 120.0),
    ]


def growing(start: float, factor: float, count: int, every: int = 10) -> list[StepRecord]:
    return [
        record((i + 1) * every, max_logit={"a": [2.0, start * factor**i]}) for i in range(count)
    ]


def test_a_trend_tells_when_it_crosses():
    """25 · 1.15^i at step 10 (i + 1): 100 is crossed at i = ln 4 / ln 1.15 = 9.92, step 109.2."""
    [found] = [a for a in alarms(growing(25.0, 1.15, 8)) if a.kind == "logit_growth"]
    assert (found.step, found.module, found.head) == (80, "a", 1)
    assert found.forecast == math.ceil(10 * (math.log(4) / math.log(1.15) + 1))
    assert found.value == pytest.approx(1.15**7)


def test_a_runaway_tells_when_it_crosses_10_000():
    kinds = told(growing(110.0, 1.2, 8))
    assert ("logit_runaway", 80, "bad") in kinds
    assert "logit_growth" not in {kind for kind, *_ in kinds}


@pytest.mark.parametrize(
    "values",
    [
        [25 * 1.15**i for i in range(7)],  # too few records
        [2 * 1.15**i for i in range(8)],  # far below
        [30 * 1.02**i for i in range(8)],  # far away
        [40 * 1.15 ** (-i) for i in range(8)],  # falling
        [90 - 60 * 0.6**i for i in range(8)],  # slowing down
        [60 + 30 * (-1) ** i + i for i in range(8)],  # no line
        [math.nan] * 8,
        [-math.inf] * 8,
    ],
)
def test_what_is_no_trend(values):
    records = [record(10 * i + 10, max_logit={"a": [v]}) for i, v in enumerate(values)]
    assert told(records) == []


def test_a_jump_is_told_below_100():
    values = [0.9, 1.0, 1.1, 1.0, 1.2, 50.0]
    records = [record(i, max_logit={"a": [1.0, v]}) for i, v in enumerate(values, 1)]
    [found] = alarms(records)
    assert (found.kind, found.step, found.head) == ("logit_jump", 6, 1)
    assert found.value == pytest.approx(50.0)
    early = [record(i, max_logit={"a": [v]}) for i, v in enumerate([0.9, 50.0], 1)]
    small = [record(i, max_logit={"a": [v / 3]}) for i, v in enumerate(values, 1)]
    assert told(early) == told(small) == []


# ---------------------------------------------------------------------------- entropy, dead rows


def by_head(name: str, rows: list[list[float]]) -> list[StepRecord]:
    return [record(i, **{name: {"a": row}}) for i, row in enumerate(rows, 1)]


def test_collapse_is_many_heads_that_have_fallen():
    high, low = [0.6] * 10, [0.01] * 3 + [0.6] * 7
    [found] = alarms(by_head(ENTROPY, [high] * 6 + [low] * 3))
    assert (found.kind, found.step, found.severity) == ("entropy_collapse", 7, "watch")
    assert found.count == 3
    assert found.value == pytest.approx(0.3)
    assert "30 % of the heads" in found.sentence
    worse = [0.01] * 6 + [0.6] * 4
    kinds = told(by_head(ENTROPY, [high] * 6 + [low] * 3 + [worse] * 2))
    assert kinds == [("entropy_collapse", 7, "watch"), ("entropy_collapse", 10, "bad")]


@pytest.mark.parametrize(
    "rows",
    [
        [[0.01] * 10] * 9,  # low from the first: never fell
        [[0.6] * 10] * 6 + [[0.01] * 2 + [0.6] * 8] * 3,  # no more than 20 %
        [[0.6] * 4] * 6 + [[0.01] * 2 + [0.6] * 2] * 3,  # two heads
        [[0.6] * 10] * 6 + [[0.3] * 10] * 3,  # fallen, and not low
        [[0.6] * 10] * 6 + [[0.01] * 10],  # one record
        [[0.6] * 10] * 6 + [[0.01] * 10] + [[0.6] * 10] * 2,
        [[math.nan] * 10] * 9,
    ],
)
def test_what_is_no_collapse(rows):
    assert told(by_head(ENTROPY, rows)) == []


def test_raw_entropy_alone_is_no_alarm():
    """All on the sink: raw entropy 0, what is left outside it spread as before."""
    rows = [[3.0] * 10] * 6 + [[0.0] * 10] * 4
    records = [
        record(i, entropy={"a": row}, **{ENTROPY: {"a": [0.6] * 10}})
        for i, row in enumerate(rows, 1)
    ]
    assert told(records) == []


def test_dead_rows_that_rise():
    found = told(by_head(DEAD, [[0.1] * 10] * 6 + [[0.9] * 3 + [0.1] * 7] * 3))
    assert found == [("dead_rows", 7, "watch")]
    assert told(by_head(DEAD, [[0.9] * 10] * 9)) == []  # as they were from the first
    assert told(by_head(DEAD, [[0.1] * 10] * 6 + [[0.9] + [0.1] * 9] * 3)) == []


# ----------------------------------------------------------------------------------- gradients


def gradients(step: int, values: list[float], name: str = "query.weight") -> StepRecord:
    return record(
        step, weights={f"blocks.{i}.{name}": {"gradient": v} for i, v in enumerate(values)}
    )


@pytest.mark.parametrize(
    ("values", "kind", "place"),
    [
        ([1.0, 2.0, 0.0, 1.5], "vanishing_gradient", "blocks.2.query.weight"),
        ([1.0, 0.009, 2.0, 1.5], "vanishing_gradient", "blocks.1.query.weight"),
        ([1.0, 2.0, 190.0, 1.5], "exploding_gradient", "blocks.2.query.weight"),
        ([1.0, 0.001], "vanishing_gradient", "blocks.1.query.weight"),
    ],
)
def test_a_layer_against_the_others(values, kind, place):
    found = alarms([gradients(step, values) for step in (1, 2, 3)])
    assert [(a.kind, a.step, a.module, a.severity) for a in found] == [(kind, 1, place, "bad")]


def test_of_two_layers_the_one_that_changed_is_named():
    records = [gradients(step, [1.0, 1.0]) for step in range(1, 7)]
    low = alarms([*records, *(gradients(step, [1.0, 1e-3]) for step in (7, 8))])
    high = alarms([*records, *(gradients(step, [1.0, 1e3]) for step in (7, 8))])
    assert [(a.kind, a.module) for a in low] == [("vanishing_gradient", "blocks.1.query.weight")]
    assert [(a.kind, a.module) for a in high if a.kind != "gradient_spike"] == [
        ("exploding_gradient", "blocks.1.query.weight")
    ]


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ([1.0, 0.02, 90.0], "query.weight"),
        ([0.0, 0.0, 0.0], "query.weight"),  # LoRA's A in its first step
        ([0.0, 0.0, 1.0], "query.weight"),
        ([1.0, math.nan, 1.0], "query.weight"),
        ([1.0, 0.0, 1.0], "key.bias"),
        ([1.0, 0.0, 1.0], "experts.3.up.weight"),
    ],
)
def test_gradients_that_are_no_alarm(values, name):
    assert told([gradients(step, values, name) for step in (1, 2, 3)]) == []


def layers_of(step: int, query: list[float], value: list[float]) -> StepRecord:
    """Gradients of the queries and of the values of each block."""
    return record(
        step,
        weights={
            f"blocks.{i}.{name}.weight": {"gradient": norm}
            for name, norms in (("query", query), ("value", value))
            for i, norm in enumerate(norms)
        },
    )


def test_queries_hardly_matter_while_attention_is_uniform():
    # At the start the gradients of W_Q are tiny, and differ by hundreds between blocks; what is
    # learned is in the other weights.
    even = [1.0, 1.1, 0.9, 1.0]
    first = [layers_of(step, [3e-2, 1e-4, 1e-4, 1e-4], even) for step in range(1, 9)]
    assert told(first) == []
    last = [layers_of(step, [1e-7, 1e-4, 1e-4, 1e-4], [1e-9, 1.1, 0.9, 1.0]) for step in range(9)]
    assert {kind for kind, *_ in told(last)} == {"vanishing_gradient"}
    one = [layers_of(step, [1e-4, 1e-4, 1e-4, 1e-4], [300.0, 1.1, 0.9, 1.0]) for step in range(9)]
    assert {kind for kind, *_ in told(one)} == {"exploding_gradient"}


def test_one_alarm_for_a_block():
    weights = {
        f"blocks.{i}.{name}.weight": {"gradient": 1.0 if i != 1 else 1e-5}
        for i in range(3)
        for name in ("query", "key", "value")
    }
    [found] = alarms([record(step, weights=weights) for step in (1, 2)])
    assert found.count == 3
    assert block_of(found.module) == "blocks.1"


def test_spikes_are_told_each_time():
    totals = [1.0] * 9 + [30.0] + [1.0] * 4 + [300.0] + [1.0]
    found = alarms([gradients(i, [v, v, v]) for i, v in enumerate(totals, 1)])
    assert [(a.kind, a.step, a.severity) for a in found] == [
        ("gradient_spike", 10, "watch"),
        ("gradient_spike", 15, "bad"),
    ]
    early = [gradients(i, [v, v, v]) for i, v in enumerate([1.0, 1.0, 30.0, 1.0], 1)]
    assert told(early) == []


def test_gradients_near_the_eps_of_adam():
    """A norm of 1e-7 over 400 entries is an rms of 5e-9."""
    records = [
        record(step, weights={"blocks.0.a.weight": {"gradient": 1e-7}}) for step in range(1, 7)
    ]
    [found] = alarms(records, sizes={"blocks.0.a.weight": 400})
    assert (found.kind, found.step, found.severity) == ("gradient_near_eps", 3, "note")
    assert found.value == pytest.approx(5e-9)
    assert told(records, sizes={"blocks.0.a.weight": 99}) == []
    assert told(records) == []


def updates(step: int, values: list[float]) -> StepRecord:
    return record(
        step,
        weights={
            f"blocks.{i}.a.weight": {"gradient": 1.0, "weight": 2.0, "update": 2.0 * v}
            for i, v in enumerate(values)
        },
    )


def test_updates_out_of_range_are_notes():
    large = [updates(step, [1e-3, 0.3, 1e-3]) for step in range(1, 13)]
    small = [updates(step, [1e-3, 1e-6, 1e-3]) for step in range(1, 13)]
    assert told(large) == [("update_too_large", 9, "note")]
    assert told(small) == [("update_too_small", 9, "note")]
    assert told(large[:10]) == []  # the first updates are large against weights near zero
    assert told([updates(step, [1e-7] * 3) for step in range(1, 13)]) == []  # the rate is low


def test_the_stream_grows():
    rms = [3.0] * 9 + [45.0] * 2
    found = alarms([record(i, stream={"blocks.1": v}) for i, v in enumerate(rms, 1)])
    assert [(a.kind, a.step, a.module) for a in found] == [("stream_growth", 10, "blocks.1")]
    assert told([record(i, stream={"b": v / 10}) for i, v in enumerate(rms, 1)]) == []


def test_non_finite_is_named_once():
    found = alarms([record(1), record(2, non_finite="the keys of a"), record(3, non_finite="x")])
    assert [(a.step, a.module, a.severity) for a in found] == [(2, "the keys of a", "bad")]
    for loss in (math.nan, math.inf):
        [found_loss] = alarms([record(1, loss=2.0), record(2, loss=loss)])
        assert (found_loss.module, found_loss.step) == ("the loss", 2)


# --------------------------------------------------------------------------------- what is held


def test_the_history_forgets_but_peaks_stay():
    history = History(window=3)
    for i, value in enumerate([9.0, 2.0, 3.0, 4.0], 1):
        history.add(record(i, max_logit={"a": [value, 1.0]}))
    assert history.heads("max_logit")[:, 0].tolist() == [2.0, 3.0, 4.0]
    assert history.peaks["max_logit"].tolist() == [9.0, 1.0]
    assert history.count == 4


def test_modules_that_come_later_have_no_past():
    history = History()
    history.add(record(1, max_logit={"a": [1.0]}))
    history.add(record(2, max_logit={"a": [2.0], "b": [3.0, 4.0]}))
    history.add(record(3, max_logit={"b": [5.0, 6.0]}))
    table = history.heads("max_logit")
    assert history.places == [("a", 0), ("b", 0), ("b", 1)]
    assert table[2, 1:].tolist() == [5.0, 6.0]
    assert [math.isnan(x) for x in (table[0, 1], table[0, 2], table[2, 0])] == [True] * 3


def test_a_line_is_that_of_least_squares():
    import numpy as np

    steps = np.array([1.0, 2.0, 5.0, 7.0, 11.0])
    values = np.array([[0.3], [0.1], [0.9], [1.4], [1.7]])
    slope, fit = straight(steps, values)
    wanted = np.polyfit(steps, values[:, 0], 1)[0]
    correlation = np.corrcoef(steps, values[:, 0])[0, 1]
    assert slope[0] == pytest.approx(wanted, rel=1e-12)
    assert fit[0] == pytest.approx(correlation**2, rel=1e-12)
    slope, fit = straight(steps, np.full((5, 1), 3.0))
    assert slope[0] == 0.0
    assert math.isnan(fit[0])


def test_the_worst_of_a_record_comes_first():
    watch = Watch()
    found = watch.look(record(1, max_logit={"a": [2000.0]}))
    order = [SEVERITIES.index(a.severity) for a in found]
    assert order == sorted(order)
    assert [a.kind for a in found] == ["max_logit_1000", "max_logit_100"]
    assert found[0].to_json()["kind"] == "max_logit_1000"


# ------------------------------------------------------------------------------------ real runs

Fault = Callable[[Any, int], None]
SMALL = decoder_sizes(
    vocab=61, d_model=24, layers=3, heads=4, d_ff=47, context=64, tied=False
)  # fmt: skip
BLOCK = "decoder.blocks.1"
AT = 20


def train(
    architecture: Architecture,
    steps: int,
    *,
    lr: float = 3e-3,
    warmup: int = 10,
    before: Fault | None = None,
    out: Any = None,
) -> Monitor:
    """Repeated random tokens, AdamW, gradients clipped: a run that trains."""
    model = build(architecture).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    with Monitor(model, every=1, spectra=0, out=out) as monitor:
        for step in range(1, steps + 1):
            optimizer.param_groups[0]["lr"] = lr * min(1.0, step / warmup)
            generator = torch.Generator().manual_seed(step)
            part = torch.randint(61, (4, 13), generator=generator)
            ids = part.repeat(1, 2)
            if before is not None:
                before(model, step)
            logits = model(ids)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            monitor.log(loss=loss.item())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return monitor


def kinds(found: list[Alarm]) -> set[str]:
    return {alarm.kind for alarm in found}


@pytest.mark.parametrize("seed_of", ["pre", "post", "sandwich"])
def test_a_healthy_run_is_silent(seed_of):
    architecture = decoder_sizes(
        vocab=61, d_model=24, layers=3, heads=4, d_ff=47, context=64, placement=seed_of
    )
    monitor = train(architecture, 40)
    assert monitor.alarms == []
    assert monitor.records[-1].values["loss"] < monitor.records[0].values["loss"]


def test_a_healthy_run_of_the_embedded_architecture_is_silent():
    text = (embedded_folder() / "architecture.json").read_text()
    monitor = train(Architecture.from_json(text), 24, lr=1e-3)
    assert monitor.alarms == []


def test_a_head_scaled_50_times():
    def fault(model: Any, step: int) -> None:
        if step == AT:
            with torch.no_grad():
                model.get_submodule(f"{BLOCK}.attention.branch").query.weight[6:12] *= 50

    found = train(SMALL, AT + 4, before=fault).alarms
    first = found[0]
    assert (first.kind, first.step) == ("logit_jump", AT)
    assert (first.module, first.head) == (f"{BLOCK}.attention.branch", 1)


@pytest.mark.parametrize(("factor", "start"), [(0.0, AT), (0.0, 1), (1e-6, AT), (1e-6, 1)])
def test_a_layer_whose_gradient_is_gone(factor, start):
    def fault(model: Any, step: int) -> None:
        if step == start:
            for parameter in model.get_submodule(BLOCK).parameters():
                parameter.register_hook(lambda gradient: factor * gradient)

    found = train(SMALL, AT + 4, before=fault).alarms
    first = next(a for a in found if a.kind == "vanishing_gradient")
    assert first.step == start
    assert block_of(first.module) == BLOCK
    assert kinds(found) <= {"vanishing_gradient", "gradient_near_eps", "update_too_small"}


def test_a_layer_whose_gradient_is_huge():
    def fault(model: Any, step: int) -> None:
        if step == AT:
            for parameter in model.get_submodule(BLOCK).parameters():
                parameter.register_hook(lambda gradient: 1e4 * gradient)

    found = train(SMALL, AT + 4, before=fault).alarms
    first = next(a for a in found if a.kind == "exploding_gradient")
    assert (first.step, block_of(first.module)) == (AT, BLOCK)
    assert "vanishing_gradient" not in kinds(found)


def test_a_nan_is_named():
    def fault(model: Any, step: int) -> None:
        if step == AT:
            with torch.no_grad():
                model.get_submodule(f"{BLOCK}.attention.branch").key.weight[3, 2] = math.nan

    found = train(SMALL, AT + 2, before=fault).alarms
    assert (found[0].kind, found[0].step) == ("non_finite", AT)
    assert f"{BLOCK}.attention.branch" in found[0].module


def test_a_learning_rate_that_is_too_high(tmp_path):
    """Logits are told before 1,000 is reached; online, from records and from the folder alike."""
    monitor = train(SMALL, 40, lr=0.3, warmup=1, out=tmp_path)
    assert {"max_logit_100", "max_logit_1000"} <= kinds(monitor.alarms)
    first = {a.kind: a.step for a in reversed(monitor.alarms)}
    assert first["max_logit_100"] < first["max_logit_1000"]
    sizes = {name: p.numel() for name, p in monitor.model.named_parameters()}
    found = alarms(monitor.records, sizes=sizes)
    assert sorted(map(str, found)) == sorted(map(str, monitor.alarms))
    assert [a.step for a in found] == sorted(a.step for a in found)
    assert alarms(read_run(tmp_path)) == found


def test_on_alarm_is_called():
    model, heard = build(SMALL).train(), []
    with torch.no_grad():
        model.decoder.blocks[0].attention.branch.query.weight.mul_(1e4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Monitor(model, every=1, spectra=0, on_alarm=heard.append) as monitor:
        model(torch.arange(17)[None]).square().mean().backward()
        optimizer.step()
    assert heard == monitor.alarms != []
