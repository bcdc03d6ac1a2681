"""The options that commands share, and how their text becomes values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.errors import OptionError
from headwise.observation.reading import read_text

__all__ = [
    "AllowLong",
    "Batch",
    "Device",
    "Dtype",
    "Gradients",
    "Heads",
    "Json",
    "Layers",
    "Model",
    "Out",
    "Quiet",
    "Rows",
    "Text",
    "Tokens",
    "TrustRemoteCode",
    "Window",
    "measuring",
    "numbers",
    "reading",
]

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face or Headwise folder, the id of a model on the hub, or a .gguf file."
        " [the small model inside the package]",
    ),
]
Text = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="Text to read, UTF-8; - is standard input. [Hamlet, acts 1 to 3]"
    ),
]
Tokens = Annotated[
    int | None,
    typer.Option(metavar="N", help="Tokens to read. [the model's context, 2,048 at most]"),
]
Batch = Annotated[int, typer.Option(metavar="N", help="Windows computed side by side.")]
Window = Annotated[
    int | None, typer.Option(metavar="N", help="Cut the text into windows of N tokens. [one piece]")
]
Layers = Annotated[
    str | None, typer.Option(metavar="LIST", help="Layers to measure, such as 0,3-5. [all]")
]
Heads = Annotated[
    str | None, typer.Option(metavar="LIST", help="Heads to measure, such as 0,2. [all]")
]
Rows = Annotated[
    int | None,
    typer.Option(metavar="N", help="Measure N query rows per sequence, each exactly. [all]"),
]
Dtype = Annotated[
    str | None,
    typer.Option(metavar="DTYPE", help="float32, bfloat16, float16 or float64. [as stored]"),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE", help="cpu, cuda, cuda:1, mps or auto. [the first GPU, else cpu]"
    ),
]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="The page. [headwise-MODEL.html]")]
Json = Annotated[
    str | None,
    typer.Option(
        metavar="[FILE.json]", help="Findings as JSON, to standard output unless a FILE is named."
    ),
]
Gradients = Annotated[
    bool, typer.Option("--gradients", help="One backward pass: gradient norms by layer.")
]
AllowLong = Annotated[
    bool, typer.Option("--allow-long", help="Go on past the context the model was trained for.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code found in the model folder.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]


def measuring(
    *,
    text: str | None,
    tokens: int | None,
    batch: int,
    window: int | None,
    layers: str | None,
    heads: str | None,
    rows: int | None,
    **others: Any,
) -> dict[str, Any]:
    """The keyword arguments of ``headwise.scan``, checked as far as they can be without a model."""
    _at_least(("batch", batch, 1), ("rows", rows, 1))
    return {
        **reading(text=text, tokens=tokens, window=window),
        "batch": batch,
        "layers": numbers("--layers", layers),
        "heads": numbers("--heads", heads),
        "rows": rows,
        **others,
    }


def reading(*, text: str | None, tokens: int | None, window: int | None) -> dict[str, Any]:
    """What is read of which text: keyword arguments, checked and the text in memory."""
    _at_least(("tokens", tokens, 2), ("window", window, 2))
    text = None if text is None else read_text(text)
    return {"text": text, "tokens": tokens, "window": window}


def _at_least(*options: tuple[str, int | None, int]) -> None:
    for name, value, least in options:
        if value is not None and value < least:
            raise OptionError(f"--{name} is {value}", allowed=f"{least} or more")


def numbers(option: str, text: str | None) -> list[int] | None:
    """``"0,3-5"`` as ``[0, 3, 4, 5]``; None stays None.

    Example:
        >>> numbers("--layers", "3-5, 0")
        [0, 3, 4, 5]
    """
    if text is None:
        return None
    chosen: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first or last - first > 100_000:
            raise OptionError(
                f"{option} {text!r}", allowed="numbers and ranges from 0 on, such as 0,3-5"
            )
        chosen.update(range(first, last + 1))
    return sorted(chosen)
