"""What fine-tuning changes in W_Q and W_V has few directions, which the weights have not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from headwise.circuits.change import Change
from headwise.circuits.factored import Factored
from headwise.models import Decoder, build
from headwise.models.low_rank import LowRankLinear, add_low_rank
from headwise.models.presets import decoder_sizes
from headwise.theorems.head_ranks import numerical_rank
from headwise.theorems.measured import Measured, bootstrap, exact, within
from headwise.theorems.rewritten import own_heads
from headwise.theorems.statement import (
    Control,
    Effort,
    Evidence,
    Kind,
    NotApplicable,
    Textbook,
    Theorem,
)
from headwise.theorems.trained import Trained

__all__ = ["TUNING", "change", "noise_energy", "whole"]

_ENERGY: Final = (0.9, 1.0)
_SHARE: Final = 8  # LoRA's r ≤ 64 of some 512 directions and more
_D: Final = 67
_CONTEXT: Final = 29


def noise_energy(rank: int, rows: int, columns: int) -> float:
    """Share of ‖ΔW‖_F² in the first r directions of iid noise, for large matrices.

    The eigenvalues x of a Wishart matrix follow the Marchenko–Pastur law of ratio c = small/large,
    density √((b − x)(x − a))/(2π c x) on [(1 − √c)², (1 + √c)²], whose mean is 1; the share is
    ∫_q^b x dμ, with q the quantile above which r/small of them lie.

    Example:
        >>> round(noise_energy(8, 64, 64), 2), noise_energy(64, 64, 64)
        (0.38, 1.0)
    """
    small, large = sorted((rows, columns))
    if rank >= small:
        return 1.0
    c = small / large
    low, high = (1 - math.sqrt(c)) ** 2, (1 + math.sqrt(c)) ** 2
    # x = middle + half·cos φ: the density becomes smooth, and its sums exact to many digits.
    phi = (torch.arange(20_000, dtype=torch.float64) + 0.5) * math.pi / 20_000
    x = (low + high) / 2 + (high - low) / 2 * phi.cos()
    mass = ((high - low) / 2 * phi.sin()).square() / (2 * math.pi * c * x) * math.pi / 20_000
    above = mass.cumsum(0)  # from the largest x down
    inside = above <= rank / small
    return float((mass * x)[inside].sum())


def whole(delta: Tensor) -> Factored:
    """A matrix as a product of the thin side's width."""
    eye = torch.eye(min(delta.shape[-2:]), dtype=torch.float64)
    wide = delta.shape[-2] < delta.shape[-1]
    return Factored(eye, delta.double()) if wide else Factored(delta.double(), eye)


def change(delta: Tensor, base: Tensor) -> Change:
    """ΔW beside W, ``… row column`` each, as exact numbers."""
    return Change(whole(delta), whole(base), torch.zeros(delta.shape[:-2]))


@dataclass(frozen=True)
class _Tuned:
    """W and the changes of W_Q and W_V of a small decoder, ``matrix row column``."""

    base: Tensor
    descent: Tensor  # by gradient descent
    adam: Tensor
    adapter: int  # rank of what a low-rank adapter adds


def _tiny(seed: int) -> Decoder:
    sizes = decoder_sizes(vocab=61, d_model=_D, layers=2, heads=5, d_head=14, d_ff=149, context=127)
    model = build(sizes, seed=seed)
    assert isinstance(model, Decoder)
    return model


def _task(seed: int, period: int, sequences: int) -> Tensor:
    """Random tokens that repeat with a period: something to learn."""
    generator = torch.Generator().manual_seed(seed)
    one = torch.randint(61, (sequences, period), generator=generator)
    return one.repeat(1, 1 + _CONTEXT // period)[:, : _CONTEXT + 1]


def _fit(model: Decoder, ids: Tensor, steps: int, optimiser: torch.optim.Optimizer) -> None:
    """So many steps on the next token."""
    for _ in range(steps):
        optimiser.zero_grad()
        logits = model(ids[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimiser.step()


def _tuned(seed: int, steps: int) -> _Tuned:
    """A base trained on one task, and what each way of tuning it on another one changes."""
    model = _tiny(seed)
    _fit(model, _task(seed, 11, 5), steps, torch.optim.Adam(model.parameters(), lr=3e-3))
    state = {name: x.clone() for name, x in model.state_dict().items()}
    narrow = _task(seed + 7919, 7, 3)
    wanted = [n for n in state if n.endswith(("query.weight", "value.weight"))]
    base = torch.stack([state[n] for n in wanted]).double()

    def change_by(optimiser: torch.optim.Optimizer) -> Tensor:
        model.load_state_dict(state)
        _fit(model, narrow, steps, optimiser)
        after = model.state_dict()
        return torch.stack([after[n] for n in wanted]).double() - base

    descent = change_by(torch.optim.SGD(model.parameters(), lr=3e-2))
    adam = change_by(torch.optim.Adam(model.parameters(), lr=3e-4))
    model.load_state_dict(state)
    add_low_rank(model, ["query", "value"], rank=2, alpha=4.0, seed=seed)
    _fit(model, narrow, 3, torch.optim.Adam([p for p in model.parameters() if p.requires_grad]))
    adapters = [x for x in model.modules() if isinstance(x, LowRankLinear)]
    rank = max(numerical_rank((x.B.double() @ x.A.double()).detach()) for x in adapters)
    return _Tuned(base, descent, adam, rank)


def _median(
    name: str, energy: list[float], allowed: tuple[float, float], seed: int = 0
) -> Measured:
    interval = bootstrap(energy, lambda x: float(Tensor(x).median()), seed=seed)
    middle = float(Tensor(energy).median())
    return within(name, middle, allowed=allowed, interval=interval, draws=len(energy))


def _like_noise(deltas: Tensor, generator: torch.Generator) -> Tensor:
    """Noise of the same norms."""
    noise = torch.randn(deltas.shape, generator=generator, dtype=torch.float64).to(deltas.device)
    size = torch.linalg.matrix_norm(deltas) / torch.linalg.matrix_norm(noise)
    return noise * size[:, None, None]


def _tuning(effort: Effort) -> Evidence:
    draws, steps = effort.pick((8, 11), (31, 53))
    found = [_tuned(1009 * effort.seed + i, steps) for i in range(draws)]
    rank = _D // _SHARE
    law = noise_energy(rank, _D, found[0].base.shape[1])
    names = f"gradient descent: median energy of ΔW in {rank} of {_D} directions", "Adam: the same"
    allowed = (2 * law, 1.0), (1.5 * law, 1.0)
    generator = torch.Generator().manual_seed(effort.seed)
    measured: list[Measured] = []
    noise: list[Measured] = []
    for i, name in enumerate(names):
        deltas = torch.cat([(each.descent, each.adam)[i] for each in found])
        like = _like_noise(deltas, generator)
        for energies, kept in ((deltas, measured), (like, noise)):
            energy = change(energies, energies).energy(rank).tolist()
            kept.append(_median(name, energy, allowed[i], effort.seed))
    full = min(numerical_rank(w) for each in found for w in each.base)
    adapted = max(each.adapter for each in found)
    return Evidence(
        measured=(
            *measured,
            exact("rank of W_Q and W_V over all heads", full, predicted=_D, tolerance=0.0),
            exact("rank of an adapter's update, r = 2", adapted, predicted=2, tolerance=0.0),
        ),
        controls=(Control(name="noise of the same norms", measured=tuple(noise)),),
        finding=(
            f"{rank} of {_D} directions hold {measured[0].value:.3g} of what gradient descent"
            f" changes in W_Q and W_V (median), {measured[1].value:.3g} of what Adam does, and"
            f" {noise[0].value:.3g} of noise (law: {law:.3g}); the weights have rank {full}."
        ),
    )


def _model(model: Trained) -> Evidence:
    """One step of gradient descent on the text: ΔW is proportional to the gradient."""
    if model.loaded.kind != "decoder" or not model.loaded.driver.has_head:
        raise NotApplicable("it gives no next-token loss; the check needs one step of fine-tuning")
    own_heads(model)
    deltas = _gradients(model)
    shapes: dict[tuple[int, int], list[Tensor]] = {}
    for delta in deltas:
        shapes.setdefault((delta.shape[0], delta.shape[1]), []).append(delta)
    generator = torch.Generator().manual_seed(model.seed)
    rank = max(1, min(64, min(min(s) for s in shapes) // _SHARE))
    shares, noise, laws = [], [], []
    for (rows, columns), found in shapes.items():
        stacked = torch.stack(found)
        shares += change(stacked, stacked).energy(rank).tolist()
        like = _like_noise(stacked[:1], generator)
        noise += change(like, like).energy(rank).tolist()
        laws.append(noise_energy(rank, rows, columns))
    name = f"median energy of ΔW in {rank} directions"
    measured, control = (_median(name, x, _ENERGY) for x in (shares, noise))
    return Evidence(
        measured=(measured,),
        controls=(Control(name="noise of the same norm", measured=(control,)),),
        finding=(
            f"One gradient step on the text: {rank} directions hold {measured.value:.3g} of the"
            f" change of W_Q and W_V (median of {len(shares)}; lowest {min(shares):.3g}), and"
            f" {control.value:.3g} of noise of the same norm (law: {min(laws):.3g} to"
            f" {max(laws):.3g})."
        ),
    )


def _gradients(model: Trained) -> list[Tensor]:
    """The gradient of the next-token loss by W_Q and W_V over all heads, ``d_model width`` each,
    in the first layer, the middle one and the last."""
    layers = own_heads(model)
    some = [layers[i] for i in sorted({0, len(layers) // 2, len(layers) - 1})]
    views = [view for layer in some for view in (layer.query, layer.value)]
    owners = [_owner(model, view) for view in views]
    chosen = list({id(p): p for p in owners}.values())
    asked = [p.requires_grad for p in chosen]
    ids = model.document(128).ids
    try:
        for p in chosen:
            p.requires_grad_(True)
        with torch.enable_grad():
            states, logits = model.loaded.driver.predict(ids, None)
            found = logits(states)[0, :-1].float()
            loss = functional.cross_entropy(found, ids[1:].to(found.device))
            slopes = torch.autograd.grad(loss, chosen)
    finally:
        for p, needed in zip(chosen, asked, strict=True):
            p.requires_grad_(needed)
    by_owner = {id(p): g.contiguous() for p, g in zip(chosen, slopes, strict=True)}
    deltas = []
    for view, p in zip(views, owners, strict=True):
        inside = view.storage_offset() - p.storage_offset()
        part = by_owner[id(p)].as_strided(view.shape, view.stride(), inside)
        deltas.append(part.double().permute(1, 0, 2).flatten(1))
    return deltas


def _owner(model: Trained, view: Tensor) -> Tensor:
    """The parameter in whose memory a view of heads lies."""
    for p in model.model.parameters():
        here = p.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
        first = view.storage_offset() - p.storage_offset()
        if here and p.is_contiguous() and 0 <= first < p.numel():
            found: Tensor = p
            return found
    raise NotApplicable("its projections are not stored as they are used")


TUNING: Final = (
    Theorem(
        name="fine-tuning-update-rank",
        title="Fine-tuning changes weights in few directions",
        statement=(
            "W_Q and W_V over all heads have full rank. What gradient descent adds to them on a"
            " narrow task is concentrated: an eighth of the directions holds more than twice what"
            " it has of noise, and 90 % of the energy in trained models. Adam divides entry by"
            " entry, which spreads it out again, but not to noise."
        ),
        latex=(
            r"\operatorname{rank} W = d, \qquad"
            r" \frac{\sum_{i \le r} \sigma_i(\Delta W)^2}{\lVert \Delta W \rVert_F^2} > 2\,"
            r" \mathbb{E}\,\frac{\sum_{i \le r} \sigma_i(N)^2}{\lVert N \rVert_F^2}, \quad"
            r" r = \tfrac{d}{8},\ N \text{ iid}"
        ),
        conditions=(
            "the task is narrow beside what the model was trained on",
            "the update comes out of a gradient, not out of noise",
        ),
        source="Hu et al. 2021 (arXiv:2106.09685), sections 4.1 and 7; Aghajanyan et al. 2020"
        " (arXiv:2012.13255)",
        kind=Kind.REGULARITY,
        prediction="energy in d/8 directions: twice that of noise by gradient descent, 1.5 times by"
        " Adam; 90 % in a trained model's first step",
        estimator="median over layers, matrices and seeds of a small decoder fine-tuned on a second"
        " task; in a model, the first gradient step on the text",
        random=_tuning,
        model=_model,
        textbook=(
            Textbook(
                "heads are of low rank, which makes LoRA natural",
                "an analogy: W_Q over all heads has full rank; LoRA's hypothesis is about the"
                " update",
            ),
            Textbook(
                "fine-tuning updates are of low rank",
                "that an update of low rank is enough does not say that full fine-tuning makes one:"
                " Adam's is spread over many directions",
            ),
        ),
        proof="fine-tuning-update-rank",
    ),
)
