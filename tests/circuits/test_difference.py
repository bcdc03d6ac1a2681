"""Changes of heads by fine-tuning and by adapters equal the dense differences."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from headwise.circuits.change import similarity_null, subspace_similarity
from headwise.circuits.difference import LayerChange, adapter_difference, difference
from headwise.circuits.head_weights import head_weights
from headwise.circuits.layer_weights import HeadWeights
from headwise.errors import ModelError, NonFiniteError, ShapeError
from headwise.models import low_rank
from tests.circuits.known_heads import tiny
from tests.observation.own_models import own

UNIT = 2.0**-53
# Sums of at most 64 products and differences of float64 numbers, relative to the largest.
ROUNDING = 16 * 64 * UNIT


def tuned(model: nn.Module, size: float, seed: int = 1) -> nn.Module:
    """The same model with noise of a relative size on every weight, in float64."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(size * parameter.std() * noise.to(parameter.dtype))
    return model


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox", "bert", "own sinks"])
@pytest.mark.parametrize("folded", [False, True])
def test_changes_are_the_differences_of_the_dense_products(name, folded):
    make = (lambda: own("sinks")) if name == "own sinks" else (lambda: tiny(name))
    base, after = head_weights(make()), head_weights(tuned(make(), 0.2))
    found = difference(base, after, folded=folded)
    assert len(found) == len(base.layers)
    for change, before, other in zip(found, base.layers, after.layers, strict=True):
        for circuit in ("qk", "ov"):
            got = getattr(change, circuit)
            whole = [getattr(layer, circuit)(folded=folded).dense() for layer in (before, other)]
            size = float(torch.linalg.matrix_norm(whole[1]).max())
            want = whole[1] - whole[0]
            torch.testing.assert_close(got.product.dense(), want, rtol=0, atol=ROUNDING * size)
            norm = torch.linalg.matrix_norm(want) / torch.linalg.matrix_norm(whole[0])
            torch.testing.assert_close(got.relative(), norm, rtol=100 * ROUNDING, atol=0)
            width = before.query.shape[-1]
            assert got.product.rank == 2 * width
            assert (got.rank() <= 2 * width).all()
            assert (got.rank() > width).all()  # both factors changed


def test_a_small_change_keeps_its_digits():
    """[W'_Q, W_Q] [W'_K, −W_K]ᵀ of a change of 10⁻⁹ loses nine digits; the form used does not."""
    layer = head_weights(tiny("gpt2")).layers[0]
    e = torch.randn(layer.query.shape, generator=torch.Generator().manual_seed(2)).double()
    base = HeadWeights((layer,), None, None, None, None, "gpt2", True)
    other = replace(base, layers=(replace(layer, query=layer.query + 1e-9 * e),))
    (change,) = difference(base, other)
    exact = other.layers[0].query - layer.query  # the rounded sum is what the checkpoint holds
    want = torch.linalg.matrix_norm(exact @ layer.key.mT)
    torch.testing.assert_close(change.qk.norm(), want, rtol=ROUNDING, atol=0)
    assert change.qk.product.rank == layer.query.shape[-1]  # W_K did not change: no second half
    assert change.ov.norm().tolist() == [0.0] * layer.heads
    assert change.ov.rank().tolist() == [0] * layer.heads


def test_equal_products_are_no_change_whatever_their_factors():
    """W_Q M and W_K M⁻ᵀ give the same W_QK: the change is rounding, and its rank is 0."""
    layer = head_weights(tiny("gpt2")).layers[0]
    width = layer.query.shape[-1]
    gauge = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64)).Q
    turned = replace(layer, query=layer.query @ gauge, key=layer.key @ gauge)
    base = HeadWeights((layer,), None, None, None, None, "gpt2", True)
    (change,) = difference(base, replace(base, layers=(turned,)))
    assert float(change.qk.relative().max()) < ROUNDING
    assert float(change.part("query").relative().min()) > 0.1  # each factor did change


def test_rounding_to_float32_is_no_rank():
    """A merged adapter of rank 1, stored in float32, has a change of full rank but for rounding."""
    layer = head_weights(tiny("gpt2").float()).layers[0]
    d = layer.query.shape[1]
    line = torch.outer(torch.randn(d), torch.randn(layer.query.shape[-1]))
    value = layer.value + 0.1 * line  # in float32: rounded
    base = HeadWeights((layer,), None, None, None, None, "gpt2", True)
    (change,) = difference(base, replace(base, layers=(replace(layer, value=value),)))
    assert change.ov.rank().tolist() == [1] * layer.heads
    assert (change.ov.product.numerical_rank() > 1).all()


# -- adapters --------------------------------------------------------------------------------------


def adapter(
    folder: Path, sizes: dict[str, tuple[int, int]], *, rank: int = 2, alpha: float = 6.0,
    seed: int = 0,
) -> Path:  # fmt: skip
    """A PEFT folder for projections with these (in, out)."""
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(sizes)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (wide, out) in sizes.items():
        root = f"base_model.model.{name}"
        tensors[f"{root}.lora_A.weight"] = torch.randn(rank, wide, generator=generator)
        tensors[f"{root}.lora_B.weight"] = 0.01 * torch.randn(out, rank, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def projections_of(model: nn.Module, *names: str) -> dict[str, tuple[int, int]]:
    return {
        path: (module.in_features, module.out_features)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and path.rpartition(".")[2] in names
    }


def kept(model: nn.Module) -> list[tuple[str, int, bool, Tensor]]:
    return [
        (name, p.data_ptr(), p.requires_grad, p.detach().clone())
        for name, p in model.named_parameters()
    ]


def unchanged(a: list[Any], b: list[Any]) -> bool:
    return all(
        x[:3] == y[:3] and torch.equal(x[3], y[3]) for x, y in zip(a, b, strict=True)
    ) and len(a) == len(b)


@pytest.mark.parametrize("name", ["llama", "own grouped"])
def test_an_adapter_is_a_change_of_its_rank_and_leaves_the_model_alone(name, tmp_path):
    model: Any = (own("grouped") if name == "own grouped" else tiny("llama")).float()
    targets = ("query", "value") if name == "own grouped" else ("q_proj", "v_proj")
    folder = adapter(tmp_path / "a", projections_of(model, *targets))
    next(model.parameters()).requires_grad_(False)
    before = kept(model)
    found = adapter_difference(model, folder)
    assert unchanged(before, kept(model))
    base = head_weights(model)
    load = low_rank_loaded(model, folder)
    for change, layer in zip(found, base.layers, strict=True):
        # rank 2, of which a head may see less but here does not; float64 all the way
        for circuit in (change.qk, change.ov, change.part("query"), change.part("value")):
            assert circuit.rank().tolist() == [2] * len(circuit.rank())
            rounding = torch.ones(len(circuit.rank())).double()
            torch.testing.assert_close(circuit.energy(2), rounding, rtol=ROUNDING, atol=0)
        assert change.part("key").norm().tolist() == [0.0] * layer.kv_heads
        want = load[f"{layer.module}.{targets[0]}"].T.unflatten(1, (layer.heads, -1)).movedim(1, 0)
        # W + ΔW − W in float64 loses u |W| of ΔW
        bound = ROUNDING * float(layer.query.abs().max())
        torch.testing.assert_close(change.deltas["query"], want, rtol=0, atol=bound)


def low_rank_loaded(model: Any, folder: Path) -> dict[str, Tensor]:
    """s·B·A by path, by the parts that attach adapters."""
    from headwise.models.checkpoints.adapters import load_adapter
    from headwise.models.checkpoints.peft import load_peft
    from headwise.observation.driver import is_own

    paths = load_adapter(model, folder) if is_own(model) else load_peft(model, folder)
    found = {}
    for path in paths:
        part = model.get_submodule(path)
        found[path] = part.scale * (part.B.detach().double() @ part.A.detach().double())
    low_rank.remove_low_rank(model)
    return found


def test_an_adapter_of_a_fused_projection_that_is_stored_the_other_way_round(tmp_path):
    """GPT-2's c_attn holds (in, out) and q | k | v: each head gets its columns of (s·B·A)ᵀ."""
    model = tiny("gpt2")
    d = model.config.n_embd
    folder = adapter(tmp_path / "a", {"h.0.attn.c_attn": (d, 3 * d)})
    want = low_rank_loaded(model, folder)["h.0.attn.c_attn"].T
    first, *others = adapter_difference(model, folder)
    bound = ROUNDING * float(model.h[0].attn.c_attn.weight.abs().max())
    for name, columns in zip(("query", "key", "value"), want.split(d, 1), strict=True):
        by_head = columns.unflatten(1, (first.base.heads, -1)).movedim(1, 0)
        torch.testing.assert_close(first.deltas[name], by_head, rtol=0, atol=bound)
    assert first.qk.rank().tolist() == [4] * first.base.heads  # 2 of W_Q and 2 of W_K
    assert not any(bool(delta.any()) for each in others for delta in each.deltas.values())


def test_an_adapter_of_another_base_is_named_in_one_line(tmp_path):
    model = tiny("llama")
    before = kept(model)
    wrong = {path: (wide + 1, out) for path, (wide, out) in projections_of(model, "q_proj").items()}
    with pytest.raises(ModelError, match=r"lora_A of .* has the shape .*") as caught:
        adapter_difference(model, adapter(tmp_path / "a", wrong))
    assert "\n" not in str(caught.value)
    assert unchanged(before, kept(model))
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        adapter_difference(model, tmp_path)


def test_checkpoints_of_two_models_are_named():
    one, two = head_weights(tiny("gpt2")), head_weights(tiny("llama"))
    with pytest.raises(ShapeError, match="two checkpoints of one model") as caught:
        difference(one, two)
    assert "\n" not in str(caught.value)
    with pytest.raises(ShapeError, match=f"{len(one.layers)} attention modules in the base and 1"):
        difference(one, replace(one, layers=one.layers[:1]))
    layer = one.layers[0]
    narrow = replace(layer, query=layer.query[..., :-1])
    with pytest.raises(ShapeError, match=f"{layer.module} has decoder query weights"):
        difference(one, replace(one, layers=(narrow, *one.layers[1:])))
    bad = layer.key.clone()
    bad[0, 1, 2] = float("nan")
    with pytest.raises(NonFiniteError, match=f"the key weights of {layer.module} in the other"):
        difference(one, replace(one, layers=(replace(layer, key=bad), *one.layers[1:])))


# -- concentration and its controls ----------------------------------------------------------------


def wide_layer(d: int = 61, width: int = 17, heads: int = 3) -> LayerChange:
    """A layer of random weights without a change."""
    layer = head_weights(tiny("gpt2")).layers[0]
    generator = torch.Generator().manual_seed(9)

    def weight(*shape: int) -> Tensor:
        return torch.randn(heads, *shape, generator=generator, dtype=torch.float64) / d**0.5

    drawn = {"query": weight(d, width), "key": weight(d, width), "value": weight(d, width)}
    layer = replace(layer, **drawn, output=weight(width, d))
    return LayerChange(layer, {n: torch.zeros_like(getattr(layer, n)) for n in _ALL}, 0.0)


_ALL = ("query", "key", "value", "output")


def with_deltas(change: LayerChange, **deltas: Tensor) -> LayerChange:
    return replace(change, deltas={**change.deltas, **deltas})


def low(change: LayerChange, name: str, rank: int, seed: int) -> Tensor:
    shape = change.deltas[name].shape
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(shape[0], shape[1], rank, generator=generator, dtype=torch.float64)
    b = torch.randn(shape[0], rank, shape[2], generator=generator, dtype=torch.float64)
    return a @ b / 100


def test_low_rank_concentrates_and_noise_of_the_same_size_does_not():
    still = wide_layer()
    change = with_deltas(still, query=low(still, "query", 2, 0), value=low(still, "value", 2, 1))
    control = change.like_noise(seed=3)
    for name in ("query", "value"):
        torch.testing.assert_close(
            change.part(name).norm(), control.part(name).norm(), rtol=ROUNDING, atol=0
        )
    d, width = 61, 17
    # The largest of the σ² of an iid d×w matrix lies at the Marchenko–Pastur edge (√d + √w)²
    # (Tracy–Widom fluctuations are below 20 % here), of the sum d·w.
    edge = (d**0.5 + width**0.5) ** 2 / (d * width)
    spread = control.part("query").energy(2)
    assert (spread < 2 * 1.2 * edge).all()
    assert (spread > 2 / width).all()
    assert torch.allclose(change.part("query").energy(2), torch.ones(3).double(), rtol=ROUNDING)
    for circuit in ("qk", "ov"):
        assert (getattr(change, circuit).energy(2) > 1 - ROUNDING).all()
        assert (getattr(control, circuit).energy(2) < 0.6).all()
        assert (getattr(control, circuit).rank() == width).all()
    assert still.like_noise().qk.norm().tolist() == [0.0] * 3  # no change has no control


def test_independent_changes_of_a_factor_share_the_directions_of_the_other():
    """Why ``subspace_similarity`` sends changes of W_QK to their parts: W_Q ΔW_Kᵀ reads through
    W_Q's own columns, whatever ΔW_K is."""
    still = wide_layer()
    width = 17
    one, two = (with_deltas(still, key=low(still, "key", width, seed)) for seed in (0, 7))
    null = similarity_null(width, 61)[-1, -1]
    left, right = (
        subspace_similarity(one.qk.product, two.qk.product, rank=width, side=side)[:, -1, -1]
        for side in ("left", "right")
    )
    torch.testing.assert_close(left, torch.ones(3).double(), rtol=1e3 * ROUNDING, atol=0)
    # Σ of w² squared cosines over w: its relative standard error is below 2/w per head
    assert ((right / null - 1).abs() < 4 * 2 / width).all()
    parts = subspace_similarity(one.part("key").product, two.part("key").product, rank=width)
    assert ((parts[:, -1, -1] / null - 1).abs() < 4 * 2 / width).all()
