"""Heads cut to rank r: the model has exactly the cut products, and afterwards its own weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from headwise.circuits.head_weights import HeadWeights, LayerWeights, head_weights
from headwise.circuits.surgery import LossByRank, loss_by_rank, truncated
from headwise.errors import ModelError, OptionError
from headwise.models import build as build_own
from headwise.models import decoder_sizes
from headwise.observation.attach import observe
from headwise.observation.loading import wrap_model
from headwise.observation.loss import mean_loss
from headwise.observation.text import tokenize
from tests.circuits.known_heads import tiny
from tests.observation.own_models import own, shaken
from tests.observation.tiny_models import build

UNIT = 2.0**-53
# A product of d_model·d_head terms, an SVD of it and the product again: each moves a matrix by a
# few d·u·‖W‖. 64 covers the three, d <= 64.
ROUNDING = 64 * 64 * UNIT
IDS = torch.randint(4, 90, (23,), generator=torch.Generator().manual_seed(5)).tolist()


def qwen() -> Any:
    """Grouped heads, biases of queries, keys and values, none of the output; float64."""
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=97, hidden_size=24, intermediate_size=31, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, dtype=torch.float64))
    return model


def products(weights: HeadWeights, circuit: str) -> list[Tensor]:
    return [getattr(layer, circuit)().dense() for layer in weights.layers]


def nearest(dense: Tensor, rank: int) -> Tensor:
    u, s, v = torch.linalg.svd(dense)
    return u[..., :rank] * s[..., None, :rank] @ v[..., :rank, :]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# name, circuits that can be cut in it
CASES = {
    "gpt2": ("qk", "ov"),
    "gpt_neox": ("ov",),  # fused by heads, rotary
    "llama": ("ov",),
    "t5": ("qk", "ov"),
    "bert": ("qk", "ov"),
    "own alibi": ("qk", "ov"),
    "own grouped": ("ov",),
    "own sinks": ("ov",),
    "qwen": ("ov",),
}


def model_of(name: str) -> Any:
    if name == "qwen":
        return qwen()
    return own(name[4:]) if name.startswith("own ") else tiny(name)


@pytest.mark.parametrize("name", CASES)
def test_inside_every_product_is_the_nearest_of_its_rank_and_outside_all_is_as_before(name):
    model = model_of(name)
    before, weights = state(model), head_weights(model)
    want = {c: products(weights, c) for c in CASES[name]}
    other = {c: products(weights, c) for c in ("qk", "ov") if c not in CASES[name]}
    with truncated(model, 2, circuits=CASES[name]):
        cut = head_weights(model, validate=False)
        assert not same(before, state(model))
        for circuit, dense in want.items():
            for got, whole in zip(products(cut, circuit), dense, strict=True):
                size = float(torch.linalg.matrix_norm(whole).max())
                torch.testing.assert_close(got, nearest(whole, 2), rtol=0, atol=ROUNDING * size)
                assert not torch.allclose(got, whole, rtol=0, atol=1e-3 * size)
        for circuit, dense in other.items():  # what was not asked for stays
            for got, whole in zip(products(cut, circuit), dense, strict=True):
                assert torch.equal(got, whole)
    assert same(before, state(model))


@pytest.mark.parametrize("name", CASES)
def test_the_full_rank_changes_nothing_but_rounding(name):
    model = model_of(name)
    weights = head_weights(model)
    full = weights.layers[0].query.shape[-1]
    with truncated(model, full, circuits=CASES[name]):
        cut = head_weights(model, validate=False)
        for a, b in zip(weights.layers, cut.layers, strict=True):
            for part in ("query", "value", "output"):
                x, y = getattr(a, part), getattr(b, part)
                size = float(x.abs().max())
                torch.testing.assert_close(x, y, rtol=0, atol=ROUNDING * size)


def test_only_the_chosen_heads_are_cut():
    model = tiny("gpt2")
    weights = head_weights(model)
    whole = products(weights, "ov")
    whole = [each.clone() for each in whole]
    with truncated(model, 1, heads=[(1, 2)]):
        cut = products(head_weights(model, validate=False), "ov")
    changed = [
        (layer, head)
        for layer, (a, b) in enumerate(zip(whole, cut, strict=True))
        for head in range(a.shape[0])
        if not torch.equal(a[head], b[head])
    ]
    assert changed == [(1, 2)]


def test_a_value_bias_of_shared_heads_is_kept_whole():
    """Cutting W_V by hand in a model whose heads share nothing writes the same numbers."""
    shared = qwen()
    apart_config = Qwen2Config(**{**shared.config.to_dict(), "num_key_value_heads": 4})
    apart = Qwen2ForCausalLM(apart_config).eval().double()
    expanded = {}
    for name, x in shared.state_dict().items():
        if ".k_proj." in name or ".v_proj." in name:
            x = x.unflatten(0, (2, 6)).repeat_interleave(2, 0).flatten(0, 1)
        expanded[name] = x
    apart.load_state_dict(expanded)
    ids = torch.tensor([IDS])
    with torch.no_grad():
        whole = shared(ids).logits
        with truncated(shared, 2):
            got = shared(ids).logits
            assert shared.model.layers[0].self_attn.o_proj.bias is not None
        with truncated(apart, 2):
            want = apart(ids).logits
    assert shared.model.layers[0].self_attn.o_proj.bias is None
    # Two layers of width 24 pass on an error of ROUNDING of what they read: 64 for norms and MLP
    bound = 64 * ROUNDING * float(whole.abs().max())
    torch.testing.assert_close(got, want, rtol=0, atol=bound)
    assert float((got - whole).abs().max()) > 1e4 * bound


def test_weights_come_back_after_an_exception_and_keep_their_place():
    model = tiny("gpt2")
    before, places = state(model), [p.data_ptr() for p in model.parameters()]
    with pytest.raises(KeyError), truncated(model, 1, circuits=["qk", "ov"]):
        raise KeyError
    assert same(before, state(model))
    assert places == [p.data_ptr() for p in model.parameters()]


@pytest.mark.parametrize("name", ["gpt2", "own alibi"])
def test_loss_by_rank_is_the_loss_of_the_cut_model(name):
    model = own("alibi") if name == "own alibi" else build("gpt2").double()
    loaded = wrap_model(model)
    full = 6
    found = loss_by_rank(loaded, IDS, [1, 3, full], circuits=["qk", "ov"])
    documents = tokenize(loaded, IDS)
    assert found.whole == mean_loss(loaded, documents)
    for rank, loss in zip(found.ranks, found.losses, strict=True):
        with truncated(model, rank, circuits=["qk", "ov"]):
            assert loss == mean_loss(loaded, documents)
    bound = 1e4 * ROUNDING  # three layers and logits of order 10², see above
    assert abs(found.changes[2]) < bound < abs(found.changes[0])
    assert found.smallest(bound) == full
    assert found.smallest(1e9) == 1


def test_the_smallest_rank_is_one_from_which_on_all_are_near():
    found = LossByRank((8, 1, 4, 2), (2.001, 2.9, 2.3, 2.0), whole=2.0)
    assert found.smallest(0.01) == 8  # rank 2 is near by chance: rank 4 is not
    assert found.smallest(0.4) == 2
    assert found.smallest(0.0) is None
    with pytest.raises(OptionError, match="the tolerance is nan"):
        found.smallest(float("nan"))


@pytest.mark.parametrize("rank", [0, -1, 7, 2.0, True])
def test_ranks_outside_of_the_head_are_refused(rank):
    model = build("gpt2")
    for ask in (
        lambda: truncated(model, rank).__enter__(),
        lambda: loss_by_rank(model, IDS, [1, rank]),
    ):
        with pytest.raises(OptionError, match=f"the rank is {rank}; allowed: 1 to 6"):
            ask()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"circuits": ["vo"]}, "the circuits are"),
        ({"circuits": []}, "the circuits are"),
        ({"circuits": "ov"}, "the circuits are 'ov'"),
        ({"heads": []}, "no head is named"),
        ({"heads": [(2, 0)]}, "the model has no layer 2; allowed: 0 to 1"),
        ({"heads": [(1, 4)]}, "layer 1 has no head 4; allowed: 0 to 3"),
    ],
)
def test_what_is_not_there_is_refused(options, says):
    with pytest.raises(OptionError, match=says), truncated(build("gpt2"), 1, **options):
        pass


@pytest.mark.parametrize(
    ("name", "circuit", "says"),
    [
        ("llama", "qk", "turns with the distance"),
        ("own grouped", "qk", "turns with the distance"),
    ],
)
def test_what_is_not_exact_is_refused_before_anything_is_written(name, circuit, says):
    model = model_of(name)
    before = state(model)
    with pytest.raises(OptionError, match=says), truncated(model, 1, circuits=["ov", circuit]):
        pass
    assert same(before, state(model))


def flat(**options: Any) -> nn.Module:
    """A decoder of one layer without rotary positions."""
    sizes = {"vocab": 31, "d_model": 24, "layers": 1, "heads": 4, "d_ff": 31, "context": 19}
    return build_own(decoder_sizes(**sizes, rotary=None, alibi=True, **options)).eval()


@pytest.mark.parametrize(
    ("model", "circuit", "says"),
    [
        (lambda: flat(qk_norm="head"), "qk", "is no fixed product"),
        (lambda: flat(qkv_bias=True, softcap=3.0), "qk", "a key bias and a softcap"),
        (lambda: flat(qkv_bias=True, sinks=True), "qk", "a key bias and a learned sink"),
        (lambda: flat(qkv_bias=True, sinks=True, kv_heads=2), "ov", "it has a learned sink"),
        (lambda: tiny("gpt_oss"), "ov", "it has a learned sink"),
    ],
)
def test_what_would_change_more_than_the_product_is_refused(model, circuit, says):
    with pytest.raises(OptionError, match=says), truncated(model(), 1, circuits=[circuit]):
        pass


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen", "bert"])
def test_folded_the_cut_is_nearest_to_the_folded_product_and_keeps_what_is_constant(name):
    """What attention writes is A x̂ (diag(γ) W_V W_O)_r + the constant of the whole, x̂ the norm's
    input, centred and divided."""
    model = model_of(name)
    before, weights = state(model), head_weights(model)
    layers = [layer.folded() for layer in weights.layers]
    wanted = [nearest(layer.ov().dense(), 2) for layer in layers]
    raw = [layer.ov().dense() for layer in weights.layers]
    constants = [constant(layer) for layer in layers]
    with truncated(model, 2, folded=True):
        cut = [layer.folded() for layer in head_weights(model, validate=False).layers]
        for got, want, whole, at in zip(cut, wanted, raw, constants, strict=True):
            size = float(torch.linalg.matrix_norm(got.ov().dense()).max())
            torch.testing.assert_close(got.ov().dense(), want, rtol=0, atol=ROUNDING * size)
            assert not torch.allclose(want, nearest(whole, 2), rtol=0, atol=1e-3 * size)
            scale = 1 + float(at.abs().max())
            torch.testing.assert_close(constant(got), at, rtol=0, atol=ROUNDING * scale)
    assert same(before, state(model))
    with pytest.raises(OptionError, match="gain on both sides"):
        truncated(tiny("gpt2"), 1, circuits=["qk"], folded=True).__enter__()


def constant(layer: LayerWeights) -> Tensor:
    """What all heads write whatever they read: Σ_h b_V W_O + b_O."""
    total = torch.zeros(layer.output.shape[-1], dtype=torch.float64)
    if layer.value_bias is not None:
        total = torch.einsum("hv,hvd->d", layer.shared(layer.value_bias), layer.output)
    return total if layer.output_bias is None else total + layer.output_bias


def test_key_biases_sinks_and_softcaps_apart_are_no_reason():
    for options in ({"qkv_bias": True}, {"sinks": True}, {"softcap": 3.0}):
        with truncated(flat(**options), 1, circuits=["qk"]):
            pass


def test_a_key_bias_changes_no_weight_when_the_product_is_cut():
    """What is left out, x W_Q b_K, is the same for every key: weights are those of the product."""
    model = shaken(flat(qkv_bias=True).double())
    layer = head_weights(model).layers[0]
    seen: list[Tensor] = []

    def each(module: str, call: Any, piece: Any, found: Any) -> None:
        seen.append(found.received[0])

    module: Any = dict(model.named_modules())[layer.module]
    inputs: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    ids = torch.tensor([[3, 1, 4, 15, 9, 2, 6]])
    with truncated(model, 2, circuits=["qk"]), torch.no_grad(), observe(model, each=each):
        model(ids)
    handle.remove()
    x = inputs[-1][0]  # the check of the extraction also ran the model
    logits = x @ nearest(layer.qk().dense(), 2) @ x.T
    logits = logits + (layer.query_bias[:, None] @ (x @ layer.key).mT)  # b_Q W_K^T y
    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / 4) for h in range(4)], dtype=torch.float64)
    steps = torch.arange(7)[:, None] - torch.arange(7)[None]
    logits = layer.scale * logits - slopes[:, None, None] * steps
    weights = logits.masked_fill(steps < 0, -torch.inf).softmax(-1)
    # ε of tests/tolerance.py for float64 and logits of the size they have here, and 7 rows' sum
    epsilon = 16 * UNIT * (1 + float(logits.abs().max())) + ROUNDING * float(logits.abs().max())
    torch.testing.assert_close(seen[0].double(), weights.sum(1), rtol=0, atol=7 * 2 * epsilon)


def test_layers_that_are_one_set_of_weights_are_refused():
    model = tiny("gpt2")
    model.h[1].attn.c_proj.weight = model.h[0].attn.c_proj.weight
    with pytest.raises(ModelError, match="are one set of weights"), truncated(model, 1):
        pass
