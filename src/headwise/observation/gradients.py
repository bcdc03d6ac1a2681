"""One backward pass of the mean next-token loss, and how large its gradient is where.

Memory stays near that of the forward pass: each transformer block is recomputed during the backward
pass instead of keeping its activations, and the loss is taken over short runs of tokens, so that
the logits of a whole text are never held at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from headwise.errors import OptionError
from headwise.observation.loading import LoadedModel, input_device
from headwise.observation.projections import blocks, projection
from headwise.observation.text import Document
from headwise.results.records import GradientRecord

__all__ = ["Gradients", "check_loss", "measure_gradients"]

# The largest array of logits held at once, in elements (64 MiB in float32).
_LOGITS: Final = 1 << 24

# Of a masked language model, every 7th token is hidden: 14 %, BERT was trained with 15 %.
_HIDE_EVERY: Final = 7
_HIDE_FIRST: Final = 3


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
    if loaded.model.get_output_embeddings() is None:
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
    total = sum(_predicted(loaded, document) for document in documents)
    stream = _Stream()
    loss = 0.0
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_fresh_gradients(loaded.model))
        stack.enter_context(_recomputed(loaded.model, stream))
        body = _separable_body(loaded)
        for done, document in enumerate(documents):
            if progress is not None:
                progress(done, len(documents), "gradients")
            if _predicted(loaded, document) == 0:
                continue
            loss += _backward(loaded, document, body, total)
        records = _records(loaded.model)
    return Gradients(
        loss=loss if total else float("nan"),
        predicted=total,
        parameters=records,
        stream_rms=stream.rms(),
    )


def _predicted(loaded: LoadedModel, document: Document) -> int:
    if loaded.kind == "encoder":
        return int(_hidden(loaded, document.ids).sum())
    read = document.ids if document.target is None else document.target
    return len(read) - 1


def _hidden(loaded: LoadedModel, ids: Tensor) -> Tensor:
    """Which tokens a masked language model has to predict: ``(n,)`` bool, special tokens never."""
    chosen = torch.arange(len(ids)) % _HIDE_EVERY == _HIDE_FIRST
    special = torch.tensor(loaded.tokenizer.all_special_ids if loaded.tokenizer else [-1])
    return chosen & ~torch.isin(ids, special)


def _backward(loaded: LoadedModel, document: Document, body: Any | None, total: int) -> float:
    """Add one document's share of the gradient; its share of the loss is returned."""
    model = loaded.model
    device = input_device(model)
    ids = document.ids[None].to(device)
    if body is not None:
        return _backward_in_runs(model, body, ids, total)
    if loaded.kind == "encoder":
        chosen = _hidden(loaded, document.ids).to(device)
        masked = ids.masked_fill(chosen, loaded.tokenizer.mask_token_id)  # type: ignore[union-attr]
        logits, wanted = model(input_ids=masked).logits[0, chosen], ids[0, chosen]
    elif document.target is not None:
        target = document.target[None].to(device)
        output = model(input_ids=ids, decoder_input_ids=target, use_cache=False)
        logits, wanted = output.logits[0, :-1], target[0, 1:]
    else:
        logits, wanted = model(input_ids=ids, use_cache=False).logits[0, :-1], ids[0, 1:]
    loss = _cross_entropy(logits, wanted) / total
    loss.backward()
    return float(loss.detach())


def _backward_in_runs(model: Any, body: Any, ids: Tensor, total: int) -> float:
    """The same, with the logits of a run of tokens at a time.

    The model's own code after its body (scaling, soft caps, the head) is kept: the body is made to
    answer with a run of the states that it has computed before.
    """
    output = body(input_ids=ids, use_cache=False)
    states = output.last_hidden_state
    vocabulary = model.get_output_embeddings().weight.shape[0]
    run = max(1, _LOGITS // int(vocabulary))
    gradients, loss = [], 0.0
    for start in range(0, states.shape[1], run):
        piece = states[:, start : start + run].detach().requires_grad_()
        wanted = ids[0, start + 1 : start + run + 1]
        answer = type(output)(**{**output, "last_hidden_state": piece})
        with _answering(body, answer):
            logits = model(input_ids=ids[:, start : start + run], use_cache=False).logits
        part = _cross_entropy(logits[0, : len(wanted)], wanted)
        (part / total).backward()
        loss += float(part.detach()) / total
        gradients.append(torch.zeros_like(piece) if piece.grad is None else piece.grad)
    states.backward(torch.cat(gradients, 1))
    return loss


def _cross_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    """The sum over tokens, in float32 or better."""
    return F.cross_entropy(_wide(logits), wanted.to(logits.device), reduction="sum")


def _norm(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(_wide(gradient)))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@contextmanager
def _answering(body: nn.Module, answer: Any) -> Iterator[list[int]]:
    """Inside, the module returns ``answer`` whatever it is given; yields the list of its calls."""
    calls: list[int] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return answer

    with _forward(body, forward):
        yield calls


@contextmanager
def _forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, the module's forward is another function; what the instance had is put back."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.forward = own


def _separable_body(loaded: LoadedModel) -> Any | None:
    """The module under the head, when the model calls it as a whole; None when it does not."""
    model = loaded.model
    body = getattr(model, model.base_model_prefix, None)
    if loaded.kind != "decoder" or not isinstance(body, nn.Module) or body is model:
        return None
    ids = torch.zeros(1, 2, dtype=torch.long, device=input_device(model))
    with torch.no_grad():
        answer = body(input_ids=ids, use_cache=False)
        if getattr(answer, "last_hidden_state", None) is None:
            return None
        with _answering(body, answer) as calls:
            model(input_ids=ids, use_cache=False)
    return body if calls else None


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
            stack.enter_context(_forward(block, _checkpointed(block.forward, name, stream)))
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
