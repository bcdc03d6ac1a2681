"""Every extraction is checked against what the model computes with, before it is handed out.

A few tokens run through the model. From what each attention module reads, X, its queries, keys and
values are computed again from the extracted weights (and norms, rotation, clipping, scale), and the
output from what its heads gave; each must equal what the model computed. So must the norms: the one
that is folded gives X, and what attention writes passes a norm exactly where the layout says so,
which gives what its fold, its division and its bias do.

The bound is that of one rounded matrix product (Higham, Accuracy and Stability of Numerical
Algorithms, section 3.5): |fl(xW) − xW| <= γ_d |x||W|, with γ_d = d·u, and a few u for the steps
after it; weights in half precision round each result to their own type, 8 times at most. Norms and
rotations are computed in float32 by transformers, also of float64 models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor, nn

from headwise.circuits.latent import Latent, LatentUse
from headwise.circuits.layer_weights import LayerWeights, RotaryUse
from headwise.circuits.norms import HeadNorm, NormFold
from headwise.circuits.probe import Probe, probe
from headwise.circuits.reading import Reading
from headwise.errors import ModelError
from headwise.observation.assemble import plain
from headwise.observation.capture import Captured
from headwise.observation.survey import Survey
from headwise.positions import rotate

__all__ = ["validated"]

_STEPS: Final = 32  # roundings after the product: norm, rotation (its angles too), scale
_SINGLE: Final = 2.0**-24
_ROUNDINGS: Final = 8
_TO_DO: Final = "report it: circuits of this model would be wrong"


def validated(
    model: nn.Module,
    found: Survey,
    family: str,
    readings: Sequence[Reading],
    final: tuple[str, NormFold | None] = ("", None),
) -> list[LayerWeights]:
    """The layers, each checked, with the role that its mask shows; else one ``ModelError``.

    ``final`` is the path of the norm that ends the last stack ("": none), and that norm.
    """
    paths = {path for r in readings for path in vars(r.paths).values() if path}
    stack = readings[-1].site.stack
    seen = probe(model, found, paths | {stack} | {path for path in final[:1] if path})
    checked = []
    for reading in readings:
        call = seen.calls.get(reading.site.path)
        if call is None:
            raise ModelError(
                f"{family}: {reading.site.path} was not run, so its weights cannot be checked",
                to_do="pass the part of the model that is used, or validate=False",
            )
        _Check(family, reading, seen, call).all()
        role = "cross" if reading.site.named_cross else call.call.self_role()
        checked.append(replace(reading.weights, role=role))
    last = _Check(family, readings[-1], seen, seen.calls[readings[-1].site.path])
    last.norm("final norm", final[1], final[0], seen.outputs.get(stack), "the stack ends with")
    return checked


class _Check:
    """The checks of one attention module."""

    def __init__(self, family: str, reading: Reading, seen: Probe, call: Captured) -> None:
        self.family, self.reading, self.seen, self.captured = family, reading, seen, call
        self.weights = reading.weights

    def all(self) -> None:
        """Everything, the plainest first."""
        w = self.weights
        if w.latent is None:
            self._projections()
        else:
            self._latents(w.latent)
        self._output()
        self.norm("norm before attention", w.norm, self.reading.paths.norm, self.captured.stream)
        if w.role == "cross":
            at = self.reading.paths.source_norm
            self.norm("norm of the other sequence", w.source_norm, at, self.captured.source)
        self._output_norm()

    def _projections(self) -> None:
        """Queries, keys and values, each of one matrix."""
        w, call = self.weights, self.captured.call
        stream, source = self.captured.stream, self.captured.source
        value, reach_of_value = _product(source, w.value, w.value_bias)
        value = _clipped(value, w.clip)
        self._same("V", value, call.v, reach_of_value, w.value.dtype)
        rotary = w.rotary
        for name, x, weight, bias, norm, got, factor in (
            ("Q", stream, w.query, w.query_bias, w.query_norm, call.q, call.scale / w.scale),
            ("K", source, w.key, w.key_bias, w.key_norm, call.k, 1.0),
        ):
            own, reach = _prepared(x, weight, bias, norm, rotary, w.clip)
            single = rotary is not None or norm is not None
            self._same(name, own, got.double() * factor, reach, weight.dtype, single)
        self._sharing(value, reach_of_value)

    def _latents(self, use: LatentUse) -> None:
        """Queries, keys and values out of narrow vectors, the entries that turn apart."""
        w, call, x = self.weights, self.captured.call, self.captured.stream.double()
        plain, q = w.query.shape[2], call.q.double() * (call.scale / w.scale)
        rest = slice(plain, None)
        if use.query is None:
            assert use.rotary_query is not None
            turning = use.rotary_query
        else:
            turning = replace(use.query, up=use.query.up[..., rest]).product()
        shared = use.rotary_key.expand(w.heads, -1, -1)
        for name, weight, latent, columns, got in (
            ("V", w.value, use.source, rest, call.v),
            ("K", w.key, use.source, slice(plain), call.k[..., :plain]),
            ("Q", w.query, use.query, slice(plain), q[..., :plain]),
            ("the part of Q that turns", turning, use.query, rest, q[..., rest]),
            ("the part of K that turns", shared, None, rest, call.k[..., rest]),
        ):
            own, reach, rounded = _out_of_latent(x, weight, latent, columns)
            if "turns" in name:
                own, reach = _turned(own, reach, use.rotary)
                rounded = rounded.amax(-1, keepdim=True)
            self._same(name, own, got, reach, w.output.dtype, single=True, rounded=rounded)

    def _sharing(self, value: Tensor, reach: Tensor) -> None:
        """Keys and values repeated for the query heads that read them give the same attention."""
        w, call = self.weights, self.captured.call
        keys, values = (w.shared(x.transpose(0, 1)).transpose(0, 1) for x in (call.k, value))
        again = plain(replace(call, k=keys, v=values.to(call.v.dtype))).double()
        # A logit moves by u times its own partial sums, a weight by a factor of that size.
        logits = call.scale * call.q.double().abs() @ keys.double().abs().mT
        size = reach.max() * (1 + logits.max())
        self._same("heads (their groups)", again, self.captured.output, size, w.value.dtype)

    def _output(self) -> None:
        w = self.weights
        heads = self.captured.output.transpose(1, 2)
        each, reach = _sum_of_heads(heads, w.output)
        if w.output_bias is not None:
            each = each + w.output_bias.double()
            reach = reach + w.output_bias.double().abs()
        self._same("O", each, self._seen(self.reading.paths.output), reach, w.output.dtype)

    def norm(
        self,
        what: str,
        norm: NormFold | None,
        path: str,
        stream: Tensor | None,
        used: str = "attention reads",
    ) -> None:
        """The norm at a path gives the stream, and is what it is said to be."""
        if stream is None:
            raise self._wrong(f"{what}: what {used} was not seen")
        if norm is None:
            near = [n for n in self.seen.norms if _equal(self.seen.outputs.get(n), stream)]
            if near:
                raise self._wrong(f"{what}: none is known, but {near[0]} gives what {used}")
            return
        before = self.seen.inputs.get(path)
        if before is None or not _equal(self.seen.outputs.get(path), stream):
            raise self._wrong(f"{what}: {path} does not give what {used}")
        x = before.double()
        reach = norm(x).abs() + norm.size(x)
        self._same(what, norm(x), stream, reach, before.dtype, single=True)

    def _output_norm(self) -> None:
        written, path = self._seen(self.reading.paths.output), self.reading.paths.output_norm
        norm = self.weights.output_norm
        if norm is not None:
            if not _equal(self.seen.inputs.get(path), written):
                raise self._wrong(f"{path} does not norm what attention writes")
            x = written.double()
            own = norm.fold_output(x) / norm.divisor(x)
            own = own if norm.bias is None else own + norm.bias.double()
            reach, what = own.abs() + norm.size(x), "norm of what attention writes"
            self._same(what, own, self.seen.outputs[path], reach, written.dtype, single=True)
            return
        block = self.reading.site.path.rpartition(".")[0]
        for near in self.seen.norms:
            if near.startswith(block) and _equal(self.seen.inputs.get(near), written):
                raise self._wrong(f"{near} norms what attention writes, which is not known")

    def _seen(self, path: str) -> Tensor:
        output = self.seen.outputs.get(path)
        if output is None:
            raise self._wrong(f"its output projection {path!r} was not run")
        return output

    def _same(
        self,
        what: str,
        own: Tensor,
        seen: Tensor,
        reach: Tensor,
        dtype: torch.dtype,
        single: bool = False,
        rounded: Tensor | None = None,
    ) -> None:
        """Equality within the bound of the module's docstring.

        ``rounded``: the size that roundings to half precision on the way are relative to.
        """
        seen = seen.double()
        if own.shape != seen.shape:
            raise self._wrong(f"{what} has shape {tuple(own.shape)}, the model {tuple(seen.shape)}")
        w = self.weights
        width = max(w.query.shape[1], w.value.shape[1], w.heads * w.value.shape[2])
        unit = torch.finfo(dtype).eps / 2
        bound = (width + _STEPS) * min(unit, _SINGLE) * reach
        if unit > _SINGLE:
            largest = seen.abs().amax(-1, keepdim=True)
            largest = largest if rounded is None else largest + rounded
            bound = bound + _ROUNDINGS * unit * largest
        if single:
            bound = bound + _STEPS * _SINGLE * reach
        difference = (own - seen).abs()
        if not bool((difference <= bound).all()):
            raise self._wrong(
                f"{what} from the weights differs from the model's by {float(difference.max()):.3g}"
                f" (largest value {float(seen.abs().max()):.3g})"
            )

    def _wrong(self, found: str) -> ModelError:
        return ModelError(
            f"{self.family}: the weights of {self.reading.site.path} do not validate: {found}",
            to_do=_TO_DO,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """x W + b in float64, ``batch head position width``, and what bounds its partial sums."""
    x, w = x.double()[:, None], weight.double()
    own, reach = x @ w, x.abs() @ w.abs()
    if bias is not None:
        own, reach = own + bias.double()[:, None], reach + bias.double().abs()[:, None]
    return own, reach


def _prepared(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: HeadNorm | None,
    rotary: RotaryUse | None,
    clip: float | None,
) -> tuple[Tensor, Tensor]:
    """Queries or keys as attention uses them, and the size that their rounding is relative to."""
    own, reach = _product(x, weight, bias)
    own = _clipped(own, clip)
    if norm is not None:
        # The division passes on errors as it passes on sizes; its own divisor has them too.
        grown = norm(own)
        axes = (-3, -1) if norm.across else (-1,)
        size = own.square().mean(axes, keepdim=True).sqrt()
        gain = 1.0 if norm.gain is None else norm.gain.double().abs()[:, None]
        reach = gain * reach.amax(axes, keepdim=True) / size.clamp_min(norm.eps**0.5)
        reach, own = 2 * reach * (1 + grown.abs().amax()), grown
    return (own, reach) if rotary is None else _turned(own, reach, rotary)


def _turned(own: Tensor, reach: Tensor, rotary: RotaryUse) -> tuple[Tensor, Tensor]:
    """Queries or keys, rotated; an entry has the errors of its pair's two."""
    positions = torch.arange(own.shape[2], device=own.device)
    inv_freq = rotary.inv_freq.to(own.device)
    turned = rotate(own, positions, inv_freq, layout=rotary.layout, factor=rotary.factor)
    return turned, 2 * max(rotary.factor, 1.0) * reach.amax(-1, keepdim=True)


def _out_of_latent(
    x: Tensor, weight: Tensor, latent: Latent | None, columns: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """x W over the divisor of the latent, ``batch head position width``; what bounds its sums, and
    what roundings of the latent are relative to. ``columns`` are those of W_U. None: x W alone."""
    if latent is None:
        own, reach = _product(x, weight, None)
        return own, reach, torch.zeros_like(own)
    down, up = latent.down.double(), latent.norm.fold(latent.up.double()[..., columns]).abs()
    narrow, sums = x @ down, x.abs() @ down.abs()
    divisor = latent.norm.divisor(narrow)
    # The divisor is moved by the errors of all entries, by no more than the largest.
    moved = (sums + narrow.abs() * sums.amax(-1, keepdim=True) / divisor) / divisor
    rounded = (narrow.abs() / divisor)[:, None] @ up
    own = x[:, None] @ weight.double() / divisor[:, None]
    return own, rounded + moved[:, None] @ up, rounded


def _sum_of_heads(heads: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_h z_h W_O^h, ``batch query d_model``."""
    z, w = heads.double(), output.double()
    return (z @ w).sum(1), (z.abs() @ w.abs()).sum(1)


def _clipped(x: Tensor, clip: float | None) -> Tensor:
    return x if clip is None else x.clamp(-clip, clip)


def _equal(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and a.shape == b.shape and bool(torch.equal(a, b))
