"""A trained model that reads its tokens in another order, and what in it sees the difference."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from headwise.observation.driver import is_own
from headwise.theorems.measured import Measured, exact, within
from headwise.theorems.rewritten import block_outputs, moved, rounding, takes_positions
from headwise.theorems.statement import Control, Evidence, NotApplicable
from headwise.theorems.trained import Trained

__all__ = ["order_in_model", "prefix_in_model", "reasons"]

_TOKENS: Final = 64
_SEEN: Final = (1e-3, math.inf)  # a move of the last position that is no rounding
_CAUSAL: Final = "the causal mask"
_WINDOW: Final = "a mask that hides some keys"


def reasons(model: Trained) -> list[str]:
    """What in the model depends on the order of its tokens."""
    found = []
    if any(layer.role == "decoder" for layer in model.heads):
        found.append(_CAUSAL)
    elif any(not bool(layer.keep.all()) for layer in model.heads):
        found.append(_WINDOW)
    if any(layer.rotary is not None for layer in model.weights.layers):
        found.append("rotary positions")
    if is_own(model.model):
        kind = model.model.architecture.embedding.positions
        found += [f"{kind} positions"] if kind else []
    elif model.loaded.position_limit:
        found.append("learned positions")
    if not found and any(not layer.plain for layer in model.heads):
        found.append("a bias by distance, or another one, in the logits")
    return found


def _ids(model: Trained, *, last_stays: bool) -> tuple[Tensor, Tensor]:
    """The first tokens of the text, and a permutation of them."""
    if model.loaded.kind == "encoder-decoder":
        raise NotApplicable("it reads two sequences; the check is of models that read one")
    ids = model.document(_TOKENS).ids
    generator = torch.Generator().manual_seed(model.seed)
    moving = len(ids) - last_stays
    order = torch.cat((torch.randperm(moving, generator=generator), torch.arange(moving, len(ids))))
    return ids, order.to(ids.device)


def _apart(model: Trained, ids: Tensor, order: Tensor, *, at_zero: bool = False) -> float:
    """How far f(PX) is from P f(X) after the last block, relative, the worst position."""
    one = block_outputs(model, ids, at_zero=at_zero)[-1]
    other = block_outputs(model, ids[order], at_zero=at_zero)[-1]
    return moved(one[order], other)


def order_in_model(model: Trained) -> Evidence:
    """As it is, a trained model sees the order; an encoder with its positions removed does not."""
    why = reasons(model)
    causal, hidden = _CAUSAL in why, _WINDOW in why
    ids, order = _ids(model, last_stays=causal)
    tolerance = rounding(model, len(ids), len(model.heads))
    name = "largest ‖f(PX) − P f(X)‖ / ‖f(X)‖ of a token"
    as_it_is = exact(name, _apart(model, ids, order), tolerance=tolerance)
    causes = " and ".join(why) or "nothing known"
    if causal or hidden or not takes_positions(model):
        return Evidence(
            measured=(as_it_is,),
            controls=(Control(name="the model as it is", measured=(as_it_is,)),),
            violated="" if not why else f"the order is seen by {causes}",
            finding=_seen(model, ids, order, causes, as_it_is, causal),
        )
    removed = exact(name, _apart(model, ids, order, at_zero=True), tolerance=tolerance)
    return Evidence(
        measured=(removed,),
        controls=(Control(name=f"with {causes}", measured=(as_it_is,)),),
        finding=(
            f"With every token at position 0, permuting {len(ids)} tokens moves outputs by"
            f" {removed.value:.1e} of their length; as it is, {causes} make it"
            f" {as_it_is.value:.3g}."
        ),
    )


def _seen(
    model: Trained, ids: Tensor, order: Tensor, causes: str, apart: Measured, causal: bool
) -> str:
    text = (
        f"Permuting {len(ids) - causal} of {len(ids)} tokens moves an output by up to"
        f" {apart.value:.3g} of its length, because of {causes}"
    )
    if not model.loaded.driver.has_head or not causal:
        return f"{text}."
    text += f"; the last prediction changes by {_divergence(model, ids, ids[order]):.3g} nats"
    if not takes_positions(model):
        return f"{text}."
    alone = _apart(model, ids, order, at_zero=True)
    return (
        f"{text}. With every token at position 0, the causal mask alone still makes it {alone:.3g}."
    )


@torch.no_grad()
def _divergence(model: Trained, ids: Tensor, other: Tensor) -> float:
    """KL(one ‖ other) of the prediction after the last token, in nats."""
    logs = []
    for row in (ids, other):
        states, logits = model.loaded.driver.predict(row, None)
        logs.append(logits(states)[0, -1].double().log_softmax(-1))
    return float((logs[0].exp() * (logs[0] - logs[1])).sum().clamp(min=0))


def prefix_in_model(model: Trained) -> Evidence:
    """With all tokens at position 0, the first block of a decoder sees a set, two blocks do not."""
    if not any(layer.role == "decoder" for layer in model.heads):
        raise NotApplicable("it has no causal mask")
    if not takes_positions(model):
        raise NotApplicable("it cannot be told where its tokens stand, so positions stay in it")
    ids, order = _ids(model, last_stays=True)
    first = model.heads[0]
    keep = first.keep[: len(ids), : len(ids)]
    if not torch.equal(keep, torch.ones_like(keep).tril()):
        raise NotApplicable("its first layer does not show every query all that comes before it")
    if not first.plain:
        raise NotApplicable("its logits have biases or a softcap, so positions may stay in them")
    one, other = (block_outputs(model, row, at_zero=True) for row in (ids, ids[order]))
    if len(one) < 2:
        raise NotApplicable("it has one block only")
    own = [block_outputs(model, row)[0][-1] for row in (ids, ids[order])]
    name = "after one block: move of the last position"
    tolerance = rounding(model, len(ids), 1)
    after = [moved(one[i][-1], other[i][-1]) for i in (0, 1)]
    with_positions = moved(*own)
    return Evidence(
        measured=(
            exact(name, after[0], tolerance=tolerance),
            within("after two blocks", after[1], allowed=_SEEN),
        ),
        controls=(
            Control(
                name="after two blocks, held to what one does",
                measured=(exact(name, after[1], tolerance=tolerance),),
            ),
            Control(
                name="after one block, held to what two do",
                measured=(within("after two blocks", after[0], allowed=_SEEN),),
            ),
        ),
        finding=(
            f"With every token at position 0, permuting what comes before moves the last position"
            f" by {after[0]:.1e} of its length after one block and by {after[1]:.3g} after two;"
            f" with its own positions by {with_positions:.3g} after one."
        ),
    )
