"""What fine-tuning did to every head: the change of W_QK and of W_OV, exact and as thin factors.

    W'_Q W'_Kᵀ − W_Q W_Kᵀ = [ΔW_Q, W_Q] [W'_K, ΔW_K]ᵀ          rank <= 2 d_head
    W'_V W'_O − W_V W_O   = [ΔW_V, W_V] [W'_O; ΔW_O]           rank <= 2 d_value

Equal to [W'_Q, W_Q] [W'_K, −W_K]ᵀ, without its cancellation: a change a thousand times smaller
than the weights keeps all its digits. With rotary positions this is the change at distance 0.
Biases and norms are not in it (norms are with ``folded``).

Hu et al. 2021 (arXiv:2106.09685), section 7: the same questions, of single matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from headwise.circuits.change import Change
from headwise.circuits.factored import Factored
from headwise.circuits.head_weights import head_weights
from headwise.circuits.layer_weights import HeadWeights, LayerWeights
from headwise.circuits.matrices import check_finite
from headwise.errors import ModelError, NonFiniteError, ShapeError
from headwise.models.checkpoints.adapters import load_adapter
from headwise.models.checkpoints.peft import load_peft
from headwise.models.low_rank import LowRankLinear, remove_low_rank
from headwise.observation.driver import is_own

__all__ = ["LayerChange", "adapter_difference", "difference"]

_PARTS = ("query", "key", "value", "output")
_UNITS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}


@dataclass(frozen=True, eq=False)
class LayerChange:
    """The changes in one attention module.

    ``deltas``: ΔW_Q, ΔW_K, ΔW_V, ΔW_O by name, float64, in the shapes of ``LayerWeights``.
    """

    base: LayerWeights
    deltas: Mapping[str, Tensor]
    unit: float  # of the rounding that the stored weights carry

    @property
    def qk(self) -> Change:
        """The change of W_QK, ``head d_model d_model``."""
        shared = self.base.shared
        query, key = self.base.query.double(), shared(self.base.key.double())
        d_query, d_key = self.deltas["query"], shared(self.deltas["key"])
        product = _product(d_query, query, (key + d_key).mT, d_key.mT)
        return Change(product, self.base.qk(), self._noise(query + d_query, key + d_key))

    @property
    def ov(self) -> Change:
        """The change of W_OV, ``head d_model d_model``."""
        shared = self.base.shared
        value, output = shared(self.base.value.double()), self.base.output.double()
        d_value, d_output = shared(self.deltas["value"]), self.deltas["output"]
        product = _product(d_value, value, output + d_output, d_output)
        return Change(product, self.base.ov(), self._noise(value + d_value, output + d_output))

    def part(self, name: str) -> Change:
        """The change of one of W_Q, W_K, W_V, W_O by heads (``query``, ``key``: the kv heads)."""
        delta, base = self.deltas[name], getattr(self.base, name).double()
        eye = torch.eye(delta.shape[-1], dtype=torch.float64, device=delta.device)
        size = torch.linalg.matrix_norm(base + delta)
        return Change(Factored(delta, eye), Factored(base, eye), self.unit * size)

    def like_noise(self, seed: int = 0) -> LayerChange:
        """The control: each ΔW of each head replaced by iid Gaussian noise of the same norm.

        What fine-tuning concentrates in few directions, noise spreads out: compare ``energy``.
        """
        generator = torch.Generator().manual_seed(seed)
        deltas = {}
        for name, delta in self.deltas.items():
            noise = torch.randn(delta.shape, generator=generator, dtype=torch.float64)
            noise = noise.to(delta.device)
            size = torch.linalg.matrix_norm(delta) / torch.linalg.matrix_norm(noise)
            deltas[name] = noise * size[:, None, None]
        return LayerChange(self.base, deltas, 0.0)

    def _noise(self, left: Tensor, right: Tensor) -> Tensor:
        """‖E_L W_R + W_L E_R‖₂ <= 2u ‖W_L‖_F ‖W_R‖_F, for weights rounded by |E| <= u|W|."""
        return 2 * self.unit * torch.linalg.matrix_norm(left) * torch.linalg.matrix_norm(right)


def difference(
    base: HeadWeights, tuned: HeadWeights, *, folded: bool = False
) -> tuple[LayerChange, ...]:
    """The change of every head between two checkpoints of one model, layer by layer.

    Args:
        base, tuned: before and after.
        folded: with the norms before attention in the weights.

    Raises:
        ShapeError: the two are not of one model; the first mismatch is named.
        ModelError: heads of latent attention, whose W_K and W_V are products.
        NonFiniteError: a weight is NaN or infinite; the module is named.

    Example:
        >>> from headwise.models import build, preset
        >>> model = build(preset("tiny"))
        >>> other = build(preset("tiny"))
        >>> _ = other.load_state_dict(model.state_dict())
        >>> with torch.no_grad():
        ...     _ = other.decoder.blocks[0].attention.branch.query.weight[:8].mul_(1.5)  # head 0
        >>> first, *_ = difference(head_weights(model), head_weights(other))
        >>> [round(x, 6) for x in first.qk.relative().tolist()]
        [0.5, 0.0, 0.0, 0.0]
    """
    if len(base.layers) != len(tuned.layers):
        raise ShapeError(
            f"{len(base.layers)} attention modules in the base and {len(tuned.layers)} in the other"
            " checkpoint",
            allowed="two checkpoints of one model",
        )
    pairs = list(zip(base.layers, tuned.layers, strict=True))
    for before, after in pairs:
        _check_pair(before, after)
    return tuple(_layer_change(before, after, folded) for before, after in pairs)


def adapter_difference(
    model: nn.Module,
    folder: str | Path,
    *,
    folded: bool = False,
) -> tuple[LayerChange, ...]:
    """The change of every head by a PEFT LoRA adapter: W' = W + s·B·A, summed in float64.

    The model is as it was afterwards, bit for bit.

    Args:
        model: the adapter's base, without an adapter: a transformers model, or the same as one of
            Headwise's own.
        folder: with adapter_config.json and adapter_model.safetensors.
        folded: with the norms before attention in the weights.

    Raises:
        ModelError: the adapter is of another base (the shapes are named), or of another kind.
        NonFiniteError: a NaN or an infinity in a weight or a factor, by name and place.

    Example:
        >>> import json, tempfile
        >>> from safetensors.torch import save_file
        >>> from headwise.models import build, preset
        >>> folder = Path(tempfile.mkdtemp())
        >>> path = "decoder.blocks.1.attention.branch.query"
        >>> config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": [path]}
        >>> _ = (folder / "adapter_config.json").write_text(json.dumps(config))
        >>> factors = {"A": torch.randn(3, 32), "B": torch.randn(32, 3)}
        >>> named = {f"base_model.model.{path}.lora_{x}.weight": t for x, t in factors.items()}
        >>> save_file(named, folder / "adapter_model.safetensors")
        >>> found = adapter_difference(build(preset("tiny")), folder)
        >>> [layer.qk.rank().tolist() for layer in found[:2]]
        [[0, 0, 0, 0], [3, 3, 3, 3]]
    """
    base = head_weights(model)
    with _adapted(model, folder):
        tuned = head_weights(model, validate=False)
    return difference(base, tuned, folded=folded)


@contextmanager
def _adapted(model: nn.Module, folder: str | Path) -> Iterator[None]:
    """Inside, projections with an adapter hold W + s·B·A in float64."""
    asked = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    swapped: dict[int, tuple[nn.Module, nn.Parameter]] = {}
    try:
        paths = load_adapter(model, folder) if is_own(model) else load_peft(model, folder)
        adapters = [model.get_submodule(path) for path in paths]
        for path, adapter in zip(paths, adapters, strict=True):
            for side in "AB":
                factor: Tensor = getattr(adapter, side)
                check_finite(f"lora_{side} of {path} in {folder}", factor.detach())
        remove_low_rank(model)
        for adapter in adapters:
            assert isinstance(adapter, LowRankLinear)
            if id(adapter.base) in swapped:
                continue
            change = adapter.scale * (adapter.B.double() @ adapter.A.double())
            stored: nn.Parameter = adapter.base.weight  # type: ignore[assignment]
            total = stored.double() + (change.T if adapter.transposed else change)
            swapped[id(adapter.base)] = (adapter.base, stored)
            adapter.base.weight = nn.Parameter(total.detach(), requires_grad=False)
        yield
    finally:
        for module, parameter in swapped.values():
            module.weight = parameter
        for parameter, needed in asked:
            parameter.requires_grad_(needed)


def _check_pair(before: LayerWeights, after: LayerWeights) -> None:
    if before.latent is not None or after.latent is not None:
        raise ModelError(
            f"keys and values of {before.module} are products of two matrices and a norm (latent"
            " attention), so what rounding adds to their change is not bounded",
            allowed="models whose heads have matrices of their own",
            to_do="take the circuits without a base or an adapter",
        )
    for name in _PARTS:
        a, b = getattr(before, name), getattr(after, name)
        if before.role != after.role or a.shape != b.shape:
            what = f"{before.role} {name} weights (head, …) {tuple(a.shape)}"
            other = f"{after.role} ones {tuple(b.shape)}"
            raise ShapeError(
                f"{before.module} has {what}, and {after.module} of the other checkpoint {other}",
                allowed="two checkpoints of one model",
            )
        for which, layer, weight in (("base", before, a), ("other checkpoint", after, b)):
            if not bool(torch.isfinite(weight).all()):
                raise NonFiniteError(
                    f"the {name} weights of {layer.module} in the {which} hold NaN or infinity"
                )


def _layer_change(before: LayerWeights, after: LayerWeights, folded: bool) -> LayerChange:
    unit = max(_unit(layer, name) for layer in (before, after) for name in _PARTS)
    if folded:
        before, after = before.folded(), after.folded()
    deltas = {n: getattr(after, n).double() - getattr(before, n).double() for n in _PARTS}
    return LayerChange(before, deltas, unit)


def _unit(layer: LayerWeights, name: str) -> float:
    return _UNITS.get(getattr(layer, name).dtype, 2.0**-53)


def _product(d_left: Tensor, left: Tensor, right: Tensor, d_right: Tensor) -> Factored:
    """ΔL R' + L ΔR, without the half that did not change."""
    if not bool(d_right.any()):
        return Factored(d_left, right)
    if not bool(d_left.any()):
        return Factored(left, d_right)
    return Factored(torch.cat((d_left, left), -1), torch.cat((right, d_right), -2))
