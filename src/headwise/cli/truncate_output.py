"""Where a truncation goes, and what the terminal shows of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headwise.cli.output import Outputs, print_summary
from headwise.errors import FileError

if TYPE_CHECKING:
    from headwise.circuits.truncation import Truncation

__all__ = ["check", "finish"]

_SUFFIXES: Final = (".html", ".csv", ".json")


def check(out: Path | None, target: str | None, read: tuple[str | Path | None, ...]) -> None:
    """Raise unless everything can be written; asked before the work begins."""
    Outputs(other=out, json=target, read=read).check()
    if out is not None and out.suffix not in _SUFFIXES:
        raise FileError(
            f"cannot save a truncation as {out.name}",
            allowed=".html (a page), .csv (a row per rank) or .json",
        )


def finish(
    found: Truncation, out: Path | None, target: str | None, save: Path | None, *, quiet: bool
) -> int:
    """Write everything asked for, print the summary, and return the exit code.

    2, with a line on stderr, where a model was to be saved and no rank is within the tolerance.
    """
    from headwise.report.truncation_facts import to_json
    from headwise.report.truncation_terminal import truncation_summary

    written = [] if out is None else [_write(found, out)]
    if target is not None:
        text = json.dumps(to_json(found), indent=2, ensure_ascii=False) + "\n"
        if target == "-":
            sys.stdout.write(text)
        else:
            written.append(_put(Path(target), text))
    if found.saved is not None:
        written.append(found.saved)
    if not quiet:
        print_summary(truncation_summary(found), written, to_stderr=target == "-")
    if save is not None and found.saved is None:
        print(
            f"headwise: no measured rank is within the tolerance, so {save} was not written; raise"
            " --tolerance, or name the rank with --save-rank",
            file=sys.stderr,
        )
        return 2
    return 0


def _write(found: Truncation, out: Path) -> Path:
    from headwise.report.truncation_facts import rank_rows, to_json
    from headwise.report.truncation_page import truncation_page

    if out.suffix == ".html":
        return _put(out, truncation_page(found))
    if out.suffix == ".json":
        return _put(out, json.dumps(to_json(found), indent=2, ensure_ascii=False) + "\n")
    from pandas import DataFrame

    return _put(out, DataFrame(rank_rows(found)).to_csv(index=False))


def _put(path: Path, text: str) -> Path:
    from headwise.files import whole

    with whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path
