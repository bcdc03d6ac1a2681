"""One step of training: the gradient of the mean loss over the global batch, clipped, and AdamW.

    loss = Σ ℓ / N over the counted tokens of the whole batch, N their number

N is known before the first micro-batch, so accumulation over micro-batches and processes gives the
gradient of the one big batch, however unevenly the counted tokens fall. Loshchilov & Hutter 2019
(arXiv:1711.05101); clipping by the global norm: Pascanu et al. 2013 (arXiv:1211.5063).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from headwise.attention.masks import Documents
from headwise.errors import OptionError
from headwise.training.config import TrainConfig
from headwise.training.data import Batch, Batches
from headwise.training.objective import next_token_loss
from headwise.training.processes import Processes

__all__ = ["Objective", "Step", "Stepper", "autocast", "optimizer_of"]


class Objective(nn.Module):
    """A decoder and its loss: Σ w ℓ over a batch, and every ℓ (``batch position``, detached)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._unembedding = _unembedding_parameters(model)

    def forward(
        self, ids: Tensor, targets: Tensor, weights: Tensor, documents: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        mask = None if documents is None else Documents(documents)
        hidden = self.model.hidden(ids, mask=mask)
        loss, each = next_token_loss(
            hidden.flatten(0, 1),
            targets.flatten(),
            weights.flatten(),
            self.model.unembed,
            self._unembedding,
        )
        return loss, each.view(targets.shape)


@dataclass(frozen=True)
class Step:
    """What a step found: mean losses on text and on repeated tokens (None: none), gradient norm.

    ``tokens`` counts the inputs of the global batch. ``stop`` says that a process was asked to.
    """

    loss: float
    repeated_loss: float | None
    objective: float
    grad_norm: float
    tokens: int
    stop: bool


class Stepper:
    """Takes the steps of a run: step t is a function of the weights, the moments and t alone.

    ``objective`` is the module whose call is a forward pass.
    """

    def __init__(self, model: Any, batches: Batches, config: TrainConfig, here: Processes) -> None:
        share = here.count * config.accumulate
        if config.batch % share:
            raise OptionError(
                f"a batch of {config.batch} over {here.count} processes and {config.accumulate}"
                " micro-batches",
                allowed=f"a multiple of {share}",
            )
        self.model = model
        self.optimizer = optimizer_of(model, config)
        self._batches = batches
        self._config = config
        self._here = here
        self.objective = Objective(model)
        self._objective: nn.Module = self.objective
        if here.count > 1:
            self._objective = DistributedDataParallel(self.objective)

    def micro_batches(self, step: int) -> list[Batch]:
        """The part of the global batch that this process computes, in micro-batches."""
        size = self._config.batch // (self._here.count * self._config.accumulate)
        first = self._here.rank * self._config.accumulate
        places = (first + i for i in range(self._config.accumulate))
        return [self._batches.at(step, range(size * i, size * (i + 1))) for i in places]

    def gradient(self, step: int, *, stop: bool = False) -> Step:
        """Put the gradient of step ``step`` into the parameters, clipped; nothing is updated."""
        # What dropout draws is a function of the step too, so nothing of it has to be saved.
        key = [self._config.seed, step, self._here.rank]
        torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1))
        device = self._here.device
        mine = self.micro_batches(step)
        counts = torch.tensor(
            [sum(int(b.counted.sum()) for b in mine), int(stop)], dtype=torch.float64
        )
        counted, stops = self._here.sum(counts.to(device, _wide(device))).tolist()
        self.optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(4, dtype=_wide(device), device=device)
        for i, batch in enumerate(mine):
            with self._without_sync(last=i == len(mine) - 1):
                sums += self._pull(batch, counted)
        text, text_count, repeated, repeated_count = self._here.sum(sums).tolist()
        norm = nn.utils.clip_grad_norm_(
            self.model.parameters(), self._config.clip or float("inf"), foreach=None
        )
        return Step(
            loss=text / text_count if text_count else float("nan"),
            repeated_loss=repeated / repeated_count if repeated_count else None,
            objective=(text + repeated) / counted,
            grad_norm=float(norm),
            tokens=self._config.batch * self._config.context,
            stop=bool(stops),
        )

    def update(self, lr: float) -> None:
        """Move the weights along the gradient that stands in the parameters."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def _pull(self, batch: Batch, counted: float) -> Tensor:
        """The backward pass of a micro-batch; sums and counts of loss on text and on repeats."""
        documents = batch.documents if batch.documents.any() else None  # else plain causal
        ids, targets, counts, text = (part.to(self._here.device) for part in batch[:4])
        # DDP takes the mean over processes, and the loss is a mean over all their tokens.
        weights = counts * (self._here.count / counted)
        with autocast(self._config, self._here.device):
            loss, each = self._objective(ids, targets, weights.float(), documents)
        loss.backward()
        each = torch.where(counts, each.to(_wide(each.device)), 0)
        of_text = text[:, None] & counts
        on_text, all_text = (each * of_text).sum(), of_text.sum()
        return torch.stack((on_text, all_text, each.sum() - on_text, counts.sum() - all_text))

    def _without_sync(self, *, last: bool) -> AbstractContextManager[Any]:
        if isinstance(self._objective, DistributedDataParallel) and not last:
            return self._objective.no_sync()
        return nullcontext()


def autocast(config: TrainConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Matrix products in bfloat16 where the config asks for it; weights and losses stay float32.

    Raises:
        OptionError: the device has no bfloat16.
    """
    if config.precision == "float32":
        return nullcontext()
    lacking = device.type == "mps" or (
        device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    )
    if lacking:
        raise OptionError(
            f"precision bfloat16 on {device}, which does not have it", allowed="float32 there"
        )
    return torch.autocast(device.type, dtype=torch.bfloat16)


def optimizer_of(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW, fused, with weight decay on matrices that are not embeddings (or on everything)."""
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    decayed: list[Tensor] = []
    plain: list[Tensor] = []
    for parameter in model.parameters():
        decays = config.decay_all or (parameter.dim() > 1 and id(parameter) not in tables)
        (decayed if decays else plain).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )


def _unembedding_parameters(model: Any) -> list[Tensor]:
    """The parameters that the logits depend on once the hidden states are given."""
    reference = next(model.parameters())
    width = model.architecture.d_model
    with torch.enable_grad():
        logits = model.unembed(reference.new_zeros(1, width))
        candidates = list(model.parameters())
        found = torch.autograd.grad(logits.sum(), candidates, allow_unused=True)
    return [p for p, gradient in zip(candidates, found, strict=True) if gradient is not None]


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
