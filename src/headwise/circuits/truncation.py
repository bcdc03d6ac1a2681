"""What the heads of a model lose when they are cut to rank r: the loss against r, labelled.

Every chosen head at once for each rank; and, where it is asked for, one head at a time at one rank.
What a cut is, and which models it is exact for, stands in ``surgery``.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import xarray as xr
from torch import nn

from headwise.circuits.cuts import Circuit, Cut, find_cuts
from headwise.circuits.head_weights import head_weights
from headwise.circuits.layer_weights import LayerWeights
from headwise.circuits.saving import check_savable, new_folder, save_model
from headwise.circuits.surgery import LossByRank, check_circuits, check_rank, cut_to
from headwise.circuits.truncation_labels import labelled
from headwise.errors import OptionError
from headwise.models.checkpoints import Checkpoint
from headwise.observation.loaded import LoadedModel
from headwise.observation.loss import check_has_loss, mean_loss
from headwise.observation.quiet import quiet
from headwise.observation.reading import default_text
from headwise.observation.run import Progress, memory_said, opened
from headwise.observation.text import Text, tokenize

__all__ = ["TOLERANCE", "Truncation", "parsed_tolerance", "truncate"]

TOLERANCE: Final = "1%"
_OV: Final[tuple[Circuit, ...]] = ("ov",)


@dataclass(frozen=True, eq=False)
class Truncation:
    """The loss against the rank of the heads, and the smallest rank within the tolerance.

    Attributes:
        dataset: ``loss``, ``change`` and ``parameters`` (rank), ``energy`` (matrix, rank, layer,
            head), the share Σ_{i≤r} σ_i² / Σ σ_i² that is kept; ``change_alone`` (layer, head)
            where heads were cut one at a time. Layers are numbered as in
            ``head_weights(model).layers``.
        losses: the same losses by rank, and that of the whole model.
        tolerance: in nats per token.
        suggested: the smallest rank from which on no measured rank costs more than the tolerance;
            None where the largest does.
        saved: the folder of the cut model, if it was written.

    Example:
        >>> import headwise as hw
        >>> found = hw.truncate(tokens=64, ranks=[1, 32])
        >>> found.losses.ranks, found.suggested, found.dataset["energy"].sel(rank=32).min().item()
        ((1, 32), 32, 1.0)
    """

    dataset: xr.Dataset
    losses: LossByRank
    tolerance: float
    suggested: int | None
    saved: Path | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of the run: model, tokens, whole loss, heads, …"""
        found: dict[str, Any] = json.loads(self.dataset.attrs["about"])
        return found


def truncate(
    model_or_path: str | Path | nn.Module | LoadedModel | Checkpoint | None = None,
    text: Text | None = None,
    *,
    ranks: Iterable[int] | None = None,
    circuits: Collection[Circuit] | None = None,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
    folded: bool = False,
    tolerance: float | str | None = None,
    each: int | None = None,
    save: str | Path | None = None,
    save_rank: int | None = None,
    tokens: int | None = None,
    window: int | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Truncation:
    """Cut W_QK and/or W_OV of the chosen heads to each rank, and measure the loss of a text.

    W_r = U_r U_rᵀ W, the nearest product of rank r (Eckart and Young). The model is left as it was,
    bit for bit. One reading of the text per rank, and one per head with ``each``.

    Args:
        model_or_path: see ``scan``; None: the small trained model inside the package.
        text: see ``scan``; None: the text that ships with the package.
        ranks: each from 1 to d_head (None: 1, 2, 4, …, d_head).
        circuits: "qk", "ov" or both (None: W_OV alone). W_QK of rotary models is refused: it is
            another matrix at every distance.
        layers: numbers of the layers (None: all).
        heads: numbers of the heads in each of them (None: all).
        folded: W_OV with the gain of the norm before it.
        tolerance: how much the loss may rise: nats per token, or a share of the loss of the whole
            model, such as "2%" (None: "1%").
        each: also cut one head at a time, to this rank.
        save: a new folder for the model cut to the suggested rank; nothing is written where no rank
            is within the tolerance.
        save_rank: the rank of what is saved, whatever is suggested.
        tokens, window: see ``scan``.
        dtype, device, trust_remote_code: see ``load_model``.
        progress: called with (done, total, what).

    Raises:
        OptionError: a rank, layer, head or tolerance that is not there, or a circuit that cannot be
            cut exactly; the reason is named.
        ModelError: the model has no language-model head, or could not be loaded again once saved.
        TextError: a text without a token to predict.
        FileError: the folder cannot be written.

    Example:
        >>> found = truncate(tokens=64, ranks=[1, 32])
        >>> found.dataset["change"].sel(rank=1).item() > 0.1, found.suggested
        (True, 32)
    """
    chosen_circuits = check_circuits(_OV if circuits is None else circuits)
    tolerance = TOLERANCE if tolerance is None else tolerance
    parsed_tolerance(tolerance)
    if save_rank is not None and save is None:
        raise OptionError("a rank to save is named", to_do="name the folder: --save DIR")
    if save is not None:
        new_folder(save)
    loaded = opened(model_or_path, dtype, device, trust_remote_code)
    check_has_loss(loaded)
    found = head_weights(loaded.model, validate=False).layers
    chosen = _chosen(found, layers, heads)
    wanted = _ranks(ranks, _width(found, chosen, chosen_circuits), (each, save_rank))
    read = default_text() if text is None else text
    documents = tokenize(loaded, read, tokens=tokens, window=window)
    told = progress or (lambda done, total, what: None)
    total = 1 + len(wanted) + (0 if each is None else len(chosen))
    with memory_said(loaded), quiet():
        told(0, total, "singular directions")
        cuts = find_cuts(loaded.model, chosen_circuits, chosen, folded)
        if save is not None:
            check_savable(loaded, cuts)
        reading = _Reading(loaded, documents, told, total)
        losses = reading.by_rank(cuts, wanted)
        alone = None if each is None else reading.by_head(cuts, each, losses.whole)
    allowed = _nats(tolerance, losses.whole)
    suggested = losses.smallest(allowed)
    kept = save_rank or suggested
    if save is not None and kept is not None:
        with cut_to(kept, cuts):
            saved: Path | None = save_model(loaded, save)
    else:
        saved = None
    facts = {
        "model": loaded.name,
        "architecture": loaded.architecture,
        "tokens": sum(document.tokens for document in documents),
        "whole": losses.whole,
        "tolerance": tolerance,
        "folded": folded,
        "each": each,
        "heads": len(chosen),
        "notes": list(loaded.notes),
    }
    dataset = labelled(found, cuts, losses, alone, facts)
    return Truncation(dataset, losses, allowed, suggested, saved)


def parsed_tolerance(tolerance: float | str) -> tuple[float, bool]:
    """The number, and whether it is a share of the loss: ``"1%"`` is (0.01, True).

    Raises:
        OptionError: it is no number, not finite, or below 0.

    Example:
        >>> parsed_tolerance("1%"), parsed_tolerance("0.02"), parsed_tolerance(0)
        ((0.01, True), (0.02, False), (0.0, False))
    """
    text = str(tolerance).strip()
    share = text.endswith("%")
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise OptionError(
            f"the tolerance is {tolerance}",
            allowed="0 or more nats per token, such as 0.02, or a share of the loss, such as 1%",
        )
    return value / 100 if share else value, share


def _nats(tolerance: float | str, whole: float) -> float:
    value, share = parsed_tolerance(tolerance)
    return value * whole if share else value


class _Reading:
    """The same documents read again and again, and how far that is."""

    def __init__(
        self, loaded: LoadedModel, documents: Sequence[Any], told: Progress, total: int
    ) -> None:
        self.loaded, self.documents, self.told, self.total = loaded, documents, told, total
        self.done = 0

    def loss(self, what: str) -> float:
        self.told(self.done, self.total, what)
        self.done += 1
        return mean_loss(self.loaded, self.documents)

    def by_rank(self, cuts: Sequence[Cut], ranks: Sequence[int]) -> LossByRank:
        """One reading of the whole model, one per rank."""
        whole = self.loss("the whole model")
        losses = []
        for rank in ranks:
            with cut_to(rank, cuts):
                losses.append(self.loss(f"rank {rank}"))
        return LossByRank(tuple(ranks), tuple(losses), whole)

    def by_head(self, cuts: Sequence[Cut], rank: int, whole: float) -> dict[tuple[int, int], float]:
        """The change of the loss with one head at the rank and the others as they are."""
        parts: dict[tuple[int, int], list[Cut]] = defaultdict(list)
        for cut in cuts:
            for place, head in enumerate(cut.heads):
                parts[cut.layer, head].append(cut.alone(place))
        changes = {}
        for number, (at, some) in enumerate(parts.items()):
            with cut_to(rank, some):
                loss = self.loss(f"head {number + 1} of {len(parts)}")
            changes[at] = loss - whole
        return changes


def _chosen(
    found: Sequence[LayerWeights], layers: Iterable[int] | None, heads: Iterable[int] | None
) -> list[tuple[int, int]]:
    """(layer, head) of the layers with these numbers that have these heads."""
    numbers = sorted({layer.number for layer in found})
    wanted = set(numbers) if layers is None else {int(number) for number in layers}
    _check_named("layer", wanted, numbers)
    most = max(layer.heads for layer in found if layer.number in wanted)
    named = set(range(most)) if heads is None else {int(head) for head in heads}
    _check_named("head", named, range(most))
    return [
        (i, head)
        for i, layer in enumerate(found)
        if layer.number in wanted
        for head in sorted(named)
        if head < layer.heads
    ]


def _check_named(what: str, wanted: Collection[int], there: Collection[int]) -> None:
    wrong = sorted(set(wanted) - set(there))
    if wrong or not wanted:
        named = f"the model has no {what} {wrong[0]}" if wrong else f"no {what} is named"
        raise OptionError(named, allowed=f"{min(there)} to {max(there)}")


def _width(
    found: Sequence[LayerWeights], chosen: Iterable[tuple[int, int]], circuits: Collection[Circuit]
) -> int:
    """The largest rank that every chosen head can be cut to."""
    layers = [found[i] for i in {i for i, _ in chosen}]
    widths = [layer.query.shape[-1] for layer in layers if "qk" in circuits]
    return min([*widths, *(layer.value.shape[-1] for layer in layers if "ov" in circuits)])


def _ranks(ranks: Iterable[int] | None, most: int, others: Iterable[int | None]) -> list[int]:
    """The ranks to measure, smallest first, each once; refused before anything is computed."""
    if ranks is None:
        found = [*(2**i for i in range(most.bit_length()) if 2**i < most), most]
    else:
        found = list(ranks)
    if not found:
        raise OptionError("no rank is named", allowed="one or more")
    for rank in [*found, *(each for each in others if each is not None)]:
        check_rank(rank, most)
    return sorted(set(found))
