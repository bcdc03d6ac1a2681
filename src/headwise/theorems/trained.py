"""A trained model as the checks see it: its weights, a text, and what was measured over it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
import xarray as xr
from torch import Tensor

from headwise.attention.definition import scores, weights
from headwise.attention.statistics import Statistics
from headwise.circuits.head_weights import head_weights
from headwise.circuits.layer_weights import HeadWeights
from headwise.errors import HeadwiseError
from headwise.observation.attach import observe
from headwise.observation.call import Call
from headwise.observation.driver import Document
from headwise.observation.loaded import LoadedModel
from headwise.observation.pieces import Piece
from headwise.observation.run import scan
from headwise.theorems.statement import NotApplicable

_DENSE: Final = 128  # tokens of which whole matrices are made

__all__ = ["Trained", "TrainedHeads"]


@dataclass(frozen=True, slots=True)
class TrainedHeads:
    """What one self-attention really computed with over the text, and its logits in float64.

    Shapes: q ``head query d_head``, k and v ``head key dim`` (shared heads repeated), ``keep``
    ``query key`` (True: may attend), ``logits`` ``head query key`` after scale, softcap and bias.
    """

    module: str
    role: str  # "decoder" or "encoder"
    q: Tensor
    k: Tensor
    v: Tensor
    keep: Tensor
    logits: Tensor
    sinks: Tensor | None
    scale: float
    plain: bool  # logits are scale · q kᵀ: no softcap, no bias

    def weights(self) -> Tensor:
        """A, ``head query key``, float64."""
        return weights(self.logits[None], self.keep, self.sinks)[0]


class Trained:
    """A model and the first ``tokens`` tokens of a text; everything is measured when asked for.

    Args:
        loaded: from ``load_model``.
        text: None: the text inside the package.
        tokens: how many to read, at most.
        seed: of what is drawn at random.
    """

    def __init__(
        self, loaded: LoadedModel, text: str | None = None, *, tokens: int = 256, seed: int = 0
    ) -> None:
        self.loaded = loaded
        self.text = text
        self.tokens = min(tokens, loaded.context or tokens)
        self.seed = seed

    @property
    def model(self) -> Any:
        """The module."""
        return self.loaded.model

    @property
    def name(self) -> str:
        """Its name."""
        return self.loaded.name

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""
        found: torch.dtype = next(self.model.parameters()).dtype
        return found

    @cached_property
    def scanned(self) -> xr.Dataset:
        """Every statistic of every head over the text, gradients included where there is a loss."""
        try:
            return scan(self.loaded, self.text, tokens=self.tokens, gradients=True).dataset
        except HeadwiseError:
            return scan(self.loaded, self.text, tokens=self.tokens).dataset

    @cached_property
    def heads(self) -> tuple[TrainedHeads, ...]:
        """Every self-attention over the first tokens of the text, layer by layer, whole."""
        found: list[TrainedHeads] = []
        document = self.document(_DENSE)

        def each(module: str, call: Call, piece: Piece, measured: Statistics) -> None:
            if piece.relative and not piece.batch[0]:
                found.append(_whole(module, call, piece))

        with torch.no_grad(), observe(self.model, stream=False, each=each):
            self.loaded.driver.run([document])
        if not found:
            raise NotApplicable("it has no self-attention that can be measured")
        return tuple(found)

    @cached_property
    def weights(self) -> HeadWeights:
        """W_Q, W_K, W_V and W_O of every head."""
        try:
            return head_weights(self.model)
        except HeadwiseError as error:
            raise NotApplicable(f"the weights of its heads are not known: {error}") from None

    @property
    def ids(self) -> Tensor:
        """The tokens of the text, ``1 token``; those of the source of an encoder–decoder."""
        return self.document().ids[None]

    def document(self, tokens: int | None = None) -> Document:
        """The first tokens of the text as the model reads them."""
        names = self.scanned["stream"].to_numpy().astype(str)
        ids = torch.tensor(self.scanned["token_id"].to_numpy().astype("int64"))
        ids = ids.to(next(self.model.parameters()).device)
        streams = list(dict.fromkeys(names.tolist()))
        parts = [ids[torch.tensor(names == name)][:tokens] for name in streams]
        return Document(*parts[:2]) if len(parts) > 1 else Document(parts[0])


def _whole(module: str, call: Call, piece: Piece) -> TrainedHeads:
    q, k, v = (x[:1].double() for x in call.part(piece))
    rows = torch.arange(q.shape[2], device=q.device)
    keys = torch.arange(k.shape[2], device=q.device)
    mask = call.part_mask(piece)
    keep = mask.visible(0, rows[:, None] + piece.offset, keys[None]).expand(len(rows), len(keys))
    bias = call.part_bias(piece)
    if callable(bias) and not isinstance(bias, Tensor):
        bias = bias(0, slice(0, q.shape[1]), rows, range(len(keys)))[None]
    added = None if bias is None else bias.double()
    logits = scores(q, k, scale=call.scale, softcap=call.softcap, bias=added)[0]
    shared = q.shape[1] // k.shape[1]
    return TrainedHeads(
        module=module,
        role=call.self_role(),
        q=q[0],
        k=k[0].repeat_interleave(shared, 0),
        v=v[0].repeat_interleave(shared, 0),
        keep=keep.to(q.device),
        logits=logits,
        sinks=None if call.sinks is None else call.sinks.double(),
        scale=call.scale,
        plain=call.softcap is None and bias is None,
    )
