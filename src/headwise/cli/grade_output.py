"""What a graded function is told, requirement by requirement."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from headwise.cli.theorems_output import SURPRISE, Asked, write_json

if TYPE_CHECKING:
    from headwise.theorems.grading import Grade

__all__ = ["graded"]


def graded(asked: Asked) -> int:
    """Grade the function, print what it meets and misses, and return 0 where nothing is missed."""
    from headwise.cli.output import print_summary
    from headwise.report.grade_terminal import grade_summary
    from headwise.theorems.grading import grade, load_function

    assert asked.grade is not None
    found = grade(load_function(asked.grade))
    written = [] if asked.json is None else write_json(_as_json(found), asked)
    if not asked.quiet:
        print_summary(grade_summary(found), written, to_stderr=asked.json == "-")
    return 0 if found.passed else SURPRISE


def _as_json(found: Grade) -> dict[str, Any]:
    return {
        "function": found.function,
        "passed": found.passed,
        "sentence": found.sentence,
        "requirements": [{**asdict(each), "mark": str(each.mark)} for each in found.results],
    }
