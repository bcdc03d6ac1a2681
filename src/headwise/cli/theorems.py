"""``headwise theorems``: statements about transformers, checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwise.cli import options as o

__all__ = ["theorems"]


def theorems(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Check what can be said of this trained model: a Hugging Face or Headwise folder,"
            " the id of a model on the hub, or a .gguf file. [random weights]",
        ),
    ] = None,
    embedded: Annotated[
        bool, typer.Option("--embedded", help="MODEL is the small one inside the package.")
    ] = False,
    only: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Only these statements. [all]")
    ] = None,
    list_names: Annotated[bool, typer.Option("--list", help="Print the names and stop.")] = False,
    reproduce: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Repeat results of papers instead. [none]"),
    ] = None,
    grade: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="Run this multi-head attention against every requirement instead. [none]",
        ),
    ] = None,
    full: Annotated[
        bool,
        typer.Option("--full/--quick", help="More draws and larger sizes: minutes, not seconds."),
    ] = False,
    seed: Annotated[int, typer.Option(metavar="N", help="Of all random numbers.")] = 0,
    text: o.Text = None,
    tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens that MODEL reads. [256]")
    ] = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="A page with formulas and plots. [none]"),
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(
            metavar="[FILE.json]", help="As JSON, to standard output unless a FILE is named."
        ),
    ] = None,
    trust_remote_code: o.TrustRemoteCode = False,
    quiet: o.Quiet = False,
) -> int:
    """Check statements about transformers: prediction, measurement, control, verdict.

    Exit code 0: every verdict is what the theory says, or nothing could be said. 3: one is not, or
    a graded function fails a requirement. 2: a check is broken, or it cannot be done.
    """
    from headwise.cli.theorems_output import Asked, checked, finish, print_names

    asked = Asked(
        model=model, embedded=embedded, only=only, reproduce=reproduce, grade=grade, full=full,
        seed=seed, text=text, tokens=tokens, dtype=dtype, device=device,
        trust_remote_code=trust_remote_code, page=out, json=json, quiet=quiet,
    )  # fmt: skip
    asked.check(names_only=list_names)
    if list_names:
        return print_names(asked)
    if grade is not None:
        from headwise.cli.grade_output import graded

        return graded(asked)
    return finish(checked(asked), asked)
