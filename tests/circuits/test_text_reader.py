"""What heads do on a text equals what whole matrices and sets of keys found one by one say."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2Model

import headwise as hw
from headwise.circuits.head_weights import head_weights
from headwise.circuits.rotary import band_shares_of_data
from headwise.circuits.same_tokens import groups
from headwise.circuits.text_reader import TextCircuits, TextReader
from headwise.observation.attach import observe
from headwise.observation.loading import wrap_model
from tests.observation.own_models import KINDS, definitions, own
from tests.observation.tiny_models import build
from tests.parity import families
from tests.tolerance import UNIT, Tolerance

ROWS, LENGTH = 2, 41
NAMES = {"decoder": ("induction", "duplicate_token"), "encoder": ("duplicate_token", "next_token")}

Sums = dict[str, tuple[Tensor, float, int]]


def keys_of(name: str, ids: Sequence[int], i: int, role: str) -> list[int]:
    """The keys that a behaviour names for row i of one document."""
    if name == "induction":
        return [j for j in range(1, i + 1) if ids[j - 1] == ids[i]]
    if name == "next_token":
        return [i + 1] if i + 1 < len(ids) else []
    last = len(ids) if role == "encoder" else i
    return [j for j in range(last) if j != i and ids[j] == ids[i]]


def reference(documents: Sequence[tuple[Tensor, list[int]]], role: str) -> Sums:
    """By name: the mean weight by heads, that of chance, and the rows; A ``head row key``.

    A key that A gives no weight in any head is one that the mask hides.
    """
    out: Sums = {}
    for name in NAMES[role]:
        total, chance, rows = torch.zeros(documents[0][0].shape[0], dtype=torch.float64), 0.0, 0
        for a, ids in documents:
            seen = (a > 0).any(0)
            for i in range(len(ids)):
                keys = [j for j in keys_of(name, ids, i, role) if seen[i, j]]
                if keys:
                    total += a[:, i, keys].double().sum(-1)
                    chance += len(keys) / int(seen[i].sum())
                    rows += 1
        out[name] = (total / rows, chance / rows, rows)
    return out


def read(model: Any, run: Any, **options: Any) -> tuple[TextCircuits, float]:
    """What the reader finds, and the largest bound on a logit."""
    reader = TextReader(head_weights(model, validate=False), options.get("heads"))
    reach = [0.0]

    def each(module: str, call: Any, piece: Any, found: Any) -> None:
        bias = call.bias if isinstance(call.bias, Tensor) else None
        reach.append(Tolerance.of(call.q, call.k, call.scale, bias, call.sinks).reach)
        reader.absorb(module, call, piece, found)

    with observe(model, stream=False, each=each, **options) as scan, torch.no_grad():
        run()
    return reader.finish(scan), max(reach)


def check(found: TextCircuits, want: list[Sums], unit: float, reach: float) -> None:
    # A weight has the relative error 2ε (tests/tolerance.py), on both sides; means keep it. ALiBi
    # and relative biases that are functions count into the reach by the room of the logit's bound.
    tolerance = 2 * 2 * 16 * unit * (1 + reach)
    for layer, sums in zip(found.labels.layers, want, strict=True):
        for name, (score, chance, rows) in sums.items():
            assert layer.rows[name] == rows > 0, name
            assert torch.allclose(layer.scores[name], score, rtol=tolerance, atol=tolerance), name
            assert layer.uniform[name] == pytest.approx(chance, rel=16 * UNIT[torch.float64])
        assert set(sums) == set(layer.uniform)


def text(seed: int, length: int = LENGTH, of: int = 7) -> Tensor:
    """A text of few words, so that there are many copies."""
    return torch.randint(4, 4 + of, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "encoder-decoder"])
def test_own_models_score_as_their_matrices_say(kind):
    model = own(kind)
    ids = torch.stack([text(seed) for seed in range(ROWS)])
    dense = definitions(model, lambda: model.hidden(ids))
    found, reach = read(model, lambda: model.hidden(ids))
    role = "encoder" if kind == "encoder" else "decoder"
    want = [reference(list(zip(a, ids.tolist(), strict=True)), role) for a in dense]
    check(found, want, UNIT[torch.float64], reach)
    if kind == "window":  # copies that a window hides are no copies
        rows = [layer.rows["induction"] for layer in found.labels.layers]
        assert rows[0] < rows[2] < rows[1]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "opt", "bert"])
def test_padding_is_no_token(architecture, side):
    more = {"sliding_window": 13} if architecture == "gemma2" else {}
    head = "masked" if architecture == "bert" else "causal"
    model = build(architecture, head, attn_implementation="eager", **more)
    documents = [text(0), text(1, 29)]
    ids, real = torch.zeros(2, LENGTH, dtype=torch.long), torch.zeros(2, LENGTH, dtype=torch.long)
    places = [slice(0, LENGTH), slice(LENGTH - 29, None) if side == "left" else slice(0, 29)]
    for b, place in enumerate(places):
        ids[b, place], real[b, place] = documents[b], 1
    with torch.no_grad():
        dense = model(input_ids=ids, attention_mask=real, output_attentions=True).attentions
    found, reach = read(model, lambda: model(input_ids=ids, attention_mask=real))
    role = "encoder" if architecture == "bert" else "decoder"
    tokens = [document.tolist() for document in documents]
    want = [
        reference([(a[b][:, p, p], tokens[b]) for b, p in enumerate(places)], role) for a in dense
    ]
    check(found, want, UNIT[torch.float32], reach)


def test_small_chunks_give_the_same(monkeypatch):
    """One token is most of the text: its block is cut into strips."""
    model = own("grouped")
    ids = torch.where(torch.rand(1, 97, generator=torch.Generator().manual_seed(1)) < 0.8, 5, 6)
    whole, reach = read(model, lambda: model.hidden(ids))
    monkeypatch.setattr(sys.modules["headwise.circuits.same_tokens"], "_ROOM", 331)
    parts, _ = read(model, lambda: model.hidden(ids))
    bound = 2 * 2 * 16 * UNIT[torch.float64] * (1 + reach)
    for a, b in zip(whole.labels.layers, parts.labels.layers, strict=True):
        assert a.rows == b.rows
        for name in NAMES["decoder"]:
            assert torch.allclose(a.scores[name], b.scores[name], rtol=bound, atol=bound)


def test_groups_hold_every_copy_once():
    ids = torch.cat((text(3, 89, 31), torch.tensor([-1, -1, -1])))
    rows = sorted(row[row >= 0].tolist() for table in groups(ids) for row in table)
    want = [[i for i, t in enumerate(ids.tolist()) if t == token] for token in range(4, 35)]
    assert rows == sorted(places for places in want if len(places) > 1)
    assert all(int((table >= 0).sum()) > table.numel() / 2 for table in groups(ids))
    assert groups(torch.arange(5)) == groups(torch.zeros(0, dtype=torch.long)) == ()


def test_some_heads_and_some_rows():
    model = own("grouped")
    ids = text(4)[None]
    dense = definitions(model, lambda: model.hidden(ids))
    heads, _ = read(model, lambda: model.hidden(ids), heads=[3, 0])
    whole, reach = read(model, lambda: model.hidden(ids))
    rows, _ = read(model, lambda: model.hidden(ids), rows=11)
    bound = 2 * 2 * 16 * UNIT[torch.float64] * (1 + reach)
    for a, b in zip(heads.labels.layers, whole.labels.layers, strict=True):
        score, full = a.scores["induction"], b.scores["induction"]
        assert torch.allclose(score[[0, 3]], full[[0, 3]], rtol=bound, atol=bound)
        assert bool(score[[1, 2]].isnan().all())
        share = heads.shares[a.module]
        assert torch.allclose(share[[0, 3]], whole.shares[a.module][[0, 3]], rtol=bound)
        assert bool(share[[1, 2]].isnan().all())
    # the rows that were measured, from their matrix
    chosen: list[int] = []

    def each(module: str, call: Any, piece: Any, found: Any) -> None:
        chosen[:] = found.rows.tolist()

    with observe(model, rows=11, stream=False, each=each), torch.no_grad():
        model.hidden(ids)
    assert len(chosen) == 11
    a, words = dense[0][0], ids[0].tolist()
    picked = [(i, keys_of("induction", words, i, "decoder")) for i in chosen]
    want = torch.stack([a[:, i, keys].sum(-1) for i, keys in picked if keys]).mean(0)
    assert torch.allclose(rows.labels.layers[0].scores["induction"], want, rtol=bound, atol=bound)


def planted(ids: Tensor) -> GPT2Model:
    """One layer that knows a text: its position i holds token i − 1.

    Head 0 looks for the token after its own token's copies, head 1 for the copies, head 2 nowhere.
    """
    size = 16
    config = GPT2Config(
        n_embd=3 * size, n_head=3, n_layer=1, n_positions=64, vocab_size=size, attn_pdrop=0.0
    )
    model = GPT2Model(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        one = torch.eye(size)
        model.wte.weight[:, :size] = one
        model.wpe.weight[1 : len(ids), size : 2 * size] = one[ids[:-1]]
        block = model.h[0]
        block.ln_1.weight.fill_(1.0)
        wide = block.attn.c_attn.weight  # (stream, q | k | v)
        for head, part in ((0, slice(size, 2 * size)), (1, slice(0, size))):
            wide[:size, head * size : (head + 1) * size] = 3.0 * one
            wide[part, 3 * size + head * size : 3 * size + (head + 1) * size] = one
    return model


def test_planted_heads_get_their_names_on_their_text_only():
    ids = text(6, 61)
    model = planted(ids)
    found, _ = read(model, lambda: model(ids[None]))
    assert found.labels.heads("induction") == ((0, 0),)
    assert found.labels.heads("duplicate_token") == ((0, 1),)
    layer = found.labels.layers[0]
    assert float(layer.scores["induction"][0]) > 0.99
    for name in NAMES["decoder"]:  # head 2 has logits of exactly 0
        bound = 16 * UNIT[torch.float32]
        assert float(layer.scores[name][2]) == pytest.approx(layer.uniform[name], rel=bound)
    other, _ = read(model, lambda: model(text(7, 61)[None]))
    assert other.labels.heads("induction") == ()


def test_what_has_no_number_is_no_copy():
    model = build("llama")
    states = torch.randn(1, 11, 24, generator=torch.Generator().manual_seed(2))
    found, _ = read(model, lambda: model(inputs_embeds=states))
    assert all("induction" not in layer.scores for layer in found.labels.layers)


def test_an_encoder_decoder_is_read_in_both_stacks_and_not_across():
    loaded = wrap_model(build("t5", "seq2seq"))
    reader = TextReader(head_weights(loaded.model))
    scan = hw.scan(loaded, (text(0), text(1)), each=reader.absorb)
    found = reader.finish(scan).labels
    assert [layer.role for layer in found.layers] == ["encoder"] * 2 + ["decoder"] * 2
    for layer in found.layers:
        assert set(layer.uniform) == set(NAMES[layer.role])


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 1.7}


@pytest.mark.parametrize("rope", [None, YARN])
def test_shares_of_pairs_are_those_of_all_pairs_of_positions(rope):
    more = {} if rope is None else {"rope_parameters": rope}
    model = build("llama", **more).double()
    documents = [text(0), text(1, 29)]
    reader = TextReader(head_weights(model))
    sums: dict[str, Tensor] = {}

    def each(module: str, call: Any, piece: Any, found: Any) -> None:
        reader.absorb(module, call, piece, found)
        q, k, _ = (x[0] for x in call.part(piece))
        half = q.shape[-1] // 2
        k = k.repeat_interleave(2, 0)
        for i in range(q.shape[1]):
            for j in range(i + 1):
                for m in range(half):
                    pair = [m, m + half]
                    size = q[:, i, pair].norm(dim=-1) * k[:, j, pair].norm(dim=-1)
                    sums.setdefault(module, torch.zeros(4, half, dtype=torch.float64))[:, m] += size

    found = reader.finish(hw.scan(model, documents, layers=[1], each=each))
    assert list(found.shares) == list(sums) != []
    for module, total in sums.items():
        want = total / total.sum(-1, keepdim=True)
        bound = 4 * LENGTH**2 * UNIT[torch.float64]  # sums of as many terms, in other orders
        assert torch.allclose(found.shares[module][:, :-1], want, rtol=bound)
        assert bool((found.shares[module][:, -1] == 0).all())


def test_the_attention_factor_counts_once():
    """Where a part of a head does not turn, the factor changes shares."""
    rope = {**YARN, "partial_rotary_factor": 0.5}
    model = families.build("phi", rope_parameters=rope).double()
    weights = head_weights(model)
    rotary = weights.layers[0].rotary
    assert rotary is not None
    assert rotary.factor == 1.7
    assert rotary.width == weights.layers[0].query.shape[2] // 2
    reader, want, q_and_k = TextReader(weights), [], []

    def each(module: str, call: Any, piece: Any, found: Any) -> None:
        reader.absorb(module, call, piece, found)
        q_and_k.extend(call.part(piece)[:2])
        q, k, _ = (x.clone() for x in call.part(piece))
        for x in (q, k):
            x[..., : rotary.width] /= rotary.factor
        want.append(band_shares_of_data(q, k, rotary))

    found = reader.finish(hw.scan(model, text(0), layers=[0], each=each))
    (share,) = found.shares.values()
    bound = 4 * LENGTH**2 * UNIT[torch.float64]
    assert torch.allclose(share, want[0], rtol=bound)
    twice = band_shares_of_data(q_and_k[0], q_and_k[1], rotary)
    assert not torch.allclose(share, twice, rtol=0.01)
