"""Scores of heads equal those read off the dense matrices, and planted heads get their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model

from headwise.circuits.behaviour import BEHAVIOURS, HeadLabels
from headwise.circuits.labels import repeated_labels, text_labels
from headwise.circuits.repeated_tokens import Repeated, repeated_tokens
from headwise.errors import OptionError
from headwise.observation.attach import observe
from headwise.observation.loading import wrap_model
from headwise.report.rules import rules
from headwise.results.thresholds import THRESHOLDS
from tests.observation.own_models import KINDS, definitions, own
from tests.observation.tiny_models import build, tokenizer
from tests.tolerance import UNIT, Tolerance

PERIOD, COPIES, SEEDS = 11, 3, (2, 5)
LENGTH = PERIOD * COPIES


def reference(weights: Tensor, front: int, role: str) -> dict[str, Tensor]:
    """The scores by their definitions, from ``batch head query key``, one loop per row."""
    a = weights.double()
    rows: dict[str, list[Tensor]] = {}
    for i in range(LENGTH):
        at = front + i
        if i >= 1:
            rows.setdefault("previous_token", []).append(a[:, :, at, at - 1])
        if role == "encoder":
            if i + 1 < LENGTH:
                rows.setdefault("next_token", []).append(a[:, :, at, at + 1])
            same = [front + j for j in range(LENGTH) if j != i and (i - j) % PERIOD == 0]
            rows.setdefault("duplicate_token", []).append(a[:, :, at, same].sum(-1))
        elif i >= PERIOD:
            rows.setdefault("induction", []).append(a[:, :, at, at - PERIOD + 1])
            rows.setdefault("duplicate_token", []).append(a[:, :, at, at - PERIOD])
            after = [front + j + 1 for j in range(i % PERIOD, i, PERIOD)]
            rows.setdefault("induction_all", []).append(a[:, :, at, after].sum(-1))
    return {name: torch.stack(each).mean((0, 1)) for name, each in rows.items()}


def reach_of(model: nn.Module, run: Any) -> float:
    """The largest bound on a logit in any layer."""
    found = [0.0]

    def each(module: str, call: Any, piece: Any, statistics: Any) -> None:
        bias = call.bias if isinstance(call.bias, Tensor) else None
        found.append(Tolerance.of(call.q, call.k, call.scale, bias, call.sinks).reach)

    with observe(model, stream=False, each=each), torch.no_grad():
        run()
    return max(found)


def check(found: HeadLabels, dense: list[Tensor], given: Repeated, unit: float, reach: float):
    # A weight has the relative error 2ε (tests/tolerance.py), on both sides; means keep it. The
    # ALiBi and rotary terms count into the reach by the room of the logit's bound.
    tolerance = 2 * 2 * 16 * unit * (1 + reach)
    for layer, weights in zip(found.layers, dense, strict=True):
        want = reference(weights, given.before(layer.role), layer.role)
        for name, score in want.items():
            assert torch.allclose(layer.scores[name], score, rtol=tolerance, atol=tolerance), name
        assert layer.rows["previous_token"] == (LENGTH - 1) * len(SEEDS)
        assert set(want) | {"sink", "distance"} == set(layer.scores)  # no other is invented


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "encoder-decoder"])
def test_own_models_score_as_their_matrices_say(kind):
    model = own(kind)
    given = repeated_tokens(wrap_model(model), period=PERIOD, copies=COPIES, seeds=SEEDS)
    ids = torch.stack([document.ids for document in given.documents])
    dense = definitions(model, lambda: model.hidden(ids))
    found = repeated_labels(model, period=PERIOD, copies=COPIES, seeds=SEEDS)
    reach = reach_of(model, lambda: model.hidden(ids))
    check(found, dense, given, UNIT[torch.float32], reach)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "opt", "bert"])
def test_transformers_models_score_as_their_matrices_say(architecture):
    head = "masked" if architecture == "bert" else "causal"
    model = build(architecture, head, attn_implementation="eager")
    loaded = wrap_model(model, tokenizer(around=True))
    given = repeated_tokens(loaded, period=PERIOD, copies=COPIES, seeds=SEEDS)
    ids = torch.stack([document.ids for document in given.documents])
    assert given.front == 1
    assert ids.shape[1] == LENGTH + 2  # <bos> … <eos>
    with torch.no_grad():
        dense = list(model(input_ids=ids, output_attentions=True).attentions)
    found = repeated_labels(loaded, period=PERIOD, copies=COPIES, seeds=SEEDS)
    check(found, dense, given, UNIT[torch.float32], reach_of(model, lambda: model(input_ids=ids)))


def test_an_encoder_decoder_is_scored_in_both_stacks_and_not_across():
    model = build("t5", "seq2seq", attn_implementation="eager")
    loaded = wrap_model(model)
    given = repeated_tokens(loaded, period=PERIOD, copies=COPIES, seeds=SEEDS)
    source = torch.stack([document.ids for document in given.documents])
    target = torch.stack([document.target for document in given.documents])
    assert (given.before("encoder"), given.before("decoder")) == (0, 1)

    def run(**more: Any) -> Any:
        return model(input_ids=source, decoder_input_ids=target, **more)

    with torch.no_grad():
        out = run(output_attentions=True)
    found = repeated_labels(loaded, period=PERIOD, copies=COPIES, seeds=SEEDS)
    assert [layer.role for layer in found.layers] == ["encoder"] * 2 + ["decoder"] * 2
    dense = [*out.encoder_attentions, *out.decoder_attentions]
    check(found, dense, given, UNIT[torch.float32], reach_of(model, run))


def planted() -> GPT2Model:
    """One layer, four heads of 64 numbers: positions are unit vectors, the MLP and values are 0.

    Head 0 reads position i-1, head 1 position i-T+1, head 2 position i-T, head 3 nothing.
    """
    width = 64
    config = GPT2Config(
        n_embd=4 * width, n_head=4, n_layer=1, n_positions=4 * width, vocab_size=31,
        attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2Model(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.wpe.weight[:, :].copy_(torch.eye(4 * width))
        block = model.h[0]
        block.ln_1.weight.fill_(1.0)
        for head, back in enumerate((1, PERIOD - 1, PERIOD)):
            for i in range(width):
                block.attn.c_attn.weight[i, 4 * width + head * width + i] = 1.0  # key e_i
                if i >= back:
                    block.attn.c_attn.weight[i, head * width + i - back] = 3.0  # query e_(i-back)
    return model


def test_planted_heads_get_their_names_and_a_uniform_head_the_score_of_chance():
    found = repeated_labels(planted(), period=PERIOD, copies=COPIES, seeds=SEEDS)
    assert found.heads("previous_token") == ((0, 0),)
    assert found.heads("induction") == ((0, 1),)
    assert found.heads("duplicate_token") == ((0, 2),)
    layer = found.layers[0]
    assert float(layer.scores["induction"][1]) > 0.99
    for name in ("previous_token", "induction", "duplicate_token", "induction_all"):
        # head 3 has logits of exactly 0: only the exponential and the logarithm round
        bound = 16 * UNIT[torch.float32]
        assert float(layer.scores[name][3]) == pytest.approx(layer.uniform[name], rel=bound)
        first = 1 if name == "previous_token" else PERIOD
        picked = [
            (i // PERIOD if name == "induction_all" else 1) / (i + 1) for i in range(first, LENGTH)
        ]
        assert layer.uniform[name] == pytest.approx(sum(picked) / len(picked), rel=bound)


def test_the_wrong_period_names_no_induction_head():
    found = repeated_labels(planted(), period=PERIOD + 2, copies=COPIES, seeds=SEEDS)
    assert found.heads("previous_token") == ((0, 0),)
    assert found.heads("induction") == found.heads("duplicate_token") == ()


def test_tokens_are_distinct_ordinary_and_repeat():
    loaded = wrap_model(build("llama"), tokenizer())
    given = repeated_tokens(loaded, period=13, copies=5, seeds=(0, 1))
    special = set(loaded.tokenizer.all_special_ids)
    for document in given.documents:
        first = document.ids[:13]
        assert len(set(first.tolist())) == 13
        assert not special & set(document.ids.tolist())
        assert torch.equal(document.ids, first.repeat(5))
    assert not torch.equal(given.documents[0].ids, given.documents[1].ids)
    everything = repeated_tokens(loaded, period=30, copies=2, seeds=range(60)).documents
    drawn = set(torch.cat([document.ids for document in everything]).tolist())
    assert max(drawn) < len(loaded.tokenizer) < loaded.driver.vocabulary


def test_spread_is_between_seeds_and_needs_two():
    model = build("llama")
    one = repeated_labels(model, period=PERIOD, copies=COPIES, seeds=(3,))
    two = repeated_labels(model, period=PERIOD, copies=COPIES, seeds=(4,))
    both = repeated_labels(model, period=PERIOD, copies=COPIES, seeds=(3, 4))
    assert one.layers[0].spread == {}
    for a, b, layer in zip(one.layers, two.layers, both.layers, strict=True):
        pair = torch.stack((a.scores["induction"], b.scores["induction"]))
        # batches of one and of two round apart: a weight has the relative error 2ε on each side
        bound = 4 * 16 * UNIT[torch.float32] * (1 + 64)
        assert torch.allclose(layer.scores["induction"], pair.mean(0), rtol=bound, atol=bound)
        assert torch.allclose(layer.spread["induction"], pair.std(0), rtol=bound, atol=bound)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"period": 1}, "the period is 1; allowed: 2 or more"),
        ({"copies": 1}, "the number of copies is 1; allowed: 2 or more"),
        ({"seeds": ()}, "the number of seeds is 0; allowed: 1 or more"),
        ({"period": 300}, "300 distinct tokens"),
        ({"period": 50}, "reads at most 97"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(options, says):
    with pytest.raises(OptionError, match=says) as caught:
        repeated_labels(build("llama"), **options)
    assert "\n" not in str(caught.value)


def test_an_unknown_label_is_refused():
    found = repeated_labels(build("llama"), period=3, copies=2, seeds=(0,))
    with pytest.raises(OptionError, match="no label is called 'distance'; allowed: previous_token"):
        found.heads("distance")


def test_labels_of_a_text_are_those_of_its_scan():
    model = build("llama", max_position_embeddings=211)
    ids = torch.randint(4, 250, (1, 149), generator=torch.Generator().manual_seed(3))
    with observe(model) as scan, torch.no_grad():
        model(input_ids=ids)
    found = text_labels(scan)
    for layer, record in zip(found.layers, scan.record.layers, strict=True):
        assert torch.equal(layer.scores["previous_token"], record.values["previous_mass"].double())
        # bands 0, 1, 2-3, 4-7, 8-15 are nearer than 16 tokens
        assert torch.equal(layer.scores["local"], record.bands[:, :5].sum(1))
        assert set(layer.scores) == {"previous_token", "sink", "distance", "local"}
    with observe(model) as short, torch.no_grad():
        model(input_ids=ids[:, :127])
    assert "local" not in text_labels(short).layers[0].scores


def test_one_table_of_thresholds():
    """The findings and the labels of one role have the same threshold, from one place."""
    of_rules = {rule.kind: rule.threshold for rule in rules()}
    for name, kind in (
        ("previous_token", "previous_token_heads"),
        ("local", "local_heads"),
        ("sink", "sinks"),
    ):
        assert BEHAVIOURS[name].threshold == of_rules[kind] == THRESHOLDS[kind]
