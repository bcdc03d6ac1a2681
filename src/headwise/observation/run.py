"""The main loop: load a model, read a text, measure every attention call, and say what was done."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from headwise.errors import OptionError, ResourceError
from headwise.models.checkpoints import Checkpoint
from headwise.models.embedded import embedded_model
from headwise.observation.attach import observe
from headwise.observation.driver import Document
from headwise.observation.evaluating import evaluating
from headwise.observation.gradients import Gradients, check_loss, measure_gradients
from headwise.observation.loading import LoadedModel, load_model, wrap_model
from headwise.observation.projections import blocks
from headwise.observation.quiet import quiet
from headwise.observation.reading import default_text
from headwise.observation.recorder import Each
from headwise.observation.scan import Scan
from headwise.observation.text import Text, tokenize

__all__ = ["Progress", "memory_said", "opened", "scan"]

# progress(done, total, what)
Progress = Callable[[int, int, str], None]

_NO_MEMORY: Final = re.compile(r"out of memory|not enough memory|can't allocate memory", re.I)


def scan(
    model_or_path: str | Path | nn.Module | LoadedModel | Checkpoint | None = None,
    text: Text | None = None,
    *,
    tokens: int | None = None,
    batch: int = 1,
    window: int | None = None,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
    rows: int | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    gradients: bool = False,
    allow_long: bool = False,
    keep_rows: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    each: Each | None = None,
) -> Scan:
    """Run a model over a text and measure every attention call.

    Stopped with Ctrl-C, it returns what has been measured until then, ``about["interrupted"]`` set;
    with nothing measured yet, the interruption goes on.

    Args:
        model_or_path: a folder, a hub id, a GGUF file (see ``load_model``), what ``load`` returned,
            or a model in memory, which reads token ids; None: the small trained model inside the
            package.
        text: a text, several texts, token ids, or for an encoder-decoder also a pair ``(source,
            target)``; None reads the text that ships with the package. See ``tokenize`` for how it
            is cut into documents.
        tokens: how many tokens to read; None for all, but at most 2,048 and at most the context.
        batch: documents computed side by side; for one text without ``window``, into how many
            equal pieces it is cut.
        window: longest piece that is read at once.
        layers: numbers of the layers to measure (None: all).
        heads: numbers of the heads to measure (None: all).
        rows: query rows to measure per document, each exactly (None: all).
        dtype: see ``load_model``.
        device: see ``load_model``.
        gradients: also run one backward pass of the mean next-token loss.
        allow_long: go on beyond the length the model was trained on.
        keep_rows: keep every row's statistics.
        trust_remote_code: see ``load_model``.
        progress: called with (done, total, what) after each layer of each batch.
        each: see ``observe``.

    Raises:
        InputError: what was asked for cannot be done; nothing has been computed.
        ResourceError: out of memory, with the setting that lowers the need.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...                      num_attention_heads=2, vocab_size=11)
        >>> measured = scan(LlamaForCausalLM(config), [1, 2, 3, 4, 5])
        >>> measured.record.about["tokens"], measured.record.layers[0].rows
        (5, 5)
    """
    loaded = opened(model_or_path, dtype, device, trust_remote_code)
    if gradients:
        check_loss(loaded)
    documents = tokenize(
        loaded,
        default_text() if text is None else text,
        tokens=tokens,
        window=window,
        batch=batch,
        allow_long=allow_long,
    )
    options = {
        "layers": layers, "heads": heads, "rows": rows, "keep_rows": keep_rows, "each": each
    }  # fmt: skip
    with evaluating(loaded.model), memory_said(loaded), quiet():
        slopes = measure_gradients(loaded, documents, progress=progress) if gradients else None
        measured = _measure(loaded, documents, batch, options, progress)
    return _completed(measured, loaded, documents, slopes)


def opened(
    given: str | Path | nn.Module | LoadedModel | Checkpoint | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Whatever names or is a model, ready to be measured; see ``scan``.

    Example:
        >>> opened().architecture
        'headwise'
    """
    if given is None:
        given = embedded_model()
    if isinstance(given, str | Path):
        return load_model(given, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    if dtype is not None or device is not None:
        raise OptionError(
            "dtype and device were given with a model that is in memory already",
            to_do="leave them out, or move the model with .to(...) first",
        )
    if isinstance(given, Checkpoint):
        name = given.path.resolve().name.removesuffix(".gguf")
        return wrap_model(given.model, given.tokenizer, name=name, path=str(given.path))
    return given if isinstance(given, LoadedModel) else wrap_model(given)


def _measure(
    loaded: LoadedModel,
    documents: Sequence[Document],
    batch: int,
    options: dict[str, Any],
    progress: Progress | None,
) -> Scan:
    """Every batch under observation; an interruption ends the loop and keeps the scan."""
    model, driver = loaded.model, loaded.driver
    starts = range(0, len(documents), batch)
    measured: Scan | None = None
    try:
        with (
            observe(model, tokenizer=loaded.tokenizer, **options) as measured,
            _told(model, len(starts), progress),
            torch.no_grad(),
        ):
            for start in starts:
                driver.run(documents[start : start + batch])
    except KeyboardInterrupt:
        if measured is None or not measured.record.layers:
            raise
        measured.facts["interrupted"] = True
    return measured


@contextmanager
def _told(model: nn.Module, batches: int, progress: Progress | None) -> Iterator[None]:
    """Inside, progress is told after each transformer block."""
    if progress is None:
        yield
        return
    found = list(blocks(model))
    total, done = batches * len(found), 0

    def hook(module: nn.Module, arguments: Any, output: Any) -> None:
        nonlocal done
        done += 1
        progress(min(done, total), total, f"batch {1 + (done - 1) // len(found)} of {batches}")

    progress(0, total, f"batch 1 of {batches}")
    with ExitStack() as stack:
        for _, _, block in found:
            stack.callback(block.register_forward_hook(hook).remove)
        yield


@contextmanager
def memory_said(loaded: LoadedModel) -> Iterator[None]:
    """Out of memory becomes one line that names the settings that lower the need."""
    device = next(loaded.model.parameters()).device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not _NO_MEMORY.search(str(error)):
            raise
        raise ResourceError(
            f"out of memory on {device} while {loaded.name} was measured",
            to_do="lower --tokens or --batch, cut the text with --window, or take --dtype bfloat16",
        ) from None


def _completed(
    measured: Scan,
    loaded: LoadedModel,
    documents: Sequence[Document],
    slopes: Gradients | None,
) -> Scan:
    """The scan with the facts that only this loop knows."""
    measured.facts.update(model=loaded.name, context=loaded.context)
    if loaded.non_finite:
        measured.facts["non_finite_weights"] = list(loaded.non_finite)
    for note in loaded.notes:
        measured.note(note)
    longest = max(max(len(d.ids), 0 if d.target is None else len(d.target)) for d in documents)
    if loaded.context is not None and longest > loaded.context:
        measured.note(
            f"pieces of {longest} tokens, beyond the {loaded.context} the model was trained on"
        )
    if slopes is not None:
        measured.add_gradients(slopes.parameters, loss=slopes.loss, stream_rms=slopes.stream_rms)
        if loaded.kind == "encoder":
            measured.note("the loss is that of every 7th token, hidden from the model")
    return measured
