"""Where the health of a run goes: terminal, JSON, page; and the view of a run that goes on."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headwise.errors import OptionError

if TYPE_CHECKING:
    from headwise.monitoring.record import StepRecord

__all__ = ["Wanted", "finish", "followed"]

_SECONDS: Final = 1.0  # from one look at the file to the next


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is to be read, written and printed."""

    run: Path
    other: Path | None
    page: Path | None
    json: str | None
    follow: bool
    quiet: bool

    def check(self) -> None:
        """Raise unless what is asked fits together and everything can be written."""
        from headwise.cli.output import Outputs
        from headwise.monitoring.record import ABOUT, RECORDS

        for name, given in (
            ("OTHER_DIR", self.other), ("--out", self.page), ("--json", self.json),
            ("--quiet", self.quiet or None),
        ):  # fmt: skip
            if self.follow and given is not None:
                raise OptionError(
                    f"--follow and {name} were given", allowed="--follow alone, of one run",
                    to_do="run headwise health again without --follow for the rest",
                )  # fmt: skip
        if self.page is not None and self.page.suffix != ".html":
            raise OptionError(f"{self.page} as a file", allowed="a name that ends in .html")
        folders = [each for each in (self.run, self.other) if each is not None]
        read = tuple(folder / name for folder in folders for name in (ABOUT, RECORDS))
        Outputs(page=self.page, json=self.json, read=read).check()


def finish(wanted: Wanted) -> int:
    """Read, write everything asked for, and print."""
    from rich.console import Group
    from rich.text import Text

    from headwise.cli.output import print_summary
    from headwise.files import whole
    from headwise.monitoring.record import read_run
    from headwise.report.health_facts import health_of
    from headwise.report.health_terminal import health_summary

    runs = [read_run(each) for each in (wanted.run, wanted.other) if each is not None]
    found = [health_of(run) for run in runs]
    written = []
    if wanted.page is not None:
        from headwise.report.health_page import write_health_page

        written.append(write_health_page(wanted.page, *runs))
    if wanted.json is not None:
        each: Any = [health.to_json() for health in found]
        shown = each[0] if len(each) == 1 else each
        text = json.dumps(shown, ensure_ascii=False) + "\n"
        if wanted.json == "-":
            sys.stdout.write(text)
        else:
            with whole(wanted.json) as temporary:
                temporary.write_text(text, encoding="utf-8")
            written.append(Path(wanted.json))
    if not wanted.quiet:
        parts: list[Any] = []
        for health in found:
            parts += [*([Text()] if parts else []), health_summary(health)]
        print_summary(Group(*parts), written, to_stderr=wanted.json == "-")
    return 0


def followed(folder: Path, wait: Callable[[float], None] = time.sleep) -> int:
    """Show a run as it goes on, until Ctrl-C; its summary stays on the terminal."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from headwise.monitoring.tail import Tail

    tail = Tail(folder)
    console = Console()
    records: list[StepRecord] = []
    started, shown = 0, Text(f"waiting for the first record in {folder}")
    with Live(shown, console=console, screen=console.is_terminal, auto_refresh=False,
              transient=True) as live:  # fmt: skip
        try:
            while True:
                new = tail.new()
                if tail.started != started:
                    started, records = tail.started, []
                records += new
                if new:
                    live.update(_summary(folder, records, live=True), refresh=True)
                wait(_SECONDS)
        except KeyboardInterrupt:
            pass  # the way to end it
    if records:
        console.print(_summary(folder, records, live=False))
    return 0


def _summary(folder: Path, records: list[StepRecord], *, live: bool) -> Any:
    from headwise.monitoring.record import ABOUT, Run
    from headwise.report.health_facts import health_of
    from headwise.report.health_terminal import health_summary

    try:
        about = json.loads((folder.expanduser() / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        about = {}  # facts come beside the records; without them the figures still stand
    known = about if isinstance(about, dict) else {}
    return health_summary(health_of(Run(folder, known, tuple(records))), live=live)
