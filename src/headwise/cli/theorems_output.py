"""Which statements are checked on what, and where the results go: terminal, JSON, page."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headwise.errors import OptionError

if TYPE_CHECKING:
    from headwise.theorems.checked import Checked
    from headwise.theorems.statement import Theorem

__all__ = ["SURPRISE", "Asked", "checked", "finish", "print_names", "write_json"]

_TOKENS: Final = 256
SURPRISE: Final = 3  # exit code


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options as they were given."""

    model: str | None
    embedded: bool
    only: str | None
    reproduce: str | None
    grade: str | None
    full: bool
    seed: int
    text: str | None
    tokens: int | None
    dtype: str | None
    device: str | None
    trust_remote_code: bool
    page: Path | None
    json: str | None
    quiet: bool

    @property
    def trained(self) -> bool:
        """Whether a trained model is checked."""
        return self.model is not None or self.embedded

    def check(self, *, names_only: bool) -> None:
        """Raise unless what is asked fits together and everything can be written."""
        from headwise.cli.output import Outputs

        ways = {
            "--list": names_only, "--reproduce": self.reproduce is not None,
            "--grade": self.grade is not None, "--only": self.only is not None,
        }  # fmt: skip
        given = [name for name, there in ways.items() if there]
        if len(given) > 1:
            raise OptionError(f"{given[0]} and {given[1]} were given", allowed="one of the two")
        self._check_model(given[0] if given and given[0] != "--only" else None)
        for name, alone in (("--list", names_only), ("--grade", self.grade is not None)):
            if alone and self.page is not None:
                raise OptionError(f"--out with {name}", allowed="the terminal and --json")
            if alone and self.full:
                raise OptionError(f"--full with {name}", to_do="leave it out")
        if not 0 <= self.seed < 2**63:
            raise OptionError(f"--seed {self.seed}", allowed="0 to 2^63 - 1")
        if self.page is not None and self.page.suffix != ".html":
            raise OptionError(f"{self.page} as a file", allowed="a name that ends in .html")
        file = None if self.grade is None else self.grade.rpartition(":")[0]
        Outputs(page=self.page, json=self.json, read=(self.model, self.text, file)).check()

    def _check_model(self, alone: str | None) -> None:
        """Raise where options of trained models meet those of random weights."""
        if self.model is not None and self.embedded:
            raise OptionError(f"MODEL {self.model} and --embedded", allowed="one of the two")
        if self.trained and alone is not None:
            raise OptionError(f"{alone} with a MODEL", to_do="leave one of the two out")
        if self.trained and self.full:
            raise OptionError("--full with a MODEL", allowed="--full on random weights")
        if not self.trained:
            of_models = {
                "text": self.text, "tokens": self.tokens, "dtype": self.dtype,
                "device": self.device, "trust-remote-code": self.trust_remote_code or None,
            }  # fmt: skip
            for name, value in of_models.items():
                if value is not None:
                    raise OptionError(
                        f"--{name} without a MODEL", to_do="name one, or add --embedded"
                    )


def print_names(asked: Asked) -> int:
    """Print what can be asked for."""
    from headwise.cli.output import print_summary
    from headwise.report.theorem_terminal import listed
    from headwise.theorems.registry import reproductions, subjects

    if asked.json is not None:
        rows = [
            *(_named(subject, each) for subject, each in subjects()),
            *(_named("reproductions", each) for each in reproductions()),
        ]
        write_json(rows, asked)
    elif not asked.quiet:
        print_summary(listed(subjects(), reproductions()), [], to_stderr=False)
    return 0


def _named(subject: str, theorem: Theorem) -> dict[str, Any]:
    return {
        "name": theorem.name,
        "title": theorem.title,
        "subject": subject,
        "on_random_weights": theorem.random is not None,
        "on_trained_models": theorem.model is not None,
    }


def checked(asked: Asked) -> list[Checked]:
    """What the checks that were asked for found."""
    from headwise.cli.output import progress_bar
    from headwise.theorems.checked import check_random

    chosen = _chosen(asked)
    with progress_bar(asked.quiet) as progress:
        if asked.trained:
            return _on_model(asked, chosen, progress)
        return check_random(chosen, full=asked.full, seed=asked.seed, progress=progress)


def _chosen(asked: Asked) -> list[tuple[str, Theorem]]:
    """Those that are named, in their own order; else all that can be checked there."""
    from headwise.theorems.registry import named, reproductions, subjects

    if asked.reproduce is not None:
        known = [("Results of papers", each) for each in reproductions()]
    else:
        known = list(subjects())
    names = asked.only if asked.reproduce is None else asked.reproduce
    if names is not None:
        wanted = {
            named(name.strip(), [each for _, each in known]).name for name in names.split(",")
        }
        return [(subject, each) for subject, each in known if each.name in wanted]
    return [
        (subject, each)
        for subject, each in known
        if (each.model if asked.trained else each.random) is not None
    ]


def _on_model(asked: Asked, chosen: Sequence[tuple[str, Theorem]], progress: Any) -> list[Checked]:
    from headwise.cli.options import reading
    from headwise.observation.run import opened
    from headwise.theorems.checked import check_model
    from headwise.theorems.trained import Trained

    read = reading(text=asked.text, tokens=asked.tokens, window=None)
    loaded = opened(asked.model, asked.dtype, asked.device, asked.trust_remote_code)
    model = Trained(loaded, read["text"], tokens=asked.tokens or _TOKENS, seed=asked.seed)
    return check_model(chosen, model, progress=progress)


def finish(found: Sequence[Checked], asked: Asked) -> int:
    """Write everything asked for, print, and return the exit code."""
    from headwise.cli.output import print_summary
    from headwise.files import whole
    from headwise.report.theorem_terminal import theorem_summary
    from headwise.theorems.verdict import Verdict

    title, facts = _title(found, asked)
    written = []
    if asked.page is not None:
        from headwise.report.theorem_page import theorem_page

        with whole(asked.page) as temporary:
            temporary.write_text(theorem_page(found, title, facts), encoding="utf-8")
        written.append(asked.page)
    if asked.json is not None:
        from headwise.theorems.checked import to_json

        written += write_json([to_json(each) for each in found], asked)
    if not asked.quiet:
        print_summary(theorem_summary(found, title, facts), written, to_stderr=asked.json == "-")
    if any(each.outcome.verdict == Verdict.BROKEN for each in found):
        return 2
    return 0 if all(each.as_expected for each in found) else SURPRISE


def _title(found: Sequence[Checked], asked: Asked) -> tuple[str, list[str]]:
    if asked.reproduce is not None:
        title = "Results of papers, repeated"
    elif asked.trained:
        title = f"What the theory says of {found[0].outcome.where}"
    else:
        title = "What the theory says, on random weights"
    facts = [f"seed {asked.seed}"]
    if asked.trained:
        text = "a text inside the package" if asked.text is None else asked.text
        facts.append(f"{asked.tokens or _TOKENS:,} tokens at most of {text}")
    else:
        facts.append("full" if asked.full else "quick: --full has more draws")
    return title, facts


def write_json(rows: Any, asked: Asked) -> list[Path]:
    """Write to the file that is named, or to standard output; the files that were written."""
    from headwise.files import whole

    text = json.dumps(rows, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if asked.json in (None, "-"):
        sys.stdout.write(text)
        return []
    with whole(str(asked.json)) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return [Path(str(asked.json))]
