"""Remedies do what they say, exactly, and refuse where they would not."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, VaultGemmaConfig, VaultGemmaModel

from headwise.circuits.head_weights import head_weights
from headwise.errors import MeasurementError, ModelError, OptionError
from headwise.models import Architecture, build, decoder_sizes
from headwise.models.attention import MultiHeadAttention
from headwise.models.low_rank import add_low_rank
from headwise.models.presets import encoder_sizes, transformer_sizes
from headwise.monitoring import qk_clip as clipping
from headwise.monitoring.before_after import look
from headwise.monitoring.monitor import Monitor
from headwise.monitoring.remedies import insert_qk_norm, qk_clip, set_softcap
from headwise.observation.survey import survey
from headwise.observation.tap import tapped
from tests.circuits.known_heads import shaken, tiny

F64 = torch.float64
IDS = torch.arange(3, 3 + 13)[None] % 29
SIZES: dict[str, Any] = {
    "vocab": 31, "d_model": 24, "layers": 2, "heads": 4, "d_ff": 37, "context": 61,
}  # fmt: skip
# In float64, of weights that are rounded once and sums of at most 64 products.
EXACT = 1e-12
# The same after norms of latent vectors and rotations that transformers computes in float32.
SINGLE = 1e-6


def own(**more: Any) -> Any:
    return shaken(build(decoder_sizes(**{**SIZES, **more}), dtype=F64))


MODELS: dict[str, Any] = {
    "own": own,
    "own with biases": lambda: own(qkv_bias=True, norm="layer"),
    "own, shared keys": lambda: own(kv_heads=2, qkv_bias=True),
    "own, one key": lambda: own(kv_heads=1),
    "own encoder": lambda: shaken(build(encoder_sizes(**SIZES), dtype=F64)),
    **{
        name: lambda name=name: tiny(name)
        for name in ("gpt2", "gpt_neox", "phi3", "llama", "bert", "qwen2", "gptj", "gemma")
    },
    "deepseek_v2": lambda: tiny("deepseek_v2"),
    "deepseek_v3": lambda: tiny("deepseek_v3"),
    "deepseek_v3, plain queries": lambda: tiny("deepseek_v3", q_lora_rank=None),
}


def heads_of_first(model: nn.Module, path: str) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys of the module, and what its heads give to the output projection."""
    seen: dict[str, Tensor] = {}
    layer = next(each for each in head_weights(model, validate=False).layers if each.module == path)
    where = layer.output.untyped_storage().data_ptr()
    output = next(
        m for m in model.modules()
        if isinstance(getattr(m, "weight", None), Tensor)
        and m.weight.untyped_storage().data_ptr() == where
    )  # fmt: skip

    def tell(call: Any) -> None:
        if call.path == path:
            seen["q"], seen["k"] = call.call.q.clone(), call.call.k.clone()

    def before(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen["out"] = args[0].detach().clone()

    handle = output.register_forward_pre_hook(before)
    with torch.no_grad(), tapped(model.eval(), survey(model), tell):
        model(IDS)
    handle.remove()
    return seen["q"], seen["k"], seen["out"].unflatten(-1, (layer.heads, -1))


def check_clip(model: Any, tolerance: float) -> None:
    """Clip one head of the first module; it comes to tau, and the others stay bit for bit."""
    path = next(iter(survey(model).modules.values())).path
    values = look(model, IDS).logits[path]
    head = max(range(len(values)), key=values.__getitem__)
    tau = 0.3 * values[head]
    wanted = {path: [value if h == head else -1.0 for h, value in enumerate(values)]}
    before = heads_of_first(model, path)
    found = qk_clip(model, wanted, tau=tau, batch=IDS)
    after = heads_of_first(model, path)
    assert [(each.module, each.head) for each in found.heads] == [(path, head)]
    assert found.heads[0].gamma == pytest.approx(0.3, rel=1e-15)
    assert found.check is not None
    assert found.check.before.logits[path] == values
    now = found.check.after.logits[path]
    assert now[head] == pytest.approx(tau, rel=tolerance)
    others = [h for h in range(len(values)) if h != head]
    assert all(now[h] == values[h] for h in others)
    assert torch.equal(before[0][:, others], after[0][:, others])
    assert torch.equal(before[2][..., others, :], after[2][..., others, :])
    assert not torch.equal(before[2][..., head, :], after[2][..., head, :])
    every = before[0] @ before[1].repeat_interleave(len(values) // before[1].shape[1], 1).mT
    scaled = after[0] @ after[1].repeat_interleave(len(values) // after[1].shape[1], 1).mT
    size = float(every[:, head].abs().max())
    assert float((scaled - 0.3 * every)[:, head].abs().max()) <= tolerance * size


@pytest.mark.parametrize("name", MODELS)
def test_a_clip_is_exact_and_leaves_other_heads_alone(name):
    check_clip(MODELS[name](), SINGLE if "deepseek" in name else EXACT)


def test_the_check_notices_keys_that_are_shared(monkeypatch):
    """The plain rule on shared keys scales heads that nobody asked for."""

    def plain(layer: Any, module: Any, head: int, gamma: float) -> None:
        root = math.sqrt(gamma)
        layer.query[head].mul_(root)
        layer.key[head // (layer.heads // layer.kv_heads)].mul_(root)

    monkeypatch.setattr(clipping, "_scale", plain)
    with pytest.raises(AssertionError):
        check_clip(own(kv_heads=2), EXACT)
    check_clip(own(), EXACT)


def test_the_check_notices_biases_that_are_left_out(monkeypatch):
    def plain(layer: Any, module: Any, head: int, gamma: float) -> None:
        layer.query[head].mul_(math.sqrt(gamma))
        layer.key[head].mul_(math.sqrt(gamma))

    monkeypatch.setattr(clipping, "_scale", plain)
    with pytest.raises(AssertionError):
        check_clip(own(qkv_bias=True), EXACT)


def test_the_shared_rotary_key_stays(monkeypatch):
    """Scaling rotary queries by the root alone would leave their part of the logits too large."""
    model = tiny("deepseek_v3")
    layer = model.layers[0].self_attn
    before = layer.kv_a_proj_with_mqa.weight.clone()
    check_clip(model, SINGLE)
    assert torch.equal(layer.kv_a_proj_with_mqa.weight, before)

    def root_only(layer: Any, module: Any, head: int, gamma: float) -> None:
        width = layer.query.shape[2]
        query = module.q_b_proj.weight.unflatten(0, (layer.heads, -1))[head]
        key = module.kv_b_proj.weight.unflatten(0, (layer.heads, -1))[head, :width]
        query.mul_(math.sqrt(gamma))
        key.mul_(math.sqrt(gamma))

    monkeypatch.setattr(clipping, "_scale", root_only)
    with pytest.raises(AssertionError):
        check_clip(tiny("deepseek_v3"), SINGLE)


def test_nothing_above_tau_changes_nothing():
    model = own()
    before = copy.deepcopy(model.state_dict())
    found = qk_clip(model, batch=IDS, tau=1e6)
    assert found.heads == ()
    assert found.check is not None
    assert found.check.before == found.check.after
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())


def test_half_precision_is_rounded_once():
    model = own().to(torch.bfloat16)
    weight = model.decoder.blocks[0].attention.branch.query.weight
    want = (weight[:6].double() * math.sqrt(100 / 250)).to(torch.bfloat16)
    path = "decoder.blocks.0.attention.branch"
    qk_clip(model, {path: [250.0, 1.0, 1.0, 1.0]})
    assert torch.equal(weight[:6], want)


def test_a_clip_in_a_loop_reads_the_last_record():
    model = own(layers=1).train()
    with torch.no_grad():
        model.decoder.blocks[0].attention.branch.query.weight[12:18].mul_(1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Monitor(model, every=1, spectra=0) as monitor:
        with pytest.raises(OptionError, match="no record yet"):
            qk_clip(model, monitor)
        for _ in range(2):
            model(IDS).square().mean().backward()
            optimizer.step()
            found = qk_clip(model, monitor)
    first, second = (max(r.layers[0].figures["max_logit"]) for r in monitor.records)
    assert first > 100
    assert second == pytest.approx(100, rel=EXACT)
    # What is 100 within rounding may be a digit above it, and is scaled by 1 within rounding.
    assert all(each.gamma == pytest.approx(1, rel=EXACT) for each in found.heads)
    again = own(layers=1)
    for seen in (monitor.records, monitor.records[0]):
        assert qk_clip(again, seen, tau=200.0).tau == 200.0


def shared() -> Any:
    model = own()
    first, second = (block.attention.branch for block in model.decoder.blocks)
    for name in ("query", "key", "value", "output"):
        setattr(second, name, getattr(first, name))
    return model


def computed() -> Any:
    model = own()
    for block in model.decoder.blocks:
        nn.utils.parametrizations.weight_norm(block.attention.branch.query)
    return model


def adapted() -> Any:
    model = own()
    add_low_rank(model, ["query"], rank=2, alpha=2.0)
    return shaken(model)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: own(qk_norm="head"), "no effect"),
        (lambda: own(qk_norm="all"), "no effect"),
        (lambda: tiny("qwen3"), "no effect"),
        (lambda: own(softcap=9.0), "softcap of 9"),
        (lambda: tiny("gemma2"), "softcap"),
        (lambda: own(rotary=None, alibi=True), "bias by distance"),
        (lambda: tiny("olmo", clip_qkv=0.5), "clips"),
        (shared, "one set of weights"),
        (computed, "computed from others"),
        (adapted, "computed from others"),
    ],
)
def test_a_clip_that_would_not_work_is_refused(make, said):
    model = make()
    path = next(iter(survey(model).modules.values())).path
    heads = head_weights(model, validate=False).layers[0].heads
    with pytest.raises(ModelError, match=said):
        qk_clip(model, {path: [101.0] * heads})


def test_a_learned_bias_of_t5_is_refused():
    model = tiny("t5")
    layers = head_weights(model, validate=False).layers
    with pytest.raises(ModelError, match="bias by distance"):
        qk_clip(model, {layers[1].module: [101.0] * layers[1].heads})


@pytest.mark.parametrize(
    ("seen", "tau", "kind", "said"),
    [
        (None, 100.0, OptionError, "no logits and no batch"),
        ([], 100.0, OptionError, "no record yet"),
        ({"nowhere": [1.0]}, 100.0, OptionError, "no attention module nowhere"),
        ({"decoder.blocks.0.attention.branch": [1.0]}, 100.0, OptionError, "allowed: 4"),
        ({"decoder.blocks.0.attention.branch": [1.0, math.nan, 1, 1]}, 100.0, MeasurementError,
         "head 1 is nan"),
        ({"decoder.blocks.0.attention.branch": [1.0] * 4}, 0.0, OptionError, "tau is 0"),
        ({"decoder.blocks.0.attention.branch": [1.0] * 4}, math.nan, OptionError, "tau is nan"),
    ],
)  # fmt: skip
def test_bad_input_of_a_clip(seen, tau, kind, said):
    with pytest.raises(kind, match=said):
        qk_clip(own(), seen, tau=tau)


# ------------------------------------------------------------------------------------- QK-norm


@pytest.mark.parametrize("norm", ["rms", "rms+1", "layer"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_norms_of_queries_and_keys_bound_the_logits(norm, kv_heads):
    model = own(norm=norm, kv_heads=kv_heads)
    with torch.no_grad():
        model.decoder.blocks[1].attention.branch.query.weight.mul_(1000)
    before = copy.deepcopy(model.state_dict())
    found = insert_qk_norm(model, batch=IDS, tau=50.0)
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    made = found.model.state_dict()
    assert all(torch.equal(made[name], x) for name, x in before.items())
    assert found.model.architecture.stack.qk_norm == "head"
    assert found.check is not None
    assert found.check.before.max_logit > 50
    assert found.bounds["decoder.blocks.1.attention.branch"] == pytest.approx(50)
    for path, values in found.check.after.logits.items():
        assert max(values) <= found.bounds[path] * (1 + EXACT)
    assert math.isfinite(found.check.after.loss)
    assert "loss" in str(found.check)


def test_gains_keep_the_size_of_queries_and_keys():
    found = insert_qk_norm(own(layers=1), batch=IDS, tau=1e9)
    assert found.check is not None
    path = "decoder.blocks.0.attention.branch"
    before, after = found.check.before, found.check.after
    # The norm's epsilon of 1e-6 stands against mean squares of order 1.
    assert after.query_rms[path] == pytest.approx(before.query_rms[path], rel=1e-4)
    assert after.key_rms[path] == pytest.approx(before.key_rms[path], rel=1e-4)
    assert found.gains[path] == pytest.approx((before.query_rms[path], before.key_rms[path]))


def test_without_a_batch_gains_are_one():
    model = own().train()
    model.decoder.blocks[0].requires_grad_(False)
    found = insert_qk_norm(model)
    assert set(found.gains.values()) == {(1.0, 1.0)}
    assert all(bound == pytest.approx(math.sqrt(6)) for bound in found.bounds.values())
    assert found.check is None
    assert found.model.training
    frozen = {n for n, p in found.model.named_parameters() if not p.requires_grad}
    assert frozen == {n for n, p in model.named_parameters() if not p.requires_grad}


def test_both_stacks_of_a_pair_get_norms():
    made = insert_qk_norm(build(transformer_sizes(**SIZES))).model
    parts = [m for m in made.modules() if isinstance(m, MultiHeadAttention)]
    assert len(parts) == 6
    assert all(m.query_norm is not None and m.key_norm is not None for m in parts)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: own(qk_norm="head"), "already"),
        (lambda: tiny("llama"), "not made from an architecture"),
    ],
)
def test_norms_that_cannot_be_put_in(make, said):
    with pytest.raises(ModelError, match=said):
        insert_qk_norm(make())


def test_adapters_are_refused():
    model = own()
    add_low_rank(model, ["query"], rank=2, alpha=2.0)
    with pytest.raises(ModelError, match="merge the adapters"):
        insert_qk_norm(model)


@pytest.mark.parametrize("tau", [0.0, -1.0, math.inf, math.nan])
def test_a_bound_above_zero(tau):
    with pytest.raises(OptionError, match="tau is"):
        insert_qk_norm(own(), tau=tau)


# ------------------------------------------------------------------------------------- softcap


def test_a_softcap_and_back():
    model = own()
    found = set_softcap(model, 0.25, batch=IDS)
    assert found.check is not None
    assert found.check.before.max_logit > 0.25 > found.check.after.max_logit
    assert found.check.before.loss != found.check.after.loss
    assert found.modules == tuple(f"decoder.blocks.{i}.attention.branch" for i in range(2))
    saved = Architecture.from_json(model.architecture.model_dump_json())
    assert saved.stack.softcap == 0.25
    rebuilt = build(saved, dtype=F64)
    rebuilt.load_state_dict(model.state_dict())
    assert torch.equal(rebuilt(IDS), model(IDS))
    back = set_softcap(model, None, batch=IDS)
    assert back.check is not None
    assert back.check.after == found.check.before
    assert model.architecture.stack.softcap is None


def vaultgemma() -> Any:
    config = VaultGemmaConfig(
        vocab_size=31, hidden_size=24, intermediate_size=37, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=6, query_pre_attn_scalar=6,
    )  # fmt: skip
    return shaken(shaken(shaken(VaultGemmaModel(config).to(F64))))


@pytest.mark.parametrize("make", [lambda: tiny("gemma2"), vaultgemma])
def test_a_softcap_of_transformers(make):
    model: Any = make()
    model.set_attn_implementation("eager")
    path = survey(model).modules[id(model.layers[0].self_attn)].path
    set_softcap(model, None)
    plain = look(model, IDS).logits[path]
    found = set_softcap(model, 2.0, batch=IDS)
    assert found.check is not None
    assert found.check.before.max_logit > 2.0 > found.check.after.max_logit > 0
    want = [2.0 * math.tanh(x / 2.0) for x in plain]
    assert found.check.after.logits[path] == pytest.approx(want, rel=EXACT)
    assert model.config.attn_logit_softcapping == 2.0


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_families_without_a_softcap_are_named(family):
    """Gemma 3 has the setting, but does not hand it to its attention."""
    with pytest.raises(ModelError, match=f"attention of {family} has no softcap.*gemma2"):
        set_softcap(tiny(family), 50.0)


def test_an_attention_that_leaves_the_cap_out_is_refused():
    model: Any = tiny("gemma2")
    before = model.config.attn_logit_softcapping
    model.config._attn_implementation = "sdpa"
    with pytest.raises(ModelError, match="with sdpa, which leaves a softcap out"):
        set_softcap(model, before / 2)
    assert model.config.attn_logit_softcapping == before


@pytest.mark.parametrize("cap", [0.0, -1.0, math.inf, math.nan])
def test_a_cap_above_zero(cap):
    with pytest.raises(OptionError, match="the cap is"):
        set_softcap(own(), cap)


# ---------------------------------------------------------------------------------------- look


def test_a_look_changes_nothing_and_gives_the_models_loss():
    model: Any = tiny("llama", AutoModelForCausalLM).train()
    ids = look(model, IDS)
    named = look(model, {"input_ids": IDS, "labels": IDS})
    assert model.training
    assert ids.logits == named.logits
    assert named.loss == pytest.approx(ids.loss, rel=1e-6)  # transformers' is in float32
    assert all(p.grad is None for p in model.parameters())
    assert math.isnan(look(build(encoder_sizes(**SIZES)), IDS).loss)


@pytest.mark.parametrize("batch", [IDS[0], IDS.float(), [1, 2]])
def test_a_batch_that_is_none(batch):
    with pytest.raises(OptionError, match="the batch is"):
        look(own(), batch)
