"""Where the circuits of a model go, and what the terminal shows of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from headwise.cli.output import Outputs, print_summary

if TYPE_CHECKING:
    from headwise.circuits.dataset import Circuits

__all__ = ["check", "finish"]


def check(out: Path, target: str | None, read: tuple[str | Path | None, ...]) -> None:
    """Raise unless everything can be written; asked before the work begins."""
    if out.suffix == ".html":
        Outputs(page=out, json=target, read=read).check()
    else:
        Outputs(other=out, json=target, read=read).check()
        from headwise.circuits.dataset import circuits_path

        circuits_path(out)


def finish(found: Circuits, out: Path, target: str | None, *, quiet: bool) -> int:
    """Write everything asked for, print the summary, and return the exit code."""
    from headwise.files import whole
    from headwise.report.circuit_facts import to_json
    from headwise.report.circuit_terminal import circuit_summary
    from headwise.report.page import write_report

    written = [write_report(found.dataset, out) if out.suffix == ".html" else found.save(out)]
    if target is not None:
        text = json.dumps(to_json(found.dataset), indent=2, ensure_ascii=False) + "\n"
        if target == "-":
            sys.stdout.write(text)
        else:
            with whole(target) as temporary:
                temporary.write_text(text, encoding="utf-8")
            written.append(Path(target))
    if not quiet:
        print_summary(circuit_summary(found.dataset), written, to_stderr=target == "-")
    return 0
