"""The program ``headwise``: its commands, and how every failure ends in one line.

Exit codes: 0 done; 2 what was asked cannot be done, or what was measured is not finite;
3 a statement of `theorems` did not come out as expected, or a graded function is wrong;
130 stopped by Ctrl-C; 1 a bug in Headwise.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from headwise import __version__
from headwise.cli.circuits import circuits
from headwise.cli.cost import cost
from headwise.cli.generate import generate
from headwise.cli.health import health
from headwise.cli.heap import keep_large_blocks_out_of_the_heap
from headwise.cli.report import report
from headwise.cli.scan import scan
from headwise.cli.show import show
from headwise.cli.theorems import theorems
from headwise.cli.train import train
from headwise.cli.truncate import truncate
from headwise.errors import HeadwiseError

__all__ = ["app", "main", "run"]

app = typer.Typer(
    name="headwise",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback(invoke_without_command=True)
def headwise(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """An exact measuring instrument for transformers."""
    if version:
        typer.echo(f"headwise {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


class _Stopped(Exception):
    """Ctrl-C, under a name of our own: typer would end the program without a word."""


def _told(command: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(command)
    def run_command(*arguments: Any, **options: Any) -> int:
        try:
            code = command(*arguments, **options)
            sys.stdout.flush()  # while a full disk can still be said
        except KeyboardInterrupt:
            raise _Stopped from None
        return code

    return run_command


for _command in (report, scan, show, circuits, truncate, cost, theorems, train, generate, health):
    app.command()(_told(_command))


def main() -> None:
    """The entry point of the console script."""
    keep_large_blocks_out_of_the_heap()
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return the exit code; every failure is one line on stderr.

    Example:
        >>> run(["--version"])
        headwise 0.1.0
        0
    """
    try:
        code = typer.main.get_command(app)(
            _with_json_target(arguments), prog_name="headwise", standalone_mode=False
        )
        return code if isinstance(code, int) else 0
    except HeadwiseError as error:
        return _fail(str(error), error, 2)
    except (_Stopped, KeyboardInterrupt, typer.Abort) as error:
        return _fail("stopped; nothing was written", error, 130)
    except MemoryError as error:
        return _fail("out of memory; lower --tokens, --batch or --window", error, 2)
    except BrokenPipeError:
        _drop_output()  # the reader went away: headwise … | head
        return 1
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            _drop_output()
            reason = str(error.strerror).lower()
            return _fail(f"cannot write the output: {reason}; make room there", error, 2)
        if hasattr(error, "format_message"):  # a usage error of typer, whichever click it carries
            return _fail(_usage(error, arguments), error, 2)
        text = " ".join(str(error).split())
        return _fail(
            f"a bug in Headwise: {type(error).__name__}: {text}; "
            "run again with HEADWISE_TRACEBACK=1 and report what it prints",
            error,
            1,
        )


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _drop_output() -> None:
    """Keep the interpreter from complaining at exit about what it could not write."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(line: str, error: BaseException, code: int) -> int:
    if os.environ.get("HEADWISE_TRACEBACK"):
        traceback.print_exception(error)
    # Names of files and models are data: none of them moves the cursor or colours the terminal.
    plain = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
    print(f"headwise: {plain}", file=sys.stderr)
    return code


def _usage(error: Any, arguments: Sequence[str]) -> str:
    text = " ".join(str(error.format_message()).split()).rstrip(".")
    if "--json" in arguments and "unexpected extra argument" in text:
        text += "; the FILE after --json has to end in .json"
    names = [command.callback.__name__ for command in app.registered_commands if command.callback]
    command = f"headwise {arguments[0]}" if arguments[0] in names else "headwise"
    return f"{text[:1].lower()}{text[1:]}; see {command} --help"


def _with_json_target(arguments: Sequence[str]) -> list[str]:
    """``--json`` alone means standard output; a FILE after it is one that ends in .json."""
    out: list[str] = []
    for i, argument in enumerate(arguments):
        out.append(argument)
        if argument == "--json":
            following = arguments[i + 1] if i + 1 < len(arguments) else ""
            if following != "-" and not following.endswith(".json"):
                out.append("-")
    return out
