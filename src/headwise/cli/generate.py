"""``headwise generate``: how a model goes on from a text, printed as it is made."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from headwise.cli import options as o
from headwise.errors import OptionError

__all__ = ["generate"]


def generate(
    text: Annotated[
        str | None,
        typer.Argument(metavar="TEXT", help="What the model goes on from; - is standard input."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A Hugging Face or Headwise folder, or a .gguf file."
            " [the small model inside the package]",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="The most new tokens. [100, or what the model's context leaves]"
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="T",
            help="Divide the logits by T and draw; 0 always takes the most likely token."
            " [1 with --top-k or --top-p, else 0]",
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(metavar="K", help="Draw from the K most likely tokens. [all]")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            help="Draw from the fewest tokens that have probability P together. [all]",
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            metavar="R", help="Above 1: tokens that the text already holds become less likely. [1]"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the draws.")] = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End before this text; may be given again. [no text]"),
    ] = None,
    dtype: o.Dtype = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="DEVICE", help="cpu, cuda, cuda:1 or mps. [the first GPU, else cpu]"),
    ] = None,
) -> int:
    """Print how MODEL goes on from TEXT, as it is made."""
    if text is None:
        raise OptionError(
            "TEXT is missing", to_do='for example: headwise generate "It was a dark and"'
        )
    if text == "-":
        from headwise.observation.reading import read_text

        text = read_text("-").removesuffix("\n")  # which a shell puts there
    pieces = _answer(
        text,
        model,
        dtype,
        device,
        tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop or (),
    )
    try:
        for piece in pieces:
            _show(piece)
    except KeyboardInterrupt:
        _show("\n")
        print("headwise: stopped", file=sys.stderr)
        return 130
    _show("\n")
    return 0


def _answer(
    text: str, model: str | None, dtype: str | None, device: str | None, **settings: Any
) -> Iterator[str]:
    from headwise.models.embedded import embedded_model
    from headwise.models.placement import chosen_device
    from headwise.models.text import stream

    return stream(
        embedded_model() if model is None else model,
        text,
        dtype=dtype,
        device=chosen_device(device),
        **settings,
    )


def _show(piece: str) -> None:
    """To standard output at once; what its encoding lacks becomes a question mark.

    On a terminal nothing that a model makes up moves the cursor or changes colours.
    """
    if sys.stdout.isatty():
        piece = "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in piece)
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(piece.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
