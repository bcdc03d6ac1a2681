"""Write docs/schema.md from the schema table: ``python scripts/write_schema_docs.py``."""

from __future__ import annotations

from pathlib import Path

from headwise.results.circuit_definitions import CIRCUITS
from headwise.results.records import PROFILED, PROJECTIONS, ROLES, STREAMS
from headwise.results.schema import COORDINATES, DIMENSIONS, SCHEMA_VERSION, VARIABLES, Variable

TARGET = Path(__file__).parents[1] / "docs" / "schema.md"

HEAD = f"""# The schema of a scan

Version {SCHEMA_VERSION}. This page is written by `scripts/write_schema_docs.py` from
`headwise/results/schema.py`; every scan is checked against that table when it is made, saved and
loaded. The order of dimensions never matters: address them by name.

Notation: s are the logits after scaling, softcap, bias and mask; a = softmax(s) are the weights,
before dropout; i is the query, j the key; logarithms are natural (nats). A row without a visible
key is left out of every mean and counted in `rows_empty`.

What is missing is NaN (numbers) or 0 (counts): heads that a layer does not have, heads that were
not asked for, keys of another token stream, statistics that do not exist (distance in
cross-attention), every number of a layer in which a NaN or an infinity appeared (`non_finite` says
why).

Attributes of every variable: `long_name`, `units`, `definition`, `exactness`, and `source` where
there is one. Attributes of the data set: `schema_version`, and `about`, the facts of the run as
JSON text (model, architecture, tokens, dtype, exactness, seconds, versions, command, …).

Roles: {", ".join(ROLES)}. Token streams: {", ".join(STREAMS)}.
Projections: {", ".join(PROJECTIONS)}.
In a token's text the character NUL is written ␀ and a lone surrogate as ?.

A set of circuits (`hw.circuits`, `headwise circuits`) has the same schema, without the scan: only
the coordinates layer, head, module, role, number, heads and kv_heads are required, and the
attribute `holds` is "circuits".

What `exactness` says when only some rows were measured (`rows` < `rows_total`): means are unbiased
estimates from rows that are each exact; extremes are bounds on the extremes over all rows;
quantiles are those of the measured rows. Otherwise everything is exact.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD, "## Dimensions\n", _table(("dimension", "meaning"), _dimensions())]
    parts += ["## Coordinates\n", _table(("name", "dimension", "type", "meaning"), _coordinates())]
    titles = {
        "Per head": [
            n for n, v in VARIABLES.items() if v.dims == ("layer", "head") and n not in CIRCUITS
        ],
        "Maps and counts": [n for n, v in VARIABLES.items() if _is_map(n, v)],
        "Residual stream": [n for n, v in VARIABLES.items() if v.dims == ("block",)],
        "Gradients": [n for n, v in VARIABLES.items() if v.dims == ("parameter",)],
        "Circuits": list(CIRCUITS),
    }
    columns = ("name", "dimensions", "type", "unit", "definition", "source")
    for title, names in titles.items():
        parts += [f"## {title}\n", _table(columns, [_row(name) for name in names])]
    rows = [name for name, v in VARIABLES.items() if v.dims[-1] == "query"]
    parts.append(
        "## Distributions\n\n"
        f"For each of {', '.join(f'`{name}`' for name in PROFILED)}: `<name>_quantile` (layer, "
        "head, quantile) over rows, and `<name>_profile` (layer, head, position_bin), the mean "
        "over the rows of each position bin.\n\n"
        "## Every row\n\n"
        "With `keep_rows`, float32 on (layer, head, query), NaN where a row was not measured: "
        f"{', '.join(f'`{name}`' for name in rows)}.\n"
    )
    return "\n".join(parts)


def _is_map(name: str, variable: Variable) -> bool:
    ends = ("_quantile", "_profile")
    return (
        name not in CIRCUITS
        and variable.dims[0] == "layer"
        and variable.dims != ("layer", "head")
        and variable.dims[-1] != "query"
        and not name.endswith(ends)
    )


def _dimensions() -> list[tuple[str, ...]]:
    return [(f"`{name}`", meaning) for name, meaning in DIMENSIONS.items()]


def _coordinates() -> list[tuple[str, ...]]:
    return [(f"`{n}`", v.dims[0], v.kind, v.long_name) for n, v in COORDINATES.items()]


def _row(name: str) -> tuple[str, ...]:
    v = VARIABLES[name]
    return (f"`{name}`", ", ".join(v.dims), v.kind, v.units, v.definition, v.source)


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [columns, tuple("---" for _ in columns), *rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(page(), encoding="utf-8")
    print(f"wrote {TARGET}")
