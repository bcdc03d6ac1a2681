"""The residual stream around every block: how large it is, and how much each part writes to it.

Hooks see the stream entering and leaving a block and the outputs of the modules inside. Which of
those outputs are added to the stream differs between architectures (norms after the write, several
attention modules, scaled writes), so it is not guessed from names: the combination whose sum is the
leaving stream, checked on sampled tokens, is the one that counts.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from headwise.errors import MeasurementError
from headwise.observation.inference import ordinary_tensors
from headwise.observation.recorder import Recorder
from headwise.observation.tokens import Layout
from headwise.observation.writes import Block
from headwise.results.records import BlockRecord

__all__ = ["BlockSums", "StreamRecorder"]

_SAMPLED: Final = 8
_KINDS: Final = ("in", "out", "attention", "mlp")


class BlockSums:
    """Sums of squares over tokens, the first token of every document apart."""

    def __init__(self, path: str, number: int, width: int) -> None:
        self.path, self.number, self.width = path, number, width
        self.squares = torch.zeros(len(_KINDS), 2, dtype=torch.float64)  # (kind, rest or first)
        self.tokens = torch.zeros(len(_KINDS), 2, dtype=torch.int64)
        self.max_abs = -math.inf
        self.verified = True

    def absorb(
        self, norms: dict[str, Tensor], largest: Tensor, layout: Layout, verified: bool
    ) -> None:
        """Add one call: per-token norms ``batch token`` of what is known of in, out and writes."""
        real, first = layout.real, layout.first
        for kind, norm in norms.items():
            i, squares = _KINDS.index(kind), norm.double().square()
            for apart, where in enumerate((real & ~first, first)):
                self.squares[i, apart] += squares[where].sum()
                self.tokens[i, apart] += where.sum()
        if real.any():
            self.max_abs = max(self.max_abs, float(largest[real].max()))
        self.verified = self.verified and verified

    def merge(self, other: BlockSums) -> None:
        """Add the sums of the same block."""
        if (self.path, self.width) != (other.path, other.width):
            raise MeasurementError(
                f"{self.path} of width {self.width} cannot take in {other.path} of width "
                f"{other.width}",
                allowed="scans of one model",
            )
        self.squares = self.squares + other.squares
        self.tokens = self.tokens + other.tokens
        self.max_abs = max(self.max_abs, other.max_abs)
        self.verified = self.verified and other.verified

    def finish(self, stack: str) -> BlockRecord:
        """Root mean squares over tokens and width."""
        rms = (self.squares / (self.tokens * self.width)).sqrt()
        (i, i1), (o, o1), (a, a1), (m, m1) = rms.tolist()
        return BlockRecord(
            module=self.path, stack=stack, number=self.number, stream_in_rms=i, stream_out_rms=o,
            stream_in_rms_first=i1, stream_out_rms_first=o1,
            stream_max_abs=self.max_abs if math.isfinite(self.max_abs) else math.nan,
            attention_write_rms=a, mlp_write_rms=m, attention_write_rms_first=a1,
            mlp_write_rms_first=m1, writes_verified=self.verified,
        )  # fmt: skip


@dataclass
class _Visit:
    """What has been seen of one block while it runs."""

    entering: Tensor  # per-token norms
    shape: tuple[int, ...]
    sample: Tensor  # a few tokens of the entering stream
    picked: Tensor
    norms: dict[str, Tensor] = field(default_factory=dict)  # module -> per-token norms
    samples: dict[str, Tensor] = field(default_factory=dict)


class StreamRecorder:
    """Hooks on every block of every stack."""

    def __init__(self, model: nn.Module, blocks: Sequence[Block], recorder: Recorder) -> None:
        self.recorder = recorder
        self.modules = dict(model.named_modules())
        self.blocks = blocks
        self.sums: dict[tuple[str, int], BlockSums] = {}
        # For blocks of one kind in one list: which outputs are the writes, by path in the block.
        self._choice: dict[tuple[str, frozenset[str]], tuple[tuple[str, ...], str | None]] = {}
        self._left: tuple[Any, int, Tensor] | None = None  # the latest stream out, its norms
        self._visits: dict[str, _Visit] = {}
        self._runs: dict[tuple[str, int], int] = {}

    def attach(self, restore: ExitStack) -> None:
        """Put the hooks on; ``restore`` takes them off."""
        for block in self.blocks:
            module = self.modules[block.path]
            inside = {*itertools.chain(*block.attention), *block.mlp, *block.norms}
            restore.callback(
                module.register_forward_pre_hook(self._enter(block), with_kwargs=True).remove
            )
            for path in inside:
                part = self.modules[path]
                restore.callback(part.register_forward_hook(self._inside(block, path)).remove)
            restore.callback(module.register_forward_hook(self._leave(block)).remove)

    def _enter(self, block: Block) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self.recorder.here():
                return
            x = args[0] if args else kwargs.get("hidden_states")
            self._visits.pop(block.path, None)
            if isinstance(x, Tensor) and x.dim() == 3 and x.is_floating_point():
                with ordinary_tensors(), torch.no_grad():
                    rows = x.shape[0] * x.shape[1]
                    picked = torch.linspace(0, rows - 1, min(rows, _SAMPLED)).long().to(x.device)
                    norms = self._known(x)
                    norms = _norms(x) if norms is None else norms
                    self._visits[block.path] = _Visit(
                        norms, tuple(x.shape), x.flatten(0, 1)[picked].clone(), picked
                    )

        return hook

    def _inside(self, block: Block, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            visit, x = self._visits.get(block.path), _tensor(output)
            if visit is None or x is None or not self.recorder.here():
                return
            choice = self._choice.get(block.kind)
            if choice is not None and path.removeprefix(block.path) not in (*choice[0], choice[1]):
                return
            with ordinary_tensors(), torch.no_grad():
                if x.dim() == 2 and x.numel() == math.prod(visit.shape):
                    x = x.view(visit.shape)
                if tuple(x.shape) == visit.shape:
                    visit.norms[path] = _norms(x)
                    visit.samples[path] = x.flatten(0, 1)[visit.picked].clone()

        return hook

    def _leave(self, block: Block) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not self.recorder.here():
                return
            visit, x = self._visits.pop(block.path, None), _tensor(output)
            if visit is None or x is None or tuple(x.shape) != visit.shape:
                return
            stack = self.recorder.stacks.by_path.get(block.stack)
            if stack is None or stack.current is None:
                return
            with ordinary_tensors(), torch.no_grad():
                layout, current = stack.current.layouts.get(0), stack.current
                current.waiting.append(self._seen(block, visit, x))
                if layout is not None:  # blocks before the first attention call have waited for it
                    for absorb in current.waiting:
                        absorb(layout)
                    current.waiting.clear()

        return hook

    def _known(self, x: Tensor) -> Tensor | None:
        """Norms of the stream that left the block before, when x is that very tensor, unchanged."""
        if self._left is None or self._left[0]() is not x or self._left[1] != _version(x):
            return None
        return self._left[2]

    def _seen(self, block: Block, visit: _Visit, x: Tensor) -> Callable[[Layout], None]:
        """What is to be added once it is known which rows are which tokens."""
        attention, mlp, verified = self._writes(block, visit, x)
        norms = {"in": visit.entering, "out": _norms(x)}
        self._left = (weakref.ref(x), _version(x), norms["out"])
        if attention:
            norms["attention"] = visit.norms[attention[0]] * block.factor
        if mlp is not None:
            norms["mlp"] = visit.norms[mlp] * block.factor
        largest = torch.maximum(x.amax(-1), -x.amin(-1)).float().cpu()
        runs = self.recorder.stacks.by_path[block.stack].current.runs  # type: ignore[union-attr]
        run = runs[f"block {block.path}"]
        runs[f"block {block.path}"] += 1
        name = block.path if not run else f"{block.path} (run {run + 1})"

        def absorb(layout: Layout) -> None:
            if (layout.batch, layout.queries) == visit.shape[:2]:
                sums = self.sums.setdefault(
                    (block.path, run), BlockSums(name, run or block.number, visit.shape[2])
                )
                sums.absorb(norms, largest, layout, verified)

        return absorb

    def _writes(
        self, block: Block, visit: _Visit, x: Tensor
    ) -> tuple[tuple[str, ...], str | None, bool]:
        """Which outputs were added to the stream, and whether their sum was checked."""
        leaving = x.flatten(0, 1)[visit.picked]
        attention = [[p for p in (*c, *block.norms) if p in visit.samples] for c in block.attention]
        mlps: list[str | None] = [p for p in (*block.mlp, *block.norms) if p in visit.samples]
        attention = [c for c in attention if c]
        for chosen, mlp in itertools.product(itertools.product(*attention), [*mlps, None]):
            parts = [*chosen, *([] if mlp is None else [mlp])]
            if len(set(parts)) < len(parts):
                continue
            if _adds_up(visit.sample, [visit.samples[p] for p in parts], leaving, block.factor):
                inside = tuple(p.removeprefix(block.path) for p in chosen)
                last = None if mlp is None else mlp.removeprefix(block.path)
                self._choice[block.kind] = (inside, last)
                return chosen, mlp, True
        self._choice.pop(block.kind, None)
        first = tuple(c[0] for c in attention)
        named = [p for p in block.mlp if p in visit.samples]
        return first, named[0] if named else None, False


def _adds_up(entering: Tensor, writes: list[Tensor], leaving: Tensor, factor: float) -> bool:
    """Whether stream in plus writes is stream out, within the rounding of that many additions."""
    if not bool(leaving.isfinite().all()):
        return False
    total, size = entering.double(), entering.double().abs()
    for write in writes:
        total = total + factor * write.double()
        size = size + (factor * write.double()).abs()
    bound = (len(writes) + 2) * torch.finfo(leaving.dtype).eps * size
    return bool(((total - leaving.double()).abs() <= bound).all())


def _tensor(output: Any) -> Tensor | None:
    """The tensor among a module's outputs that may be a stream."""
    if isinstance(output, tuple | list) and output:
        output = output[0]
    return output if isinstance(output, Tensor) and output.is_floating_point() else None


def _version(x: Tensor) -> int:
    """How often a tensor was written to; tensors of inference mode do not count."""
    return -1 if x.is_inference() else x._version


def _norms(x: Tensor) -> Tensor:
    """Euclidean norm of every token, on the CPU."""
    wide = torch.float32 if x.dtype.itemsize < 4 else x.dtype
    return torch.linalg.vector_norm(x, dim=-1, dtype=wide).cpu()
