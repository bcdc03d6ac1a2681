"""``headwise train``: a decoder trained on a text, a file or a folder of files."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli import options as o
from headwise.errors import OptionError

if TYPE_CHECKING:
    from headwise.training.loop import TrainResult

__all__ = ["train"]

_SIZES = ("d_model", "layers", "heads", "kv_heads", "d_ff")


def train(
    text: Annotated[
        Path | None,
        typer.Argument(metavar="TEXT", help="A UTF-8 text file, or a folder of .txt files."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder of the run. Required.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Settings, .toml or .json; options win over them."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in DIR.")] = False,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Steps to train. [2000]")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="NAME", help="bpe, bytes, or a tokenizer.json. [bpe]")
    ] = None,
    vocab: Annotated[int | None, typer.Option(metavar="N", help="Tokens of bpe. [4096]")] = None,
    context: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens the model reads at once. [512]")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help="Published sizes, such as llama-15m.")
    ] = None,
    d_model: Annotated[
        int | None, typer.Option(metavar="N", help="Width of the model. [256]")
    ] = None,
    layers: Annotated[int | None, typer.Option(metavar="N", help="Layers. [4]")] = None,
    heads: Annotated[int | None, typer.Option(metavar="N", help="Heads of a layer. [4]")] = None,
    kv_heads: Annotated[
        int | None, typer.Option(metavar="N", help="Key-value heads. [as many]")
    ] = None,
    d_ff: Annotated[
        int | None, typer.Option(metavar="N", help="Width of the feed-forward part. [8/3 wide]")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(metavar="N", help="Sequences of a step, over all processes. [16]")
    ] = None,
    accumulate: Annotated[
        int | None, typer.Option(metavar="N", help="Cut the batch into N micro-batches. [1]")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(metavar="X", help="Highest learning rate. [0.001]")
    ] = None,
    warmup: Annotated[int | None, typer.Option(metavar="N", help="Steps up to it. [100]")] = None,
    schedule: Annotated[
        str | None, typer.Option(metavar="NAME", help="cosine or constant. [cosine]")
    ] = None,
    weight_decay: Annotated[
        float | None, typer.Option(metavar="X", help="On matrices that are no embeddings. [0.1]")
    ] = None,
    repeated: Annotated[
        float | None, typer.Option(metavar="X", help="Share of repeated random sequences. [0]")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="float32 or bfloat16. [float32]")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of everything. [0]")] = None,
    eval_every: Annotated[
        int | None, typer.Option(metavar="N", help="Steps between validations. [200]")
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(metavar="N", help="Steps between checkpoints. [200]")
    ] = None,
    log_every: Annotated[
        int | None, typer.Option(metavar="N", help="Steps between lines of the log. [10]")
    ] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", help="Threads of the CPU.")] = None,
    device: o.Device = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Event files for TensorBoard too.")
    ] = False,
    monitor: Annotated[
        bool, typer.Option("--monitor", help="Record the health of heads and layers in DIR.")
    ] = False,
    monitor_every: Annotated[
        int | None, typer.Option(metavar="N", help="The same, every N steps. [10]")
    ] = None,
    quiet: o.Quiet = False,
) -> int:
    """Train a decoder on TEXT; DIR becomes a model that the other commands open.

    Ctrl-C saves after the step; --resume goes on as if nothing had happened. Over several
    processes: torchrun --no-python --nproc-per-node 2 headwise train TEXT --out DIR
    """
    given = {name: value for name, value in locals().items() if value is not None}
    text, out = given.pop("text", None), given.pop("out", None)
    if text is None or out is None:
        name = "TEXT" if text is None else "--out"
        raise OptionError(
            f"{name} is missing", to_do="for example: headwise train book.txt --out run"
        )
    from headwise.cli.heap import keep_blocks_for_reuse
    from headwise.cli.output import progress_bar

    keep_blocks_for_reuse()
    others = int(os.environ.get("RANK", "0")) > 0  # of the processes of torchrun, one speaks
    quiet = given.pop("quiet") or others
    try:
        with progress_bar(quiet) as progress:
            result = _train(text, out, progress, given)
    except KeyboardInterrupt:
        line = f"headwise: stopped; the last checkpoint, if there is one, stands in {out}"
        print(line, file=sys.stderr)
        return 130
    if not quiet and not result.interrupted:
        typer.echo(_summary(result))
    if result.interrupted and not others:
        print(
            f"headwise: stopped at step {result.steps:,}; saved in {result.folder}; --resume goes"
            " on from there",
            file=sys.stderr,
        )
    return 130 if result.interrupted else 0


def _train(text: Path, out: Path, progress: Any, given: dict[str, Any]) -> TrainResult:
    from headwise.training.loop import train as run

    sizes = {name: given.pop(name) for name in _SIZES if name in given}
    if sizes:
        given["model"] = sizes
    return run(text, given.pop("config", None), out=out, progress=progress, **given)


def _summary(result: TrainResult) -> str:
    validation = (
        "" if result.validation_loss is None else f", {result.validation_loss:.4f} on validation"
    )
    minutes, seconds = divmod(round(result.seconds), 60)
    return (
        f"{result.steps:,} steps, {result.tokens:,} tokens in {minutes}:{seconds:02d}\n"
        f"loss {result.loss:.4f}{validation} (nats per token);"
        f" {result.parameters:,} parameters\n"
        f"the model is in {result.folder}; next:\n"
        f"  headwise report {result.folder}\n"
        f'  headwise generate --model {result.folder} "…"'
    )
