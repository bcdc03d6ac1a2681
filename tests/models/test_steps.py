"""The written-out steps of decoding are the ordinary path, or are not taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from headwise.attention import blas
from headwise.errors import OptionError
from headwise.models import Cache, Decoder, build, decoder_sizes, fused
from headwise.models.architecture import Rotary
from headwise.models.compiled_step import compiled_step
from headwise.models.joined import join, joined
from headwise.models.lean import lean_step
from headwise.models.low_rank import add_low_rank
from tests.tolerance import UNIT

LENGTH, PROMPT = 19, 3
# What each step must cover: settings of the stack, and whether the compiled form does too.
COVERED: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, True),
    "grouped": ({"kv_heads": 2}, True),
    "one kv head": ({"kv_heads": 1}, True),
    "partial rotary": ({"rotary": Rotary(width=4)}, True),
    "window": ({"windows": (5,)}, True),
    "windows by layer": ({"windows": (5, None, 2)}, True),
    "scales": ({"scales": (0.7,)}, True),
    "1 + w": ({"norm": "rms+1"}, True),
    "interleaved": ({"rotary": Rotary(width=10, layout="interleaved")}, False),
    "no rotary": ({"rotary": None}, False),
    "layer norm": ({"norm": "layer"}, False),
    "gelu": ({"activation": "gelu_tanh"}, False),
    "plain feed-forward": ({"gated": False}, False),
    "biases": (
        {"qkv_bias": True, "output_bias": True, "feed_forward_bias": True},
        False,
    ),
}
NEITHER: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "qk norm": {"qk_norm": "head"},
    "alibi": {"alibi": True, "rotary": None},
    "sandwich": {"placement": "sandwich"},
    "post": {"placement": "post"},
    "parallel": {"placement": "parallel"},
}


def decoder(dtype: torch.dtype = torch.float32, **others: Any) -> Decoder:
    a = decoder_sizes(
        vocab=97, d_model=35, layers=3, heads=6, d_head=10, d_ff=53, context=64, tied=False,
        **others,
    )  # fmt: skip
    model = build(a, seed=3, dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:  # gains and biases away from the identity
                p.add_(torch.randn(p.shape, generator=generator).to(p.dtype) * 0.2)
    assert isinstance(model, Decoder)
    return model.eval()


def tokens(batch: int = 1) -> Tensor:
    return torch.randint(0, 97, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def errors(model: Decoder, make: Any, batch: int = 1) -> float:
    """Largest relative difference of a step from the pass over the whole sequence."""
    ids = tokens(batch)
    want = model.hidden(ids)
    dtype = model.embedding.tokens.weight.dtype
    cache = Cache.empty(model.architecture, batch=batch, capacity=LENGTH, dtype=dtype)
    model.hidden(ids[:, :PROMPT], cache=cache)
    step = make(model, cache)
    assert step is not None
    got = torch.stack([step(ids[:, i : i + 1]) for i in range(PROMPT, LENGTH)], 1)
    assert cache.length == LENGTH
    with pytest.raises(OptionError, match=f"position {LENGTH} in a cache of {LENGTH}"):
        step(ids[:, :1])
    return float((got - want[:, PROMPT:]).abs().max() / want.abs().max())


@pytest.mark.parametrize("word", COVERED)
def test_the_lean_step_is_the_pass(word: str) -> None:
    model = decoder(**COVERED[word][0])
    assert errors(model, lean_step) < 200 * UNIT[torch.float32]
    assert errors(model.double(), lean_step, batch=3) < 200 * UNIT[torch.float64]


@pytest.mark.parametrize("word", COVERED)
def test_the_compiled_step_is_the_pass_or_is_not_taken(word: str) -> None:
    settings, compiled = COVERED[word]
    model = decoder(**settings)
    if compiled and blas.sgemm_address() is not None:
        assert errors(model, compiled_step) < 200 * UNIT[torch.float32]
    else:
        assert compiled_step(model, Cache.empty(model.architecture, batch=1, capacity=5)) is None


def test_a_wrong_step_is_noticed() -> None:
    model = decoder(kv_heads=2)

    def swapped(model: Decoder, cache: Cache) -> Any:
        step = lean_step(model, cache)
        assert step is not None
        for layer in step._layers:
            layer.scale *= 3
        return step

    assert errors(model, swapped) > 1e4 * UNIT[torch.float32]


@pytest.mark.parametrize("word", NEITHER)
def test_what_is_not_covered_takes_the_ordinary_path(word: str) -> None:
    model = decoder(**NEITHER[word])
    cache = Cache.empty(model.architecture, batch=1, capacity=5)
    assert lean_step(model, cache) is None
    assert compiled_step(model, cache) is None


def test_who_watches_sees_the_ordinary_path() -> None:
    model = decoder()
    cache = Cache.empty(model.architecture, batch=1, capacity=5)
    assert lean_step(model, cache) is not None
    handle = model.decoder.blocks[1].attention.branch.value.register_forward_hook(lambda *_: None)
    assert lean_step(model, cache) is None
    assert compiled_step(model, cache) is None
    handle.remove()
    token = fused.WATCHER.set(fused.output)
    assert lean_step(model, cache) is None
    fused.WATCHER.reset(token)
    everywhere = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert lean_step(model, cache) is None
    assert compiled_step(model, cache) is None
    everywhere.remove()
    with FlopCounterMode(display=False):
        assert compiled_step(model, cache) is None
    assert lean_step(model.train(), cache) is None
    add_low_rank(model.eval(), ["query"], rank=2, alpha=4)
    assert lean_step(model, cache) is None


def test_only_one_row_of_float32_is_compiled() -> None:
    model = decoder()
    for batch, dtype in ((2, torch.float32), (1, torch.float64)):
        cache = Cache.empty(model.architecture, batch=batch, capacity=5, dtype=dtype)
        assert compiled_step(model.to(dtype), cache) is None


def test_joined_weights_stay_what_they_were() -> None:
    model = decoder(qkv_bias=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    attention = model.decoder.blocks[0].attention.branch
    projections = (attention.query, attention.key, attention.value)
    assert joined([p.weight for p in projections]) is not None
    apart = model.double().float()
    assert joined([p.weight for p in projections]) is None
    join(apart)
    both = joined([p.weight for p in projections])
    assert both is not None
    assert both.equal(torch.cat([p.weight for p in projections]))
    assert joined([p.bias for p in projections]) is not None
    for name, p in model.named_parameters():
        assert p.equal(before[name]), name
    with torch.no_grad():
        attention.key.weight.zero_()
    assert both.equal(torch.cat([p.weight for p in projections]))
