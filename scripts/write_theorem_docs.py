"""Write docs/explanation/theorems: ``python scripts/write_theorem_docs.py``.

A page for each statement, from the object that checks it: statement, formula, proof, conditions,
what was measured (quick, seed 0), and what is often written. Measured numbers differ in their last
digits from machine to machine, so a test compares the pages without them.
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Final

from markupsafe import Markup

from headwise.report.shell import template_file
from headwise.report.theorem_facts import MEANING, measured_row, sentences, verdict_of
from headwise.report.theorem_plots import drawing
from headwise.theorems.checked import Checked, check_random
from headwise.theorems.registry import subjects
from headwise.theorems.statement import Theorem

TARGET: Final = Path(__file__).parents[1] / "docs" / "explanation"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
MADE: Final = "This page is written by `scripts/write_theorem_docs.py`; do not edit it.\n"

INDEX_HEAD: Final = f"""# Statements about transformers, checked

{MADE}
Each statement stands here with its conditions, the prediction, and what was measured. Beside every
measurement stands a control, the same with a condition dropped or the formula broken, and it has to
fail: a check whose control holds says CHECK-BROKEN whatever else it found.

How a verdict comes about:

- An identity holds up to rounding: the tolerance is derived from the size of the sums.
- An expectation holds up to four standard errors, from independent draws of weights or of
  sequences, never from the entries of one matrix. Among a hundred estimates, four standard errors
  are a false alarm in 0.6 % of runs.
- An empirical regularity holds if its interval over draws lies inside a stated range.

"""


def pages() -> dict[str, str]:
    """The text of every page by its name, without what was measured."""
    found = {f"theorems/{theorem.name}.md": page(theorem, "") for _, theorem in subjects()}
    return {"theorems.md": index(), **found}


def index() -> str:
    """All statements, by subject."""
    verdicts = "\n".join(f"- {verdict}: {words}." for verdict, words in MEANING.items())
    parts = [
        f"{INDEX_HEAD}The verdicts:\n\n{verdicts}\n\n[How to run them](../how-to/theorems.md)."
    ]
    before = ""
    for subject, theorem in subjects():
        if subject != before:
            parts.append(f"\n## {subject}\n")
            before = subject
        exercise = f" (exercise {theorem.exercise})" if theorem.exercise else ""
        parts.append(f"- [{theorem.title}](theorems/{theorem.name}.md){exercise}")
    return "\n".join(parts) + "\n"


def page(theorem: Theorem, measured: str) -> str:
    """The page of one statement."""
    parts = [
        f"# {theorem.title}\n\n{MADE}\n{theorem.statement}\n",
        f"$$\n{theorem.latex}\n$$\n",
        "## Conditions\n\n" + "".join(f"- {each}\n" for each in theorem.conditions),
    ]
    if theorem.proof:
        parts.append(f"## Why\n\n{proof(theorem.proof)}\n")
    parts.append(
        f"## The check\n\nKind: {theorem.kind}.\n\nPrediction: "
        f"{_stop(theorem.prediction)}\n\nEstimator: {_stop(theorem.estimator)}\n\n"
        f"{_runs(theorem)}\n\n{BEGIN}\n{measured}{END}\n"
    )
    if theorem.textbook:
        lines = [
            f"- “{each.wording}”\n  Rather: {_stop(each.truth)}\n" for each in theorem.textbook
        ]
        parts.append("## What is often written\n\n" + "".join(lines))
    source = theorem.source + (f"; exercise {theorem.exercise}" if theorem.exercise else "")
    parts.append(f"## Source\n\n{source}. [All statements](../theorems.md).\n")
    return "\n".join(parts)


def proof(name: str) -> str:
    """The written proof, its own title left out."""
    file = resources.files("headwise.theorems").joinpath("proofs", f"{name}.md")
    text = file.read_text(encoding="utf-8").strip()
    text = re.sub(r"\A# [^\n]*\n+", "", text)
    return re.sub(r"^#+ ", "### ", text, flags=re.MULTILINE)


def _stop(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


def _runs(theorem: Theorem) -> str:
    said = []
    if theorem.random is not None:
        said.append(f"`headwise theorems --only {theorem.name}` runs it on random weights")
    if theorem.model is not None:
        said.append(f"`headwise theorems MODEL --only {theorem.name}` on a trained model")
    return f"{', '.join(said)}."


def what_was_measured(checked: Checked) -> tuple[str, dict[str, str]]:
    """Verdict, finding and table, and the plots by the names of their files."""
    lines = [f"\n**{verdict_of(checked)}** (quick, seed 0). {' '.join(sentences(checked))}\n"]
    evidence = checked.outcome.evidence
    groups = [("", evidence.measured)]
    groups += [(f"control, {each.name}: ", each.measured) for each in evidence.controls]
    rows = [measured_row(each) for _, group in groups for each in group]
    firsts = [f"{title}{each.name}" for title, group in groups for each in group]
    if rows:
        lines.append("| | measured | predicted | tolerance or error | z | draws | |")
        lines.append("| --- | ---: | ---: | ---: | ---: | ---: | --- |")
        for first, row in zip(firsts, rows, strict=True):
            cells = [cell.replace("|", "\\|") for cell in (first, *row[1:])]
            lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    drawn = {}
    for i, plot in enumerate(evidence.plots):
        svg = drawing(plot)
        if svg:
            name = f"{checked.theorem.name}-{i + 1}.svg"
            drawn[name] = _standalone(svg)
            lines += [f"![{plot.title}]({name})", ""]
    return "\n".join(lines), drawn


def _standalone(svg: Markup) -> str:
    """The drawing with the style that the page gives it, as a file of its own."""
    css = template_file("page.css")
    start = css.index(":root {")
    colours = css[start : css.index("* {")]
    rules = re.findall(r"^(?:svg text|\.grid-line|\.threshold|\.plot)[^\n]*", css, re.MULTILINE)
    style = (
        f"<style>{colours}\nsvg {{ font-family: sans-serif; background: var(--back); }}\n"
        + "\n".join(rules)
    )
    head, body = str(svg).split(">", 1)
    return f'{head} xmlns="http://www.w3.org/2000/svg">{style}</style>{body}\n'


def without_measurements(text: str) -> str:
    """The page as ``pages`` gives it."""
    return re.sub(f"({BEGIN}\n).*?({END})", r"\1\2", text, flags=re.DOTALL)


def main() -> None:
    """Check every statement and write every page."""
    folder = TARGET / "theorems"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    (TARGET / "theorems.md").write_text(index(), encoding="utf-8")
    for subject, theorem in subjects():
        (checked,) = check_random([(subject, theorem)])
        text, drawn = what_was_measured(checked)
        (folder / f"{theorem.name}.md").write_text(page(theorem, text), encoding="utf-8")
        for name, svg in drawn.items():
            (folder / name).write_text(svg, encoding="utf-8")
    print(f"wrote {folder}")


if __name__ == "__main__":
    main()
