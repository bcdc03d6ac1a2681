"""The page: one self-contained HTML file, written whole or not at all."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import jinja2
import xarray as xr
from markupsafe import Markup, escape

from headwise.errors import FileError
from headwise.files import whole
from headwise.report.circuit_figures import behaviours, circuit_notes
from headwise.report.circuit_run import circuit_run_facts, circuit_title
from headwise.report.cost_section import cost_section
from headwise.report.embed import json_for_html
from headwise.report.evidence import evidence
from headwise.report.figures import Figures, figures, only_circuits
from headwise.report.findings import Finding, findings, healthy, open_dataset, verdict
from headwise.report.quantities import about
from headwise.report.roles import roles
from headwise.report.rules import rules
from headwise.report.run import definitions, run_facts, title_facts
from headwise.report.shell import environment, template_file
from headwise.report.theorem_section import theorem_section
from headwise.results.validate import holds_circuits

__all__ = ["CIRCUIT_SECTIONS", "SECTIONS", "Section", "render", "write_report"]

_SHOWN: Final = 7  # findings before "show all"
_PLACES_SHOWN: Final = 24
_MARKS: Final = {"bad": "act", "watch": "watch", "note": "note"}
# In the order in which they are joined into one script.
_SCRIPTS: Final = (
    "base",
    "decode",
    "colour",
    "axes",
    "plate",
    "plate_drawing",
    "received",
    "pooled_map",
    "head",
    "text",
    "depth",
    "circuits",
    "composition",
    "evidence",
    "start",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One part of the page: drawn if the data set has all ``needs``, and ``fact`` is known."""

    anchor: str
    title: str
    template: str
    needs: tuple[str, ...] = ()
    fact: str = ""


SECTIONS: Final = (
    Section(anchor="findings", title="Findings", template="sections/findings.html"),
    Section(anchor="plate", title="Heads by layers", template="sections/plate.html"),
    Section(anchor="text", title="The text", template="sections/text.html"),
    Section(
        anchor="depth",
        title="Depth",
        template="sections/depth.html",
        needs=("stream_out_rms",),
    ),
    Section(
        anchor="circuits",
        title="Circuits",
        template="sections/circuits.html",
        needs=("qk_effective_rank_folded", "ov_effective_rank_folded"),
    ),
    Section(anchor="cost", title="Cost", template="sections/cost.html", fact="cost"),
    Section(
        anchor="theorems",
        title="Statements of the theory",
        template="sections/theorems.html",
        fact="theorems",
    ),
    Section(anchor="measured", title="How this was measured", template="sections/measured.html"),
)
# Of a set of circuits alone.
CIRCUIT_SECTIONS: Final = (
    Section(anchor="plate", title="Heads by layers", template="sections/plate.html"),
    next(section for section in SECTIONS if section.anchor == "circuits"),
    Section(anchor="measured", title="How this was computed", template="sections/computed.html"),
)


def write_report(scan: Any, path: str | os.PathLike[str]) -> Path:
    """Write the page of a scan to ``path``, which is replaced only when the page is complete.

    Args:
        scan: a ``Scan``, its data set, or that of ``circuits``.
        path: the HTML file.

    Errors:
        FileError: the folder does not exist or cannot be written to, or the path is no file.
    """
    target = Path(path).expanduser()
    if target.is_dir():
        raise FileError(f"{target} is a folder", allowed="the name of a file, such as report.html")
    page = render(open_dataset(scan))
    with whole(target) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return target


def render(dataset: xr.Dataset) -> str:
    """The HTML text of the page: of a scan, or of a set of circuits alone."""
    if holds_circuits(dataset):
        return _render_circuits(dataset)
    found = findings(dataset)
    data = figures(dataset)
    told = roles(dataset)
    facts = {
        **data.facts,
        "findings": evidence(dataset, found),
        "roles": {role.key: {"places": role.places, "quantity": role.quantity} for role in told},
    }
    title, facts_line = title_facts(dataset)
    return _filled(
        dataset,
        SECTIONS,
        title,
        facts_line,
        Figures(facts=facts, arrays=data.arrays),
        verdict=verdict(found),
        healthy=[fact.sentence for fact in healthy(dataset)],
        findings=[_with_words(finding, dataset) for finding in found],
        roles=told,
        shown=_SHOWN,
        places_shown=_PLACES_SHOWN,
        marks=_MARKS,
        run=run_facts(dataset),
        cost=cost_section(dataset),
        theorems=theorem_section(dataset),
    )


def _render_circuits(dataset: xr.Dataset) -> str:
    title, facts_line = circuit_title(dataset)
    data = only_circuits(dataset)
    return _filled(
        dataset, CIRCUIT_SECTIONS, title, facts_line, data, run=circuit_run_facts(dataset)
    )


def _filled(
    dataset: xr.Dataset,
    sections: Sequence[Section],
    title: str,
    facts_line: list[str],
    data: Figures,
    **values: Any,
) -> str:
    """The template with what every page has, and the values of its own sections."""
    script, run = _script(), about(dataset)
    return (
        _environment()
        .get_template("page.html")
        .render(
            head={
                "model": title,
                "facts": facts_line,
                "version": run.get("versions", {}).get("headwise", ""),
            },
            sections=[
                section
                for section in sections
                if all(name in dataset for name in section.needs)
                and (not section.fact or values.get(section.fact) is not None)
            ],
            names={layer["id"]: layer["name"] for layer in data.facts["layers"]},
            place_button=_place_button,
            behaviours=behaviours(dataset),
            circuit_names=[str(name) for name in dataset.data_vars],
            circuit_notes=circuit_notes(dataset),
            command=run.get("command"),
            notes=run.get("notes", []),
            definitions=definitions(dataset),
            facts=data.facts,
            facts_json=Markup(json_for_html(data.facts)),
            arrays=data.arrays,
            style=Markup(template_file("page.css")),
            script=Markup(script),
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            **values,
        )
    )


def _with_words(finding: Finding, dataset: xr.Dataset) -> dict[str, Any]:
    """A finding with its threshold in words: what is compared, and with what."""
    rule = next(rule for rule in rules() if rule.kind == finding.kind)
    attributes = dataset[finding.evidence].attrs if finding.evidence in dataset else {}
    name = rule.reading or attributes.get("long_name", finding.evidence)
    unit = finding.unit if finding.unit in ("", "×") else f" {finding.unit}"
    words = f"{name} {rule.beyond} {finding.threshold:,g}{unit}"
    return {**asdict(finding), "threshold_words": words[:1].upper() + words[1:]}


def _place_button(layer: int, head: int | None, names: dict[int, str]) -> Markup:
    label = names[layer] if head is None else f"{names[layer]} · H{head}"
    return Markup(
        '<button type="button" class="place" data-layer="{}" data-head="{}">{}</button>'
    ).format(layer, "" if head is None else head, label)


def _with_places(sentence: str, finding: dict[str, Any], names: dict[int, str]) -> Markup:
    """The sentence with its first place, where it names it, as a button."""
    if finding["places"]:
        layer, head = finding["places"][0]
        label = f"{names[layer]} · H{head}"
        before, found, after = sentence.partition(f" at {label}")
        if found and head is not None:
            button = _place_button(layer, head, names)
            return Markup("{} at {}{}").format(before, button, after)
    return escape(sentence)


def _formula(text: str) -> Markup:
    """Indices written ``a_ij`` as subscripts, as base.js writes them beside the map."""
    parts = re.split(r"(?<=[a-zΣ])_((?:i|j)(?:j|,i[+−]1|i)?)(?![a-z_])", text)
    marked = (
        Markup("<sub>{}</sub>").format(p) if i % 2 else escape(p) for i, p in enumerate(parts)
    )
    return Markup("").join(marked)


@functools.cache
def _environment() -> jinja2.Environment:
    made = environment()
    made.filters["with_places"] = _with_places
    made.filters["capitalise"] = lambda text: text[:1].upper() + text[1:]
    made.filters["formula"] = _formula
    made.filters["tojson_attribute"] = lambda value: json.dumps(value)
    return made


@functools.cache
def _script() -> str:
    """All scripts in one function, so that nothing leaks into the page's global scope."""
    parts = "\n".join(template_file(f"js/{name}.js") for name in _SCRIPTS)
    script = f'(() => {{\n"use strict";\n{parts}\n}})();'
    assert "</" not in script, "a closing tag would end the script element"
    return script
