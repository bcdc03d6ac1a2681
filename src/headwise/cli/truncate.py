"""``headwise truncate``: what the heads of a model lose when they are cut to rank r."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from headwise.cli import options as o
from headwise.errors import OptionError

if TYPE_CHECKING:
    from headwise.circuits.cuts import Circuit

__all__ = ["truncate"]

_MATRICES: Final[dict[str, list[Circuit]]] = {"qk": ["qk"], "ov": ["ov"], "both": ["qk", "ov"]}


def truncate(
    model: o.Model = None,
    text: o.Text = None,
    matrix: Annotated[
        str,
        typer.Option(metavar="NAME", help="What is cut: ov (W_OV), qk (W_QK) or both."),
    ] = "ov",
    folded: Annotated[
        bool, typer.Option("--folded", help="W_OV with the gain of the norm before it.")
    ] = False,
    layers: Annotated[
        str | None, typer.Option(metavar="LIST", help="Layers to cut, such as 0,3-5. [all]")
    ] = None,
    heads: Annotated[
        str | None, typer.Option(metavar="LIST", help="Heads to cut in each of them. [all]")
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Ranks, such as 4,8,12-16. [1,2,4,… to d_head]"),
    ] = None,
    tolerance: Annotated[
        str | None,
        typer.Option(
            metavar="X",
            help="How much the loss may rise: nats per token, such as 0.02, or a share of the"
            " loss, such as 2%. [1%]",
        ),
    ] = None,
    each: Annotated[
        int | None,
        typer.Option(metavar="R", help="Also cut one head at a time, to rank R. [no]"),
    ] = None,
    tokens: o.Tokens = None,
    window: o.Window = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The page (.html), a row per rank (.csv) or all (.json). [none]"
        ),
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(
            metavar="[FILE.json]", help="All as JSON, to standard output unless a FILE is named."
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="A new folder for the model cut to the suggested rank. [none]"
        ),
    ] = None,
    save_rank: Annotated[
        int | None,
        typer.Option(metavar="R", help="The rank of the saved model. [the suggested one]"),
    ] = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    trust_remote_code: o.TrustRemoteCode = False,
    quiet: o.Quiet = False,
) -> int:
    """Cut the heads of MODEL to rank r and print the loss of a text against r.

    The files of MODEL are left as they are; --save writes the cut model to a folder of its own.
    """
    if matrix not in _MATRICES:
        raise OptionError(f"--matrix is {matrix!r}", allowed="qk, ov, both")
    chosen = o.numbers("--ranks", ranks)
    if chosen and chosen[0] < 1:
        raise OptionError(f"the rank is {chosen[0]}", allowed="1 to the width of a head")
    words = o.measuring(
        text=text, tokens=tokens, batch=1, window=window, layers=layers, heads=heads, rows=None
    )
    from headwise.cli.output import progress_bar
    from headwise.cli.truncate_output import check, finish

    check(out, json, read=(model, text))
    from headwise.circuits.truncation import truncate as run

    with progress_bar(quiet) as progress:
        found = run(
            model or None,
            words["text"],
            ranks=chosen,
            circuits=_MATRICES[matrix],
            layers=words["layers"],
            heads=words["heads"],
            folded=folded,
            tolerance=tolerance,
            each=each,
            save=save,
            save_rank=save_rank,
            tokens=tokens,
            window=window,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    return finish(found, out, json, save, quiet=quiet)
