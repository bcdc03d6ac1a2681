"""Write docs/reference/: ``python scripts/write_reference_docs.py``.

cli.md comes from the program itself, library.md from the public functions and their docstrings,
statistics.md from the schema. A test compares the files with what this script gives.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import typer

import headwise as hw
from headwise.circuits.dataset import Circuits, with_circuits
from headwise.circuits.truncation import Truncation
from headwise.cli.app import app
from headwise.cost.explicit import explicit
from headwise.cost.planner import Cost
from headwise.models.checkpoints import Checkpoint
from headwise.monitoring.record import StepRecord, read_run
from headwise.observation.loading import LoadedModel
from headwise.observation.scan import Scan
from headwise.report.findings import Finding
from headwise.report.health_page import write_health_page
from headwise.results.circuit_definitions import CIRCUITS
from headwise.results.records import PROFILED
from headwise.results.schema import VARIABLES
from headwise.theorems.grading import grade
from headwise.theorems.measured import Measured
from headwise.theorems.statement import Evidence, Outcome, Theorem
from headwise.training.config import TrainConfig

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
MADE: Final = "This page is written by `scripts/write_reference_docs.py`; do not edit it.\n"
MODEL: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"

# ---------------------------------------------------------------- cli.md

COMMAND_LINES: Final = {
    "report": f"headwise report {MODEL} --text book.txt --tokens 512 --save book.nc",
    "scan": f"headwise scan {MODEL} --tokens 512 --rows 64 --out rows.nc",
    "show": "headwise show book.nc --out book.html --json book.json",
    "circuits": f"headwise circuits {MODEL} --out heads.csv",
    "truncate": f"headwise truncate {MODEL} --tokens 128 --tolerance 0.05 --out ranks.html",
    "cost": f"headwise cost {MODEL} --length 2k,8k --on h100-sxm --csv parts.csv",
    "theorems": "headwise theorems --only logit-variance,convex-combination --out theory.html",
    "train": "headwise train book.txt --out run --tokenizer bytes --context 64 --steps 9 --monitor",
    "generate": 'headwise generate "It was the best of" --model run --tokens 20',
    "health": "headwise health run --out health.html --json health.json",
}

CLI_HEAD = f"""# The command line

{MADE}
`headwise --version` prints the version, `headwise COMMAND --help` what is below.

Exit codes: 0, done; 2, what was asked cannot be done, or layers of the model are not finite (the
results hold the other layers); 3, a statement of `headwise theorems` did not come out as the theory
says, or a graded function misses a requirement; 130, stopped with Ctrl-C (what was measured until
then is written); 1, a bug in Headwise, whose traceback `HEADWISE_TRACEBACK=1` shows. Every failure
is one line on standard error, and no file is left half-written.
"""


def cli_page() -> str:
    """Every command, argument and option, with defaults."""
    parts = [CLI_HEAD]
    for name, command in commands().items():
        parts.append(f"## headwise {name}\n\n{command.help}\n")
        parts.append(f"```sh\n{COMMAND_LINES[name]}\n```\n")
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        options = [p for p in command.params if p.param_type_name == "option"]
        rows = [(f"`{p.metavar}`", *_said(p)) for p in arguments]
        parts.append(_table(("argument", "meaning", "default"), rows))
        parts.append(_table(("option", "meaning", "default"), [_option(p) for p in options]))
    return "\n".join(parts)


def commands() -> dict[str, Any]:
    """The commands of the program by name."""
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def _option(parameter: Any) -> tuple[str, ...]:
    opts = [*sorted(parameter.opts, key=len, reverse=True), *parameter.secondary_opts]
    names = ", ".join(f"`{name}`" for name in opts)
    value = "" if parameter.is_flag else f" `{parameter.metavar}`"
    meaning, default = _said(parameter)
    if not default:
        default = "off" if parameter.is_flag else str(parameter.default or "none")
    return names + value, meaning, default


def _said(parameter: Any) -> tuple[str, str]:
    """The help text and the default that stands in brackets at its end."""
    match = re.fullmatch(r"(.*?)(?: \[(.*)\])?", parameter.help, re.DOTALL)
    assert match is not None
    return match[1], match[2] or ""


# ---------------------------------------------------------------- library.md

LIBRARY_HEAD = f"""# The library

{MADE}
The examples of this page run in order, after

```pycon
>>> import torch
>>> import headwise as hw
```
"""

# (heading, objects as a reader reaches them)
LIBRARY: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("Measuring", {"hw.scan": hw.scan, "hw.observe": hw.observe, "hw.load_model": hw.load_model}),
    ("A loaded model", {"LoadedModel": LoadedModel}),
    (
        "What a measurement is",
        {
            "Scan": Scan,
            "Scan.merge": Scan.merge,
            "Scan.save": Scan.save,
            "Scan.to_dataframe": Scan.to_dataframe,
            "hw.load_scan": hw.load_scan,
        },
    ),
    ("Reading it", {"hw.findings": hw.findings, "Finding": Finding, "hw.report": hw.report}),
    (
        "What heads are made of",
        {
            "hw.circuits": hw.circuits,
            "Circuits": Circuits,
            "Circuits.save": Circuits.save,
            "Circuits.to_dataframe": Circuits.to_dataframe,
            "headwise.circuits.dataset.with_circuits": with_circuits,
            "hw.truncate": hw.truncate,
            "Truncation": Truncation,
        },
    ),
    (
        "What a model costs",
        {"hw.cost": hw.cost, "Cost": Cost, "headwise.cost.explicit.explicit": explicit},
    ),
    (
        "What the theory says",
        {
            "hw.theorems": hw.theorems,
            "Theorem": Theorem,
            "Theorem.check": Theorem.check,
            "Outcome": Outcome,
            "Evidence": Evidence,
            "Measured": Measured,
            "headwise.theorems.grading.grade": grade,
        },
    ),
    (
        "Models of the library",
        {
            "hw.load": hw.load,
            "Checkpoint": Checkpoint,
            "hw.save": hw.save,
            **{
                f"hw.models.{name}": getattr(hw.models, name)
                for name in (
                    "preset",
                    "decoder_sizes",
                    "build",
                    "Architecture",
                    "Decoder",
                    "Cache",
                    "MultiHeadAttention",
                    "load_adapter",
                )
            },
        },
    ),
    (
        "Generating",
        {
            "hw.generate": hw.generate,
            "hw.stream": hw.stream,
            **{
                f"hw.models.{name}": getattr(hw.models, name)
                for name in ("generate", "Generated", "stream", "choice")
            },
        },
    ),
    ("Training", {"hw.train": hw.train, "TrainConfig": TrainConfig}),
    (
        "Watching a model while it is trained",
        {
            "hw.Monitor": hw.Monitor,
            "Monitor.log": hw.Monitor.log,
            "Monitor.close": hw.Monitor.close,
            "hw.TrainerMonitor": hw.TrainerMonitor,
            "hw.LightningMonitor": hw.LightningMonitor,
            "hw.TensorBoardWriter": hw.TensorBoardWriter,
            "StepRecord": StepRecord,
            "headwise.monitoring.record.read_run": read_run,
            "headwise.report.health_page.write_health_page": write_health_page,
        },
    ),
    (
        "Positions",
        {
            f"hw.positions.{name}": getattr(hw.positions, name)
            for name in ("sinusoidal", "rotate", "frequencies", "alibi", "t5_bucket")
        },
    ),
    (
        "Attention itself",
        {f"hw.attention.{name}": getattr(hw.attention, name) for name in hw.attention.__all__},
    ),
)

# What the examples of a section need besides.
IMPORTS: Final = {
    "Models of the library": ">>> import tempfile\n>>> from pathlib import Path\n"
    ">>> from torch import nn\n"
    ">>> from headwise.models import Architecture, Cache, Stack, build, preset\n",
    "Generating": ">>> from headwise.models import greedy\n",
    "Training": ">>> from headwise.training.config import TrainConfig\n",
    "Positions": ">>> from headwise.positions import Layout, frequencies, slopes\n",
}

# Examples of objects whose docstring has none; a scan of the page's model is made first.
EXAMPLES: Final = {
    "LoadedModel": f'>>> loaded = hw.load_model("{MODEL}")\n'
    ">>> loaded.architecture, loaded.kind\n('llama', 'decoder')",
    "Checkpoint": '>>> model = hw.models.build(hw.models.preset("tiny"))\n'
    '>>> checkpoint = hw.load(hw.save(model, "tiny"))\n'
    ">>> checkpoint.model.architecture == model.architecture, checkpoint.tokenizer\n(True, None)",
    "Cost": f'>>> plan = hw.cost("{MODEL}", length=512, batch=2, on="h100-sxm")\n'
    ">>> plan.forward.macs * 2 == plan.flops\nTrue\n"
    ">>> plan.time.decode.bound\n'bandwidth'",
    "hw.models.Generated": '>>> model = hw.models.build(hw.models.preset("tiny"))\n'
    ">>> new = hw.models.generate(model, torch.tensor([[1, 2, 3]]), tokens=3)\n"
    ">>> new.ids.shape, new.lengths.tolist()\n(torch.Size([1, 3]), [3])",
    "Scan": '>>> scan = hw.scan(loaded, tokens=257)\n>>> scan.dataset.sizes["key"]\n257',
    "Scan.merge": '>>> other = hw.scan(loaded, "It was the best of times.")\n'
    '>>> scan.merge(other).dataset["document"].max().item()\n1',
    "Scan.save": ">>> scan.save(\"scan.nc\")\nPosixPath('scan.nc')",
    "Scan.to_dataframe": ">>> table = scan.to_dataframe()\n"
    '>>> sharpest = table.nsmallest(3, "entropy")[["layer", "head", "entropy"]]\n'
    ">>> len(sharpest)\n3",
    "hw.load_scan": '>>> hw.load_scan("scan.nc").identical(scan.dataset)\nTrue',
    "Finding": ">>> for finding in hw.findings(scan):\n"
    "...     line = f'{finding.severity}: {finding.sentence}'",
    "hw.report": ">>> hw.report(scan, \"scan.html\")\nPosixPath('scan.html')",
    "Theorem": ">>> theorem = hw.theorems()[0]\n>>> theorem.name, str(theorem.kind)\n"
    "('convex-combination', 'identity')",
    "Outcome": ">>> outcome = theorem.check()\n>>> outcome.where, outcome.warnings\n"
    "('random weights', ())",
    "Evidence": ">>> all(control.failed for control in outcome.evidence.controls)\nTrue",
    "Measured": ">>> measured = outcome.evidence.measured[0]\n"
    ">>> measured.predicted, measured.holds\n"
    "(0.0, True)",
    "Monitor.log": '>>> model = hw.models.build(hw.models.preset("tiny")).train()\n'
    ">>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    '>>> monitor = hw.Monitor(model, every=1, out="run")\n'
    ">>> model(torch.arange(12)[None]).square().mean().backward()\n"
    ">>> monitor.log(rate=0.1)\n>>> optimizer.step()",
    "hw.LightningMonitor": ">>> # trainer = L.Trainer(callbacks=[hw.LightningMonitor(every=10)])",
    "Monitor.close": ">>> monitor.close()\n>>> len(monitor.records)\n1",
    "StepRecord": ">>> [record] = monitor.records\n>>> record.values, len(record.layers)\n"
    "({'rate': 0.1}, 2)\n"
    '>>> len(record.layers[0].figures["max_logit"])\n4',
    "headwise.monitoring.record.read_run": ">>> from headwise.monitoring.record import read_run\n"
    '>>> [record.step for record in read_run("run").records]\n[1]',
    "hw.attention.log_sum_exp": ">>> hw.attention.log_sum_exp(torch.zeros(1, 8)).exp()\n"
    "tensor([8.])",
    "hw.attention.output": ">>> half = torch.full((1, 1, 1, 2), 0.5)\n"
    ">>> values = torch.tensor([1.0, 3.0]).view(1, 1, 2, 1)\n"
    ">>> hw.attention.output(half, values).item()\n2.0",
    "hw.attention.entropy": ">>> hw.attention.entropy(torch.full((1, 4), 0.25)).exp()\n"
    "tensor([4.])",
    "hw.attention.Statistics": ">>> x = torch.randn(1, 2, 31, 8)\n"
    ">>> hw.attention.measure(x, x, x, mask=hw.masks.Causal()).entropy.shape\n"
    "torch.Size([1, 2, 31])",
}


SECTIONS: Final = {
    "Args:": "Arguments",
    "Attributes:": "Attributes",
    "Raises:": "Raises",
    "Errors:": "Raises",
}


def library_page() -> str:
    """Every public function: signature, docstring, example; then masks and errors."""
    parts = [LIBRARY_HEAD]
    for heading, objects in LIBRARY:
        parts.append(f"## {heading}\n")
        if heading in IMPORTS:
            parts.append(f"```pycon\n{IMPORTS[heading]}```\n")
        parts += [_entry(name, thing) for name, thing in objects.items()]
    parts.append(_masks())
    parts.append("## Errors\n\nAll errors are in `hw.errors`; each is one line.\n")
    parts.append(f"```text\n{_tree(hw.errors.HeadwiseError)}```\n")
    return "\n".join(parts)


def _entry(name: str, thing: Any) -> str:
    text, example = _docstring(thing)
    example = example or EXAMPLES.get(name, "")
    if not example:
        raise SystemExit(f"{name} has no example")
    bare = name.rpartition(".")[2]
    if name.startswith("hw.") and name not in EXAMPLES:
        example = re.sub(rf"(?<![\w.])(?<!import ){bare}\(", f"{name}(", example)
    parts = [f"### {name}\n"]
    if not inspect.isclass(thing):
        parts.append(f"```python\n{_stub(bare, thing)}\n```\n")
    return "\n".join([*parts, text + "\n", f"```pycon\n{example}\n```\n"])


def _stub(name: str, function: Callable[..., Any]) -> str:
    """The signature as code: one line, or one parameter a line."""
    signature = inspect.signature(inspect.unwrap(function))
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    clean = signature.replace(parameters=parameters)
    line = _plain(f"def {name}{clean}: ...")
    if len(line) <= 88:
        return line
    shown, starred = [], False
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not starred:
            shown, starred = [*shown, "*"], True
        shown.append(_plain(str(p)))
    body = "".join(f"    {each},\n" for each in shown)
    return f"def {name}(\n{body}) -> {signature.return_annotation!s}: ..."


def _plain(code: str) -> str:
    """Annotations without their quotes, words as defaults in theirs, members of an enum by name."""
    quoted = re.sub(r"(?<== )'([^']*)'", r'"\1"', code)
    return re.sub(r"<(\w+\.\w+): [^>]*>", r"\1", quoted).replace("'", "")


def _docstring(thing: Any) -> tuple[str, str]:
    """The docstring as Markdown, and its example."""
    text = inspect.getdoc(thing) or ""
    text, _, example = text.partition("\nExample:\n")
    example, _, after = textwrap.dedent(example).partition("\n\n")
    text = f"{text}\n\n{after}" if after else text
    out: list[str] = []
    for paragraph in text.strip().split("\n\n"):
        first, _, rest = paragraph.partition("\n")
        if first in SECTIONS:
            entries = re.split(r"\n(?=\S)", textwrap.dedent(rest))
            pairs = [entry.partition(":") for entry in entries]
            listed = [f"- `{name}`: {' '.join(words.split())}" for name, _, words in pairs]
            out.append(f"{SECTIONS[first]}:\n\n" + "\n".join(listed))
        else:
            out.append(paragraph)
    return "\n\n".join(out).replace("``", "`"), example.strip()


def _masks() -> str:
    rows = []
    for name in hw.masks.__all__:
        thing = getattr(hw.masks, name)
        if not callable(thing) or name in ("Mask", "Segment", "describe"):
            continue
        fields = str(inspect.signature(thing)).partition(" -> ")[0].replace("'", "")
        sentence = (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ")
        rows.append((f"`hw.masks.{name}{fields}`", sentence.replace("``", "`")))
    return (
        "## Masks\n\nRules about positions; no n×n array. Combine them with `&` (both) and `|`\n"
        "(either). A window of W is W keys, the query's own included.\n\n"
        + _table(("mask", "meaning"), rows)
        + "\n```pycon\n>>> mask = hw.masks.Causal() & hw.masks.Window(4)\n"
        ">>> q = torch.zeros(1, 1, 9, 2)\n"
        ">>> hw.attention.measure(q, q, mask=mask).visible[0, 0].tolist()\n"
        "[1, 2, 3, 4, 4, 4, 4, 4, 4]\n```\n"
    )


def _tree(kind: type, depth: int = 0) -> str:
    sentence = (kind.__doc__ or "").strip().splitlines()[0].replace("``", "`")
    line = f"{'    ' * depth + kind.__name__:28}{sentence}\n"
    return line + "".join(_tree(each, depth + 1) for each in kind.__subclasses__())


# ---------------------------------------------------------------- statistics.md

# name: smallest and largest possible value of a head; n stands for the visible keys of a row.
_SHARE = ("0", "1")
_ANY = ("−∞", "∞")
RANGES: Final[dict[str, tuple[str, str]]] = {
    "entropy": ("0", "ln n"),
    "entropy_fraction": _SHARE,
    "entropy_without_sink": ("0", "ln n"),
    "entropy_without_sink_fraction": _SHARE,
    "effective_keys": ("1", "n"),
    "jacobian_trace": _SHARE,
    "top_weight": _SHARE,
    "dead_rows": _SHARE,
    "dead_rows_not_sink": _SHARE,
    "distance": ("0", "n"),
    "sink_mass": _SHARE,
    "self_mass": _SHARE,
    "previous_mass": _SHARE,
    "null_mass": _SHARE,
    "max_logit": _ANY,
    "min_logit": _ANY,
    "max_abs_logit": ("0", "∞"),
    "max_logit_query": ("0", "tokens"),
    "max_logit_key": ("0", "tokens"),
    "mean_logit": _ANY,
    "logit_std": ("0", "∞"),
    "log_sum_exp": _ANY,
}
SAMPLED: Final = {
    "mean": "unbiased estimate",
    "extreme": "bound: extreme of the measured rows",
    "quantile": "quantile of the measured rows",
    "measured": "count of the measured rows",
    "whole": "exact",
}

STATISTICS_HEAD = f"""# The statistics

{MADE}
s_ij are the logits of query i and key j after scaling, softcap, bias and mask, as they enter the
softmax; a_ij = exp(s_ij) / Σ_j exp(s_ij) are the weights, before dropout; logarithms are natural.
The sums are accumulated in float32, or float64 where the model computes in float64. Rows without a
visible key are in no mean, and neither are padded queries.

When all rows are measured, which is the default, every number is exact (up to the rounding of that
arithmetic). The column "with `--rows`" says what it is when only some rows were measured; each
measured row is exact. n is the number of keys that a row can see.
[The schema](../schema.md) says how the numbers are stored.
"""


def statistics_page() -> str:
    """Every statistic: formula, unit, range, exactness, source."""
    parts = [STATISTICS_HEAD, "## Of a head\n"]
    columns = ("name", "formula", "unit", "range", "with `--rows`", "source")
    parts.append(_table(columns, [_statistic(name) for name in RANGES]))
    parts.append(
        "## Distributions of a head\n\n"
        f"For each of {', '.join(f'`{name}`' for name in PROFILED)}:\n"
        "`<name>_quantile`, quantiles over rows (0, 1, 5, 25, 50, 75, 95, 99 and 100%), and\n"
        "`<name>_profile`, the mean over the rows of each position bin.\n"
    )
    maps = [n for n, v in VARIABLES.items() if v.dims[0] == "layer" and _is_map(n)]
    rest = ("name", "formula", "unit", "with `--rows`", "source")
    parts += ["## Maps and counts\n", _table(rest, [_short(name) for name in maps])]
    blocks = [n for n, v in VARIABLES.items() if v.dims == ("block",)]
    parts += ["## Of the residual stream\n", _table(rest, [_short(name) for name in blocks])]
    parts += ["## Of the gradients\n", "Measured with `--gradients`.\n"]
    gradients = [n for n, v in VARIABLES.items() if v.dims == ("parameter",)]
    parts.append(_table(rest, [_short(name) for name in gradients]))
    parts += ["## Of the circuits\n", CIRCUIT_WORDS]
    columns = ("name", "formula", "unit", "source")
    parts.append(_table(columns, [_circuit(name) for name in CIRCUITS]))
    return "\n".join(parts)


CIRCUIT_WORDS: Final = """From the weights, with `headwise circuits` and in `headwise report`. Row
vectors: q = x W_Q, W_QK = W_Q W_Kᵀ, W_OV = W_V W_O; σ are singular values, λ eigenvalues. Folded:
with the linear part of the norm before attention in the weights, and in W_OV that of a norm of what
attention writes (Gemma 2, OLMo 2), where there is one; divisions of norms are positive numbers of
each token, and in no matrix. With rotary positions W_QK is that of distance 0.
"""


def _circuit(name: str) -> tuple[str, ...]:
    entry = CIRCUITS[name]
    return (f"`{name}`", entry.definition, entry.units, entry.source)


def _is_map(name: str) -> bool:
    return name not in {*RANGES, *CIRCUITS} and not name.endswith(
        ("_quantile", "_profile", "_rows")
    )


def _statistic(name: str) -> tuple[str, ...]:
    short = _short(name)
    return (*short[:3], " to ".join(RANGES[name]), *short[3:])


def _short(name: str) -> tuple[str, ...]:
    v = VARIABLES[name]
    return (f"`{name}`", v.definition, v.units, SAMPLED[v.sampling], v.source)


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [columns, tuple("---" for _ in columns), *rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


PAGES: Final = {
    "cli.md": cli_page,
    "library.md": library_page,
    "statistics.md": statistics_page,
}

if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for file, page in PAGES.items():
        (FOLDER / file).write_text(page(), encoding="utf-8")
        print(f"wrote docs/reference/{file}")
