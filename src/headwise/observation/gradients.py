"""One backward pass of the mean next-token loss, and how large its gradient is where.

Memory stays near that of the forward pass: each transformer block is recomputed during the backward
pass instead of keeping its activations, and the loss is taken over short runs of tokens, so that
the logits of a whole text are never held at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headwise.errors import OptionError
from headwise.observation.calling import replaced_forward
from headwise.observation.driver import Document, Driver
from headwise.observation.loaded import LoadedModel
from headwise.observation.loss import LOGITS, asked, cross_entropy, predicted
from headwise.observation.projections import blocks, projection
from headwise.results.records import GradientRecord

__all__ = ["Gradients", "check_loss", "measure_gradients"]


@dataclass(frozen=True, eq=False)
class Gradients:
    """What one backward pass left behind.

    ``loss`` is the mean cross-entropy per predicted token, in nats; ``stream_rms`` the root mean
    square, over tokens and width, of the loss's gradient with respect to each block's output.
    """

    loss: float
    predicted: int  # tokens in the mean
    parameters: tuple[GradientRecord, ...]
    stream_rms: dict[str, float]  # by the block's module path


@dataclass
class _Stream:
    """Sums of squares of the gradient at each block's output."""

    squares: dict[str, float] = field(default_factory=dict)
    elements: dict[str, int] = field(default_factory=dict)

    def absorb(self, name: str, gradient: Tensor) -> None:
        self.squares[name] = self.squares.get(name, 0.0) + _norm(gradient) ** 2
        self.elements[name] = self.elements.get(name, 0) + gradient.numel()

    def rms(self) -> dict[str, float]:
        return {name: (self.squares[name] / self.elements[name]) ** 0.5 for name in self.squares}


def check_loss(loaded: LoadedModel) -> None:
    """Refuse gradients of a model that has no loss: one without a language-model head."""
    if not loaded.driver.has_head:
        raise OptionError(
            f"--gradients needs a loss, and {loaded.name} ({type(loaded.model).__name__}) has no"
            " language-model head",
            to_do="leave --gradients out",
        )
    if loaded.kind == "encoder" and getattr(loaded.tokenizer, "mask_token_id", None) is None:
        raise OptionError(
            f"--gradients of the encoder {loaded.name} needs a tokenizer with a mask token",
            to_do="leave --gradients out",
        )
    if any(parameter.is_meta for parameter in loaded.model.parameters()):
        raise OptionError(
            f"--gradients needs all weights of {loaded.name} in memory, and some are offloaded",
            to_do="leave --gradients out, or take another --device or --dtype",
        )


def measure_gradients(
    loaded: LoadedModel,
    documents: Sequence[Document],
    *,
    progress: Callable[[int, int, str], None] | None = None,
) -> Gradients:
    """The gradient of the mean loss over all documents, in one accumulated backward pass.

        loss = (1 / N) sum_t -ln softmax(logits_t)[token_{t+1}]

    A masked language model predicts every 7th token, hidden from it, instead. The model's own
    gradients, ``requires_grad`` flags and forward methods are put back on leaving.

    Raises:
        OptionError: the model has no language-model head, or no mask token.
    """
    check_loss(loaded)
    total = sum(predicted(loaded, document) for document in documents)
    stream = _Stream()
    loss = 0.0
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_fresh_gradients(loaded.model))
        stack.enter_context(_recomputed(loaded.model, stream))
        driver = loaded.driver
        for done, document in enumerate(documents):
            if progress is not None:
                progress(done, len(documents), "gradients")
            if predicted(loaded, document) == 0:
                continue
            loss += _backward(loaded, driver, document, total)
        records = _records(loaded.model)
    return Gradients(
        loss=loss if total else float("nan"),
        predicted=total,
        parameters=records,
        stream_rms=stream.rms(),
    )


def _backward(loaded: LoadedModel, driver: Driver, document: Document, total: int) -> float:
    """Add one document's share of the gradient; its share of the loss is returned.

    Logits are made for a run of positions at a time.
    """
    ids, at, wanted = asked(loaded, document)
    states, logits = driver.predict(ids, document.target)
    run = max(1, LOGITS // driver.vocabulary)
    gradient, loss = torch.zeros_like(states), 0.0
    for some, tokens in zip(at.split(run), wanted.split(run), strict=True):
        where = some.to(states.device)
        piece = states[:, where].detach().requires_grad_()
        part = cross_entropy(logits(piece)[0], tokens)
        (part / total).backward()
        loss += float(part.detach()) / total
        if piece.grad is not None:
            gradient[:, where] = piece.grad
    states.backward(gradient)
    return loss


def _norm(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(_wide(gradient)))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@contextmanager
def _fresh_gradients(model: nn.Module) -> Iterator[None]:
    """Inside, every parameter takes a gradient and starts without one."""
    kept = [(p, p.requires_grad, p.grad) for p in model.parameters() if p.is_floating_point()]
    try:
        for parameter, _, _ in kept:
            parameter.requires_grad_(True)
            parameter.grad = None
        yield
    finally:
        for parameter, required, gradient in kept:
            parameter.requires_grad_(required)
            parameter.grad = gradient


@contextmanager
def _recomputed(model: nn.Module, stream: _Stream) -> Iterator[None]:
    """Inside, blocks keep no activations and the gradients at their outputs are summed."""
    with ExitStack() as stack:
        for name, _, block in blocks(model):
            stack.enter_context(replaced_forward(block, _checkpointed(block.forward, name, stream)))
        yield


def _checkpointed(forward: Callable[..., Any], name: str, stream: _Stream) -> Callable[..., Any]:
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        output = checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        state = output[0] if isinstance(output, tuple | list) else output
        if isinstance(state, Tensor) and state.requires_grad:
            state.register_hook(lambda gradient: stream.absorb(name, gradient))
        return output

    return recomputing


def _records(model: nn.Module) -> tuple[GradientRecord, ...]:
    records = []
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        block, kind = projection(model, name)
        records.append(
            GradientRecord(
                parameter=name,
                block=block,
                projection=kind,
                norm=_norm(parameter.grad),
                size=parameter.numel(),
            )
        )
    return tuple(records)
