"""The residual stream: its Jacobian is I + ∂F/∂X, and its end the sum of all that was written.

x_L = x_0 + Σ_l F_l(norm x_l)     ∂x_{l+1}/∂x_l = I + ∂F_l/∂x_l
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from headwise.models import Decoder, build
from headwise.models.block import PreNorm
from headwise.models.context import Context
from headwise.models.norms import rms_norm
from headwise.models.presets import decoder_sizes
from headwise.observation.run import scan
from headwise.theorems.measured import Measured, exact
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

__all__ = ["THEOREMS"]

_U: Final = torch.finfo(torch.float64).eps / 2
_SHORT: Final = 16  # tokens of the control on a trained model
_STEP: Final = (torch.finfo(torch.float64).eps / 2) ** (1 / 3)  # of finite differences


def _model(effort: Effort, placement: str, **others: Any) -> Decoder:
    """A decoder in float64 with weights of usual size."""
    heads, layers = effort.pick((2, 5), (2, 11))
    sizes = decoder_sizes(
        vocab=101, d_model=12, layers=layers, heads=heads, d_ff=29, context=64, norm_eps=0.0,
        placement=placement, final_norm=placement == "pre", **others,
    )  # fmt: skip
    model = build(sizes, seed=effort.seed, dtype=torch.float64)
    assert isinstance(model, Decoder)
    return model.requires_grad_(False)


def _jacobian(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """∂f/∂x of a stream ``1 token width``, as one matrix."""
    found: Tensor = torch.autograd.functional.jacobian(function, x, vectorize=True)
    return found.reshape(x.numel(), x.numel())


def _parts(block: nn.Module, x: Tensor) -> list[tuple[nn.Module, tuple[Any, ...]]]:
    """The two sublayers, each with what it is called with besides the stream."""
    context = Context(1, x.shape[1], 0, x.device, x.dtype)
    return [(block.attention, (context, None)), (block.feed_forward, ())]  # type: ignore[list-item]


def _whole(part: Any, rest: tuple[Any, ...], x: Tensor) -> Tensor:
    found: Tensor = part(x, *rest)
    return found


def _branch(part: Any, rest: tuple[Any, ...], x: Tensor) -> Tensor:
    """F(x): what a sublayer adds to the stream, before a norm after it."""
    read = part.norm(x) if isinstance(part, PreNorm) else x
    found: Tensor = part.branch(read, *rest)
    return found


def _identity_path(effort: Effort, placement: str) -> tuple[Measured, Measured]:
    """How far the Jacobians of a block's sublayers are from I + ∂F/∂x; and from differences.

    Tolerances: a Jacobian of n entries by two routes; central differences with step u^(1/3)
    are wrong by about u^(2/3) times third derivatives.
    """
    generator = torch.Generator().manual_seed(effort.seed)
    block = _model(effort, placement).decoder.blocks[1]
    tokens = effort.pick(3, 7)
    x = torch.randn(1, tokens, 12, generator=generator, dtype=torch.float64)
    worst = slack = 0.0
    along = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    for part, rest in _parts(block, x):
        whole = _jacobian(partial(_whole, part, rest), x)
        inside = _jacobian(partial(_branch, part, rest), x)
        identity = torch.eye(x.numel(), dtype=torch.float64)
        worst = max(worst, float((whole - identity - inside).abs().max()))
        ahead, behind = (part(x + sign * _STEP * along, *rest) for sign in (1, -1))
        difference = ((ahead - behind) / (2 * _STEP)).flatten()
        expected = along.flatten() + inside @ along.flatten()
        slack = max(slack, float((difference - expected).abs().max()))
        x = part(x, *rest)
    size = 1.0 + float(inside.abs().max())
    return (
        exact("largest |J − (I + ∂F/∂x)|", worst, tolerance=64 * x.numel() * _U * size),
        exact(
            "largest |finite difference − (I + ∂F/∂x) v|",
            slack,
            tolerance=1e3 * _STEP**2 * size * x.numel(),
        ),
    )


def _jacobians(effort: Effort) -> Evidence:
    measured = _identity_path(effort, "pre")
    post = _identity_path(effort, "post")
    return Evidence(
        measured=measured,
        controls=(Control(name="the norm after the sum (post-norm)", measured=post),),
        finding=(
            f"The Jacobian of each sublayer is I + ∂F/∂x to within {measured[0].value:.0e}; with"
            f" the norm after the sum it is off by {post[0].value:.2g}."
        ),
    )


def _shrinks(effort: Effort) -> Evidence:
    """F(norm x) sees the direction of x alone, so its Jacobian is that at c x times c."""
    generator = torch.Generator().manual_seed(effort.seed)
    part: Any = _model(effort, "pre").decoder.blocks[1].feed_forward
    x = torch.randn(1, effort.pick(3, 7), 12, generator=generator, dtype=torch.float64)

    def ratios(branch: Callable[[Tensor], Tensor]) -> tuple[Measured, ...]:
        before = _jacobian(branch, x)
        size = float(before.abs().max())
        return tuple(
            exact(
                f"largest |c J(c x) − J(x)| / |J|, c = {c}",
                float((c * _jacobian(branch, c * x) - before).abs().max()) / size,
                tolerance=1e3 * x.numel() * _U,
            )
            for c in (3.0, 41.0)
        )

    measured = ratios(lambda y: part.write(y))
    return Evidence(
        measured=measured,
        controls=(
            Control(name="a branch without its norm", measured=ratios(lambda y: part.branch(y))),
            Control(
                name="a norm with a large ε",
                measured=ratios(lambda y: part.branch(rms_norm(y, part.norm.weight, eps=1.0))),
            ),
        ),
        finding=(
            "The Jacobian of a pre-norm branch falls as 1/|x| exactly (to within"
            f" {max(m.value for m in measured):.0e}): the larger the stream, the less a layer"
            " changes its direction."
        ),
    )


def _telescoped(effort: Effort, placement: str, double: bool = False) -> Measured:
    """The stream that leaves the last block against the embedding plus what all branches gave.

    Tolerance: 2L additions of numbers of at most the size of all of them together.
    """
    generator = torch.Generator().manual_seed(effort.seed)
    model = _model(effort, placement)
    ids = torch.randint(101, (1, effort.pick(23, 61)), generator=generator)
    writes: list[Tensor] = []
    parts: list[Any] = [*model.decoder.blocks]
    for block in parts:
        for part in (block.attention, block.feed_forward):
            part.branch.register_forward_hook(lambda _, args, output: writes.append(output))
    ends: list[Tensor] = []
    model.decoder.blocks[0].register_forward_pre_hook(lambda _, args: ends.append(args[0]))
    model.decoder.blocks[-1].register_forward_hook(lambda _, args, output: ends.append(output))
    model.hidden(ids)
    if double:
        writes.append(writes[0])
    first, last = ends
    size = first.abs() + torch.stack(writes).abs().sum(0)
    return exact(
        "largest |x_L − (x_0 + Σ writes)|",
        float((last - first - torch.stack(writes).sum(0)).abs().max()),
        tolerance=2 * (len(writes) + 2) * _U * float(size.max()),
    )


def _telescoping(effort: Effort) -> Evidence:
    found = _telescoped(effort, "pre")
    post = _telescoped(effort, "post")
    return Evidence(
        measured=(found,),
        controls=(
            Control(name="post-norm", measured=(post,)),
            Control(name="one write counted twice",
                    measured=(_telescoped(effort, "pre", double=True),)),
        ),
        finding=(
            f"The final stream is the embedding plus all writes to within {found.value:.0e}; with"
            f" norms after the sums it is off by {post.value:.2g}."
        ),
    )  # fmt: skip


def _writes_of(model: Trained) -> Evidence:
    """Blocks whose stream in, attention and MLP do not add up to the stream out, by the scan."""
    data = model.scanned
    if "writes_verified" not in data or not data.sizes.get("block"):
        raise NotApplicable("its blocks are not known, so nothing is known of what they write")
    failed = [str(name) for name in data["block_module"].values[~data["writes_verified"].values]]
    blocks = data.sizes["block"]
    name = "blocks whose writes do not add up to the change of the stream"
    attention, mlp = (float(data[f"{kind}_write_rms"].mean()) for kind in ("attention", "mlp"))
    scaled = _scaled_streams(model, [str(each) for each in data["block_module"].values])
    return Evidence(
        measured=(exact(name, len(failed), tolerance=0.0),),
        controls=(
            Control(
                name="every block's stream halved as it leaves",
                measured=(exact(name, scaled, tolerance=0.0),),
            ),
        ),
        violated="what its blocks give on is not a sum (post-norm, or a scaled stream)"
        if len(failed) == blocks
        else "",
        finding=(
            f"In {blocks - len(failed)} of {blocks} blocks stream in + attention + MLP is the"
            f" stream out; the root mean squares of writes are {attention:.2g} (attention) and"
            f" {mlp:.2g} (MLP) on average."
        ),
    )


def _scaled_streams(model: Trained, blocks: list[str]) -> int:
    """How many blocks the scan finds wrong when each stream is halved on its way out."""
    modules = dict(model.model.named_modules())

    def halve(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Tensor):
            return output / 2
        return (output[0] / 2, *output[1:])

    hooks = [modules[path].register_forward_hook(halve) for path in blocks if path in modules]
    try:
        data = scan(model.loaded, model.text, tokens=_SHORT).dataset
    finally:
        for hook in hooks:
            hook.remove()
    return int((~data["writes_verified"].values).sum())


_HE: Final = "He et al. 2016 (arXiv:1603.05027), equations 4 and 5"
_PRE: Final = "pre-norm: nothing is normed after the sum"

THEOREMS: Final = (
    Theorem(
        name="residual-jacobian",
        title="A residual layer has the Jacobian I + ∂F/∂X",
        statement=(
            "A pre-norm layer adds to its stream, so its Jacobian is the identity plus that of what"
            " it adds: gradients always have one path that nothing scales."
        ),
        latex=(
            r"x_{l+1} = x_l + F(\mathrm{norm}\,x_l) \;\Rightarrow\; \frac{\partial"
            r" x_{l+1}}{\partial x_l} = I + \frac{\partial F}{\partial x_l}"
        ),
        conditions=(_PRE,),
        source=_HE,
        kind=Kind.IDENTITY,
        prediction="J − I − ∂F/∂x = 0 up to rounding",
        estimator="Jacobians of both sublayers by automatic and by finite differences, in float64",
        random=_jacobians,
        textbook=(
            Textbook(
                "the same as an LSTM whose gate is fixed at one",
                "for the identity path; the norm inside F makes ∂F/∂x fall as 1/|x|, and a last"
                " norm after the stream belongs to pre-norm",
            ),
        ),
        proof="residual",
    ),
    Theorem(
        name="residual-branch-shrinks",
        title="The branch of a pre-norm layer weighs 1/|x|",
        statement=(
            "A norm sees the direction of the stream alone. So what a layer adds does not grow with"
            " the stream, and its Jacobian falls as the stream grows."
        ),
        latex=r"F(\mathrm{norm}\,cx) = F(\mathrm{norm}\,x) \;\Rightarrow\; J_F(cx) = J_F(x)/c",
        conditions=(
            "the branch reads a norm of the stream",
            "the norm's ε is small next to |x|²/d",
        ),
        source="Xiong et al. 2020 (arXiv:2002.04745), lemma 3",
        kind=Kind.IDENTITY,
        prediction="c J(c x) = J(x)",
        estimator="Jacobians at x, 3 x and 41 x, in float64",
        random=_shrinks,
        proof="residual",
    ),
    Theorem(
        name="residual-sum",
        title="The final stream is the embedding plus everything that was written",
        statement=(
            "In a pre-norm model the stream after the last layer, before the last norm, is the sum"
            " of the embedding and of what all sublayers wrote."
        ),
        latex=r"x_L = x_0 + \sum_{l} \left(\mathrm{MHA}_l + \mathrm{MLP}_l\right)",
        conditions=(_PRE, "writes are not scaled, or are counted after the scale"),
        source="Elhage et al. 2021, A Mathematical Framework for Transformer Circuits; " + _HE,
        kind=Kind.IDENTITY,
        prediction="no difference beyond the rounding of 2L additions",
        estimator="all writes added up; in a model, block by block on sampled tokens of the scan",
        random=_telescoping,
        model=_writes_of,
        proof="residual",
    ),
)
