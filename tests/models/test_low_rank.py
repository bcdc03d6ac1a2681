"""LoRA against the formula, and a round trip that leaves no trace."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from headwise.errors import ModelError, NonFiniteError, OptionError, ShapeError
from headwise.models.build import build
from headwise.models.low_rank import (
    LowRankLinear,
    add_low_rank,
    low_rank_state,
    merge,
    projections,
    remove_low_rank,
    unmerge,
)
from headwise.models.presets import preset

IN, OUT, RANK = 5, 7, 3
UNIT = 2.0**-24


class Conv1D(nn.Module):
    """W stored (in, out), as GPT-2 does."""

    def __init__(self, inner: int, out: int) -> None:
        super().__init__()
        self.nf = out
        self.weight = nn.Parameter(torch.randn(inner, out))
        self.bias = nn.Parameter(torch.randn(out))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Two(nn.Module):
    """Two attention-like layers, with one projection that is tied to an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(OUT, IN)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"query": nn.Linear(IN, IN), "value": nn.Linear(IN, IN)})
            for _ in range(2)
        )
        self.head = nn.Linear(IN, OUT, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = x + layer["query"](x) * layer["value"](x)
        return self.head(x)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def adapted(base: nn.Module, *, rslora: bool = False, alpha: float = 8.0) -> LowRankLinear:
    layer = LowRankLinear(base, rank=RANK, alpha=alpha, rslora=rslora)
    with torch.no_grad():
        layer.B.copy_(torch.randn(layer.B.shape))
    return layer


def noisy(model: nn.Module) -> nn.Module:
    """B away from zero, so that the adapters do something."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".B"):
                parameter.normal_()
    return model


def bound(layer: LowRankLinear, x: Tensor) -> float:
    """Rounding of sums of in + rank + in products, each at most as large as these."""
    reach = x.abs() @ (layer.base.weight.abs() if layer.transposed else layer.base.weight.abs().T)
    reach = reach + layer.scale * (x.abs() @ layer.A.abs().T @ layer.B.abs().T)
    return (2 * IN + RANK + 4) * UNIT * (float(reach.detach().max()) + 10)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_the_formula(kind: type[nn.Module], rslora: bool) -> None:
    layer, x = adapted(kind(IN, OUT), rslora=rslora), torch.randn(2, IN)
    scale = 8.0 / math.sqrt(RANK) if rslora else 8.0 / RANK
    stored = layer.base.weight.double()
    stored = stored.T if kind is Conv1D else stored
    w = stored + scale * layer.B.double() @ layer.A.double()
    want = x.double() @ w.T + layer.base.bias.double()
    room = bound(layer, x)
    torch.testing.assert_close(layer(x).double(), want, rtol=0, atol=room)
    held = w.T if kind is Conv1D else w
    torch.testing.assert_close(layer.weight.double(), held, rtol=0, atol=room)
    layer.merge()
    torch.testing.assert_close(layer(x).double(), want, rtol=0, atol=room)
    torch.testing.assert_close(layer.weight.double(), held, rtol=0, atol=room)
    wrong = x.double() @ (stored + layer.B.double() @ layer.A.double()).T
    assert (layer(x).double() - wrong - layer.base.bias.double()).abs().max() > room


def test_merging_rounds_the_float32_sum_once() -> None:
    """A product rounded to bfloat16 before it is added, or float32 factors that lose their type.

    huggingface/peft#1388, huggingface/peft#3449, axolotl-ai-cloud/axolotl#3095.
    """
    base = nn.Linear(IN, OUT).to(torch.bfloat16)
    layer = adapted(base)
    assert layer.A.dtype == layer.B.dtype == torch.float32
    change = layer.scale * (layer.B @ layer.A)
    once = (base.weight.float() + change).bfloat16()
    twice = base.weight + change.bfloat16()
    layer.merge()
    assert torch.equal(layer.base.weight, once)
    assert not torch.equal(once, twice)


def test_one_adapter_is_the_projection_with_its_change() -> None:
    """alpha 8 and rank 2 in a 3 → 4 projection: the scales 4 and 8/√2, by hand.

    Blaizzy/mlx-vlm#986, hao-ai-lab/FastVideo#870, NVIDIA/TensorRT-LLM#1668.
    """
    for rslora, scale in ((False, 4.0), (True, 8 / math.sqrt(2))):
        layer = LowRankLinear(nn.Linear(3, 4, bias=False), rank=2, alpha=8.0, rslora=rslora)
        with torch.no_grad():
            layer.base.weight.zero_()
            layer.A.copy_(torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]))
            layer.B.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]))
        by_hand = scale * torch.tensor([[1.0, 0, 2], [0, 3, 0], [1, 3, 2], [0, 0, 0]])
        torch.testing.assert_close(layer.weight, by_hand, rtol=UNIT * 4, atol=0)


def test_a_new_adapter_changes_nothing_and_is_all_that_trains() -> None:
    model, ids = Two(), torch.arange(OUT)[None]
    before = model(ids)
    paths = add_low_rank(model, ["query", "value"], rank=RANK, alpha=6.0)
    assert paths == ("layers.0.query", "layers.0.value", "layers.1.query", "layers.1.value")
    assert torch.equal(model(ids), before)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained == [f"{path}.{side}" for path in paths for side in "AB"]
    model(ids).square().sum().backward()
    assert all(model.get_parameter(name).grad is not None for name in trained)


def test_a_step_lowers_the_loss_and_leaves_the_base() -> None:
    model, ids = Two(), torch.arange(OUT)[None]
    add_low_rank(model, ["query"], rank=RANK, alpha=6.0)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for _ in range(5):
        loss = nn.functional.cross_entropy(model(ids)[0], ids[0].roll(1))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses == sorted(losses, reverse=True)
    assert all(torch.equal(model.get_parameter(n), p) for n, p in frozen.items())


def test_the_seed_makes_the_start() -> None:
    models = [Two() for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        add_low_rank(model, ["query"], rank=RANK, alpha=1.0, seed=seed)
    one, same, other = (low_rank_state(model) for model in models)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["layers.0.query.A"], other["layers.0.query.A"])
    assert not torch.equal(one["layers.0.query.A"], one["layers.1.query.A"])
    assert float(one["layers.0.query.A"].abs().max()) <= IN**-0.5


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["query"], ["layers.0.query", "layers.1.query"]),
        (["0.query"], ["layers.0.query"]),
        (r"layers\.1\..*", ["layers.1.query", "layers.1.value"]),
        ("head", ["head"]),
    ],
)
def test_targets(targets: str | list[str], expected: list[str]) -> None:
    model = Two()
    assert list(add_low_rank(model, targets, rank=1, alpha=1.0)) == expected
    assert list(projections(model)) == [path for path in projections(Two()) if path not in expected]


def test_merged_and_unmerged_models_agree_and_the_stored_weight_is_untouched() -> None:
    model, ids = Two(), torch.arange(OUT)[None]
    bits = {name: p.detach().clone() for name, p in model.named_parameters()}
    original = dict(model.named_parameters(remove_duplicate=False))
    add_low_rank(model, ["query", "value", "head"], rank=RANK, alpha=6.0)
    attached = noisy(model)(ids)
    assert not torch.equal(attached, Two()(ids))
    merge(model)
    merge(model)  # once is enough
    torch.testing.assert_close(model(ids), attached, rtol=1e-4, atol=1e-5)
    assert model.tokens.weight is original["tokens.weight"]  # tied to the head, not changed by it
    assert model.head.base.weight is not model.tokens.weight
    unmerge(model)
    assert torch.equal(model(ids), attached)
    remove_low_rank(model)
    now = dict(model.named_parameters(remove_duplicate=False))
    assert now.keys() == original.keys()
    assert all(now[name] is original[name] for name in now)
    assert all(torch.equal(now[name], bits[name]) for name in bits)


def test_adapters_are_removed_while_merged_or_kept_for_good() -> None:
    model, ids = noisy_model(), torch.arange(OUT)[None]
    kept = copy.deepcopy(model)
    merge(model)
    want = model(ids)
    remove_low_rank(model)
    base = Two()
    base.load_state_dict(model.state_dict())
    assert not torch.equal(model(ids), want)
    remove_low_rank(kept, keep_merged=True)
    assert torch.equal(kept(ids), want)
    assert kept.state_dict().keys() == base.state_dict().keys()


def noisy_model() -> nn.Module:
    model = Two()
    add_low_rank(model, ["query", "value"], rank=RANK, alpha=6.0)
    return noisy(model)


def test_a_conversion_while_merged_reaches_the_stored_weight() -> None:
    model = noisy_model()
    want = model.layers[0]["query"].base.weight.detach().clone()
    merge(model)
    model.double()
    unmerge(model)
    assert torch.equal(model.layers[0]["query"].base.weight, want.double())


def test_the_state_is_the_adapter_alone() -> None:
    model, other = noisy_model(), Two()
    state = low_rank_state(model)
    assert set(state) == {
        f"layers.{i}.{n}.{s}" for i in (0, 1) for n in ("query", "value") for s in "AB"
    }
    add_low_rank(other, ["query", "value"], rank=RANK, alpha=6.0)
    assert not other.load_state_dict(state, strict=False).unexpected_keys
    assert all(torch.equal(tensor, state[name]) for name, tensor in low_rank_state(other).items())


def test_the_decoder_of_the_library() -> None:
    """Adapters on all four projections: the attached, the merged and the head-by-head forms."""
    model = build(preset("tiny")).eval()
    ids = torch.arange(13)[None]
    with torch.no_grad():
        before = model(ids)
        add_low_rank(model, ["query", "key", "value", "output"], rank=RANK, alpha=6.0)
        attached = noisy(model)(ids)
        attention = model.get_submodule("decoder.blocks.0.attention.branch")
        x = torch.randn(1, 11, model.architecture.d_model)
        whole = attention(x)
        heads = attention.sum_over_heads(x)
        merge(model)
        merged = model(ids)
    largest = float(attached.abs().max())
    assert float((attached - before).abs().max()) > 1e-2 * largest
    assert float((attached - merged).abs().max()) <= 1e-5 * largest
    assert float((whole - heads).abs().max()) <= 1e-5 * float(whole.abs().max())


def test_dropout_is_off_in_evaluation() -> None:
    layer = LowRankLinear(nn.Linear(IN, OUT), rank=RANK, alpha=8.0, dropout=0.5)
    nn.init.normal_(layer.B)
    x = torch.randn(4, IN)
    plain = adapted(layer.base)
    plain.load_state_dict(layer.state_dict())
    layer.eval()
    assert torch.equal(layer(x), plain(x))
    layer.train()
    assert not torch.equal(layer(x), plain(x))


def test_a_sum_that_overflows_is_refused_and_nothing_is_merged() -> None:
    model = noisy_model().half()
    with torch.no_grad():
        model.layers[1]["query"].B.fill_(6e4)
        model.layers[1]["query"].A.fill_(6e4)
    with pytest.raises(NonFiniteError, match=r"^layers\.1\.query: merging .* overflows torch\.flo"):
        merge(model)
    assert not any(m.merged for m in model.modules() if isinstance(m, LowRankLinear))


def test_refusals() -> None:
    model = Two()
    with pytest.raises(OptionError, match=r"^no projection of the model matches 'keys'; allowed: "):
        add_low_rank(model, ["keys"], rank=1, alpha=1.0)
    with pytest.raises(OptionError, match=r"matches 'tokens'; allowed: query, value, head$"):
        add_low_rank(model, ["query", "tokens"], rank=1, alpha=1.0)
    assert not any(isinstance(m, LowRankLinear) for m in model.modules())
    for options in ({"rank": 0}, {"rank": 1, "alpha": math.nan}, {"rank": 1, "dropout": 1.0}):
        with pytest.raises(OptionError, match=r"^(rank|alpha|dropout) is "):
            add_low_rank(model, ["query"], **{"alpha": 1.0, **options})
    with pytest.raises(OptionError, match=r"^'\(' is no regular expression"):
        add_low_rank(model, "(", rank=1, alpha=1.0)
    with pytest.raises(OptionError, match=r"^no target is named"):
        add_low_rank(model, [], rank=1, alpha=1.0)
    for action in (merge, unmerge, remove_low_rank, low_rank_state):
        with pytest.raises(OptionError, match=r"^the model has no low-rank adapter; call add_low"):
            action(model)
    add_low_rank(model, ["query"], rank=1, alpha=1.0)
    with pytest.raises(ModelError, match=r"^'query' names projections that have an adapter alr"):
        add_low_rank(model, ["query"], rank=1, alpha=1.0)
    with pytest.raises(ModelError, match=r"^Embedding cannot have a low-rank change; allowed"):
        LowRankLinear(nn.Embedding(3, 2), rank=1, alpha=1.0)
    with pytest.raises(ShapeError, match=r"^the model is itself a projection"):
        add_low_rank(nn.Linear(2, 2), ".*", rank=1, alpha=1.0)
