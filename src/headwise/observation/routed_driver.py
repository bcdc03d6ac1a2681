"""transformers' models, run over documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from headwise.observation.architecture import model_kind
from headwise.observation.calling import replaced_forward
from headwise.observation.driver import Document, side_by_side

__all__ = ["RoutedDriver", "input_device"]


class RoutedDriver:
    """A model of transformers."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @property
    def vocabulary(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def start_token(self) -> int | None:
        names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
        values = (getattr(self.model.config, name, None) for name in names)
        return next((value for value in values if isinstance(value, int)), None)

    @property
    def has_head(self) -> bool:
        return self.model.get_output_embeddings() is not None

    @cached_property
    def _kind(self) -> str:
        return model_kind(self.model)

    @cached_property
    def _body(self) -> nn.Module | None:
        body = getattr(self.model, self.model.base_model_prefix, None)
        return body if isinstance(body, nn.Module) else None

    def run(self, documents: Sequence[Document]) -> None:
        """Read the documents side by side; the body runs alone where the model has one."""
        inputs = self._padded("", [document.ids for document in documents])
        if self._kind == "encoder-decoder":
            targets = [document.target for document in documents if document.target is not None]
            inputs |= self._padded("decoder_", targets)
        cached = {} if self._kind == "encoder" else {"use_cache": False}
        (self._body or self.model)(**inputs, **cached)

    def _padded(self, prefix: str, rows: Sequence[Tensor]) -> dict[str, Tensor]:
        fill = getattr(self.model.config.get_text_config(), "pad_token_id", None)
        ids, real = side_by_side(rows, input_device(self.model), fill or 0)
        inputs = {f"{prefix}input_ids": ids}
        if real is not None:
            inputs[f"{prefix}attention_mask"] = real.long()
        return inputs

    def predict(
        self, ids: Tensor, target: Tensor | None
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """States of the body, and the model's own code after it; or logits as they are.

        The model's own code after its body (scaling, soft caps, the head) is kept: the body is
        made to answer with the states it is asked about.
        """
        model, device = self.model, input_device(self.model)
        row = ids[None].to(device)
        body = self._separable_body
        if body is None:
            more: dict[str, Any] = {} if self._kind == "encoder" else {"use_cache": False}
            if target is not None:
                more["decoder_input_ids"] = target[None].to(device)
            return model(input_ids=row, **more).logits, lambda logits: logits
        output = body(input_ids=row, use_cache=False)

        def logits(piece: Tensor) -> Tensor:
            answer = type(output)(**{**output, "last_hidden_state": piece})
            with _answering(body, answer):
                found: Tensor = model(input_ids=row[:, : piece.shape[1]], use_cache=False).logits
            return found

        return output.last_hidden_state, logits

    @cached_property
    def _separable_body(self) -> Any | None:
        """The module under the head, when the model calls it as a whole; None when it does not."""
        body = self._body
        if self._kind != "decoder" or body is None or body is self.model:
            return None
        ids = torch.zeros(1, 2, dtype=torch.long, device=input_device(self.model))
        with torch.no_grad():
            answer = body(input_ids=ids, use_cache=False)
            if getattr(answer, "last_hidden_state", None) is None:
                return None
            with _answering(body, answer) as calls:
                self.model(input_ids=ids, use_cache=False)
        return body if calls else None


def input_device(model: Any) -> torch.device:
    """Where token ids have to be: the device of the embedding, also when its weights are offloaded.

    Example:
        >>> from transformers import GPT2Config, GPT2Model
        >>> input_device(GPT2Model(GPT2Config(n_embd=6, n_head=2, n_layer=1, vocab_size=11)))
        device(type='cpu')
    """
    embedding = model.get_input_embeddings()
    device: torch.device = embedding.weight.device
    if device.type != "meta":
        return device
    return torch.device(embedding._hf_hook.execution_device)  # accelerate loads them from there


@contextmanager
def _answering(body: nn.Module, answer: Any) -> Iterator[list[int]]:
    """Inside, the module returns ``answer`` whatever it is given; yields the list of its calls."""
    calls: list[int] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return answer

    with replaced_forward(body, forward):
        yield calls
