"""``headwise health``: what a monitor recorded while a model was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwise.cli import options as o

__all__ = ["health"]


def health(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN_DIR", help="The folder that hw.Monitor wrote to."),
    ],
    other: Annotated[
        Path | None,
        typer.Argument(metavar="OTHER_DIR", help="A second run, to be put beside it. [none]"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="A page with curves, maps and alarms. [none]"),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Show the run while it goes on, until Ctrl-C."),
    ] = False,
    json: Annotated[
        str | None,
        typer.Option(
            metavar="[FILE.json]", help="As JSON, to standard output unless a FILE is named."
        ),
    ] = None,
    quiet: o.Quiet = False,
) -> int:
    """Show what a monitor recorded in training: alarms, figures over steps and by layer."""
    from headwise.cli.health_output import Wanted, finish, followed

    wanted = Wanted(run=run, other=other, page=out, json=json, follow=follow, quiet=quiet)
    wanted.check()
    return followed(run) if follow else finish(wanted)
