"""Observe a model: one ``with`` block in which every attention call is measured.

    with observe(model) as scan:
        model(**inputs)

How the calls reach the recorder is the survey's affair (transformers' attention interface, or the
watcher of Headwise's own models); a context variable says which observation is active. On leaving,
every hook and setting is as it was, also after an exception.
"""

from __future__ import annotations

import inspect
import resource
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from headwise.errors import MeasurementError, ModelError, OptionError
from headwise.observation.recorder import ACTIVE, Each, Options, Recorder
from headwise.observation.scan import Scan
from headwise.observation.stream import StreamRecorder
from headwise.observation.survey import Survey, survey
from headwise.observation.tokenizer import decoding
from headwise.observation.uncompiled import uncompiled

__all__ = ["enter", "observe"]


@contextmanager
def observe(
    model: nn.Module,
    *,
    tokenizer: Any = None,
    rows: int | None = None,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
    sink_keys: int = 1,
    keep_rows: bool = False,
    stream: bool = True,
    workers: int | None = None,
    each: Each | None = None,
) -> Iterator[Scan]:
    """Measure every attention call of a model inside a ``with`` block.

    The model's outputs stay what they are, within rounding; nothing n×n is allocated. Statistics
    are of the softmax weights (after scaling, softcap, bias and mask, before dropout), in float32
    or better. Padded queries are left out; packed documents are measured apart; calls that go on
    with a key-value cache (``generate``) continue their documents.

    Args:
        model: any transformers model that routes through the attention interface, or a model made
            of the parts of ``headwise.models``.
        tokenizer: names the tokens in the record: one of transformers or of ``tokenizers``.
        rows: query rows to measure per sequence and call, a stratified sample (None: all).
        layers: numbers of the layers to measure, within each stack (None: all).
        heads: numbers of the heads to measure (None: all).
        sink_keys: how many first keys count as the sink.
        keep_rows: also keep every row's statistics.
        stream: also measure the residual stream around every block.
        workers: threads (None: torch's).
        each: called with every measured piece of a call, as
            ``each(module, call, piece, statistics)``: what else is to be computed from it.

    Raises:
        ModelError: the model does not route, is compiled, or is being observed already.
        OptionError: an option out of range, or attention dropout in training mode.
        MeasurementError: an expected module was never called.

    Example:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...                      num_attention_heads=2, vocab_size=11)
        >>> model = LlamaModel(config).eval()
        >>> with observe(model) as scan:
        ...     _ = model(torch.tensor([[1, 2, 3]]))
        >>> scan.record.layers[0].rows
        3
    """
    found = survey(model)
    options = _options(found, rows, layers, heads, sink_keys, keep_rows, workers)
    options = replace(options, each=each)
    recorder = Recorder(found.modules, options)
    for note in found.notes:
        recorder.note(note)
    residual = StreamRecorder(model, found.blocks, recorder) if stream else None
    scan = Scan._of(model, found.about, recorder, residual, decoding(tokenizer))
    with ExitStack() as restore:
        enter(model, found, recorder, residual, restore)
        clock = (time.perf_counter(), time.process_time())
        try:
            yield scan
        except BaseException:
            scan._facts["interrupted"] = True
            raise
        finally:
            scan._facts["seconds"] += time.perf_counter() - clock[0]
            scan._facts["cpu_seconds"] += time.process_time() - clock[1]
            scan._facts["peak_memory_bytes"] = _peak(model)
            scan._changed()
    _check_called(found, recorder)
    scan._changed()


def _options(
    found: Survey,
    rows: int | None,
    layers: Iterable[int] | None,
    heads: Iterable[int] | None,
    sink_keys: int,
    keep_rows: bool,
    workers: int | None,
) -> Options:
    """Check what was asked before anything runs."""
    for name, value, least in (
        ("rows", rows, 1),
        ("workers", workers, 1),
        ("sink_keys", sink_keys, 0),
    ):
        if value is not None and value < least:
            raise OptionError(f"{name} is {value}", allowed=f"{least} or more")
    chosen = None if layers is None else frozenset(layers)
    numbers = {m.number for m in found.modules.values()}
    if (chosen is not None and not chosen <= numbers) or chosen == frozenset():
        raise _none("layer", chosen - numbers, max(numbers))
    wanted = None if heads is None else tuple(sorted(set(heads)))
    most = found.heads
    if wanted is not None and (not wanted or wanted[0] < 0 or (most and wanted[-1] >= most)):
        raise _none("head", {h for h in wanted if not 0 <= h < most}, most - 1)
    return Options(rows, chosen, wanted, sink_keys, keep_rows, workers)


def _none(what: str, wrong: Collection[int], last: int) -> OptionError:
    first = ", ".join(str(number) for number in sorted(wrong)[:3])
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    found = f"the model has no {what} {first}{more}" if wrong else f"no {what}s were named"
    return OptionError(found, allowed=f"{what}s 0 to {last}")


def enter(
    model: nn.Module,
    found: Survey,
    recorder: Recorder,
    residual: StreamRecorder | None,
    restore: ExitStack,
) -> None:
    """Hook and switch the model; register with ``restore`` how everything is undone."""
    if any(getattr(part, "_headwise_observed", False) for part in found.models.values()):
        raise ModelError(
            f"{type(model).__name__} is being observed already", to_do="leave the other block first"
        )
    if ACTIVE.get() is not None:
        raise ModelError("another observation is active here", to_do="leave the other block first")
    restore.enter_context(uncompiled())
    model._headwise_observed = True  # type: ignore[assignment]
    restore.callback(delattr, model, "_headwise_observed")
    token = ACTIVE.set(recorder)
    restore.callback(ACTIVE.reset, token)
    found.attach(recorder, restore)
    outer: list[tuple[nn.Module, dict[str, Any]]] = []
    by_module = dict(model.named_modules())
    for path, part in found.models.items():
        _hook_model(part, path, path in found.stacks, recorder, outer, restore)
    for info in found.modules.values():
        module = by_module[info.path]
        handle = module.register_forward_pre_hook(_module_hook(recorder), with_kwargs=True)
        restore.callback(handle.remove)
    if residual is not None:
        residual.attach(restore)


def _hook_model(
    part: nn.Module,
    path: str,
    is_stack: bool,
    recorder: Recorder,
    outer: list[tuple[nn.Module, dict[str, Any]]],
    restore: ExitStack,
) -> None:
    """Tell the recorder what each model within the model is given."""
    signature = inspect.signature(part.forward)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not recorder.here():
            return
        inputs = _named(signature, args, kwargs)
        if is_stack:
            recorder.stacks.begin_pass(path, inputs, [given for _, given in reversed(outer)])
        outer.append((module, inputs))

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not recorder.here():
            return
        while outer:
            if outer.pop()[0] is module:
                break
        if is_stack:
            recorder.stacks.end_pass(path)

    restore.callback(part.register_forward_pre_hook(before, with_kwargs=True).remove)
    restore.callback(part.register_forward_hook(after, always_call=True).remove)


def _module_hook(recorder: Recorder) -> Callable[..., None]:
    signatures: dict[type, inspect.Signature] = {}

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not recorder.here():
            recorder.note("calls of the model from other threads were not measured")
            return
        kind = type(module)
        if kind not in signatures:
            signatures[kind] = inspect.signature(kind.forward)
        signature = signatures[kind]
        recorder.begin_module(module, _named(signature, (module, *args), kwargs))

    return before


def _named(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Arguments by name; ``**kwargs`` flattened."""
    try:
        bound = dict(signature.bind_partial(*args, **kwargs).arguments)
    except TypeError:
        return dict(kwargs)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
    return bound


def _check_called(found: Survey, recorder: Recorder) -> None:
    """Every module of every stack that ran must have been seen at the interface."""
    missing = [m for m in found.modules.values() if m.path not in recorder.called]
    ran = {m.stack for m in found.modules.values() if m.path in recorder.called}
    if not ran:
        raise MeasurementError(
            "no attention call was seen",
            allowed="a forward pass of the observed model inside the block",
        )
    silent = [m.path for m in missing if m.stack in ran]
    if silent:
        more = f" and {len(silent) - 3} more" if len(silent) > 3 else ""
        raise MeasurementError(
            f"{', '.join(silent[:3])}{more} never called the attention interface, so the scan "
            "would be incomplete",
            to_do="this model cannot be measured as a whole",
        )
    for path in dict.fromkeys(m.stack for m in missing):
        recorder.note(f"{path or 'the model'} was not run, so it was not measured")


def _peak(model: nn.Module) -> int:
    """Peak memory of the device, or of the process on CPU."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
