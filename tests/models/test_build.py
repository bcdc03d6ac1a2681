"""From an architecture to a model: every word becomes its part, and weights start as said."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from headwise.attention.masks import Causal, Everything, Window
from headwise.errors import OptionError
from headwise.models import (
    AcrossHeads,
    Architecture,
    Block,
    Branch,
    Embedding,
    LayerNorm,
    MultiHeadAttention,
    OffsetRMSNorm,
    ParallelBlock,
    PostNorm,
    PreNorm,
    Relative,
    RMSNorm,
    Rotary,
    Sandwich,
    Stack,
    Unembedding,
    build,
    preset,
    skeleton,
)
from headwise.models.relative import AlibiBias, RelativeBias

CAUSAL: dict[str, Any] = {"layers": 2, "heads": 4, "kv_heads": 2, "d_head": 5, "d_ff": 7}


def decoder(unembedding: Unembedding | None = None, **more: Any) -> nn.Module:
    return build(
        Architecture(
            vocab=17, d_model=12, context=13, decoder=Stack(**{**CAUSAL, **more}),
            unembedding=unembedding or Unembedding(),
        )
    )  # fmt: skip


def attentions(model: nn.Module) -> list[MultiHeadAttention]:
    return [m for m in model.modules() if isinstance(m, MultiHeadAttention)]


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("pre", PreNorm), ("post", PostNorm), ("sandwich", Sandwich), ("branch", Branch),
        ("parallel", PreNorm),
    ],
)  # fmt: skip
def test_placements(word: str, kind: type[nn.Module]) -> None:
    block = decoder(placement=word).decoder.blocks[0]  # type: ignore[index,union-attr]
    assert type(block) is (ParallelBlock if word == "parallel" else Block)
    assert type(block.attention) is kind
    assert type(block.feed_forward) is kind


@pytest.mark.parametrize(
    ("word", "kind"), [("layer", LayerNorm), ("rms", RMSNorm), ("rms+1", OffsetRMSNorm)]
)
def test_norms(word: str, kind: type[nn.Module]) -> None:
    model = decoder(norm=word, norm_eps=0.25, qk_norm="head")
    kinds = (LayerNorm, RMSNorm, OffsetRMSNorm)
    found = [m for m in model.modules() if isinstance(m, kinds)]
    assert {type(m) for m in found} == {kind}
    assert {m.eps for m in found} == {0.25}
    assert len(found) == 2 * 4 + 1
    assert len([m for m in decoder(final_norm=False).modules() if isinstance(m, kinds)]) == 4
    # The identity's gain, and no shift.
    x = torch.tensor([3.0, -3.0] * 6)
    fresh = model.decoder.norm(x)  # type: ignore[operator,union-attr]
    assert torch.allclose(fresh, x / math.sqrt(9.25))


def test_settings_reach_every_attention() -> None:
    model = decoder(
        windows=(3, None), scales=(0.5, None), softcap=2.0, sinks=True, qk_norm="all",
        rotary=Rotary(width=4), attention_dropout=0.25, qkv_bias=True,
    )  # fmt: skip
    first, second = attentions(model)
    assert (first.mask, second.mask) == (Window(3), Causal())
    assert (first.scale, second.scale) == (0.5, 5**-0.5)
    for one in (first, second):
        assert (one.softcap, one.rotary, one.dropout) == (2.0, Rotary(width=4), 0.25)
        assert (one.heads, one.kv_heads, one.d_head) == (4, 2, 5)
        assert one.sinks is not None
        assert isinstance(one.query_norm, AcrossHeads)
        assert one.query_norm.norm.weight.shape == (20,)  # type: ignore[union-attr]
        assert one.key_norm.norm.weight.shape == (10,)  # type: ignore[union-attr]
        assert [one.query.bias is None, one.output.bias is None] == [False, True]  # type: ignore[union-attr]


def test_a_source_is_read_whole_without_positions() -> None:
    model = build(preset("tiny-encoder-decoder"))
    own, cross = attentions(model.decoder)[:2]  # type: ignore[arg-type]
    assert (own.cross, own.mask) == (False, Causal())
    assert (cross.cross, cross.mask) == (True, Everything())
    assert cross.rotary is None
    assert {a.mask for a in attentions(model.encoder)} == {Everything()}  # type: ignore[arg-type,union-attr]


def test_sinks_stand_in_self_attention_only() -> None:
    own = Stack(**CAUSAL, causal=False)
    reads = Stack(**CAUSAL, cross=True, sinks=True)
    model = build(Architecture(vocab=17, d_model=12, context=13, encoder=own, decoder=reads))
    found = attentions(model.decoder)  # type: ignore[arg-type]
    assert [a.sinks is not None for a in found] == [not a.cross for a in found]
    assert {a.cross for a in found} == {False, True}


def test_biases_of_distances() -> None:
    assert isinstance(decoder(alibi=True).decoder.bias, AlibiBias)  # type: ignore[union-attr]
    bias = decoder(relative=Relative(buckets=8, max_distance=9)).decoder.bias  # type: ignore[union-attr]
    assert isinstance(bias, RelativeBias)
    assert bias.weight.shape == (8, 4)
    assert (bias.max_distance, bias.bidirectional) == (9, False)


def test_dropout_stands_where_it_is_said() -> None:
    model = decoder(dropout=0.25)
    shares = [(name, m.p) for name, m in model.named_modules() if isinstance(m, nn.Dropout)]
    assert [name for name, _ in shares] == [
        "embedding.dropout",
        *(
            f"decoder.blocks.{i}.{part}.dropout"
            for i in (0, 1)
            for part in ("attention", "feed_forward")
        ),
    ]
    assert {p for _, p in shares} == {0.25}
    assert not [m for m in decoder().modules() if isinstance(m, nn.Dropout)]


def test_weights_start_as_said() -> None:
    """Standard deviations within 5 of their own standard errors, σ/√(2n)."""
    stack = Stack(layers=3, heads=4, kv_heads=4, d_head=31, d_ff=127, norm="layer", qkv_bias=True)
    model = build(
        Architecture(
            vocab=257, d_model=124, context=61, decoder=stack,
            embedding=Embedding(positions="learned"),
            unembedding=Unembedding(tied=False, bias=True),
        )
    )  # fmt: skip
    seen = 0
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert torch.equal(p, torch.full_like(p, float("norm.weight" in name))), name
            continue
        writes = name.endswith(("output.weight", "down.weight"))
        seen += writes
        sigma = 1 / math.sqrt(3 * p.shape[1])
        if writes:
            sigma /= math.sqrt(6)
        if name.startswith("embedding."):
            sigma = 1.0  # the table is only read
        assert abs(float(p.detach().std()) - sigma) < 5 * sigma / math.sqrt(2 * p.numel()), name
        assert abs(float(p.detach().mean())) < 5 * sigma / math.sqrt(p.numel()), name
    assert seen == 6


def test_a_table_that_gives_the_logits_starts_like_other_matrices() -> None:
    model = build(preset("tiny"))
    table = model.embedding.tokens.weight.detach()
    sigma = 1 / math.sqrt(3 * 32)
    assert abs(float(table.std()) - sigma) < 5 * sigma / math.sqrt(2 * table.numel())


def test_writes_are_counted_in_their_own_stack() -> None:
    model = build(preset("transformer-base").model_copy(update={"vocab": 11}))
    for stack, writes in (("encoder", 12), ("decoder", 18)):
        p = model.get_parameter(f"{stack}.blocks.0.attention.branch.output.weight").detach()
        sigma = 1 / math.sqrt(3 * 512 * writes)
        assert abs(float(p.std()) - sigma) < 5 * sigma / math.sqrt(2 * p.numel())


def test_seeds_and_types() -> None:
    one, again, other = (build(preset("tiny"), seed=s).state_dict() for s in (3, 3, 4))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["embedding.tokens.weight"], other["embedding.tokens.weight"])
    state = torch.random.get_rng_state()
    low = build(preset("tiny"), seed=3, dtype=torch.bfloat16).state_dict()
    assert torch.equal(state, torch.random.get_rng_state())  # nobody else's draws are moved
    assert all(torch.equal(low[name], one[name].bfloat16()) for name in one)


def test_weights_are_numbers_with_a_point() -> None:
    with pytest.raises(OptionError, match=r"weights of type torch\.int64; allowed: float32"):
        build(preset("tiny"), dtype=torch.int64)


@pytest.mark.parametrize("name", ["tiny", "tiny-encoder", "tiny-encoder-decoder"])
def test_a_skeleton_has_no_memory_and_the_same_names(name: str) -> None:
    bare, whole = skeleton(preset(name)), build(preset(name))
    assert {p.device.type for p in bare.parameters()} == {"meta"}
    shapes = {n: p.shape for n, p in bare.state_dict().items()}
    assert shapes == {n: p.shape for n, p in whole.state_dict().items()}
    assert whole.architecture == preset(name)
    assert not list(whole.buffers())


def test_names_of_parameters() -> None:
    names = [n for n, _ in decoder(Unembedding(tied=False)).named_parameters()]
    block = "decoder.blocks.1."
    assert names[0] == "embedding.tokens.weight"
    assert names[-2:] == ["decoder.norm.weight", "unembedding.weight"]
    assert [n.removeprefix(block) for n in names if n.startswith(block)] == [
        "attention.norm.weight",
        *(f"attention.branch.{part}.weight" for part in ("query", "key", "value", "output")),
        "feed_forward.norm.weight",
        *(f"feed_forward.branch.{part}.weight" for part in ("gate", "up", "down")),
    ]


def test_a_head_of_a_masked_model() -> None:
    model = build(preset("tiny-encoder"))
    names = {n for n, _ in model.named_parameters() if n.startswith("unembedding")}
    assert names == {
        "unembedding.bias",
        *(f"unembedding.transform.{part}" for part in ("dense.weight", "dense.bias")),
        *(f"unembedding.transform.norm.{part}" for part in ("weight", "bias")),
    }
