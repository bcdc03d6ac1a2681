"""Exercise 7, "implement multi-head attention": a function is graded, requirement by requirement.

The function that is asked for, all tensors in one dtype and on the CPU:

    attention(x, w_q, w_k, w_v, w_o, heads, *, mask=None, kv_heads=None) -> Tensor

    x         batch n d
    w_q       d d             queries are x @ w_q; head m has the columns m·d_k to (m+1)·d_k
    w_k, w_v  d (kv_heads·d_k)
    w_o       d d             the heads side by side, times w_o; no biases
    heads     h; d_k = d / h
    mask      boolean, True = may attend; broadcasts to batch head query key as in torch: n n, or
              batch 1 n n; without the argument everything is visible
    kv_heads  g, a divisor of h: neighbouring query heads share; left out where it equals h
    returns   batch n d

``mask`` and ``kv_heads`` are given by name, and only where they are not None, so a function may
lack them: without ``kv_heads`` grouped heads are "not supported", which is no failure.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.theorems.grading_cases import PROBES, Case, Inputs
from headwise.theorems.grading_mistakes import Mistake, recognise
from headwise.theorems.grading_requirements import REQUIREMENTS, Requirement
from headwise.theorems.grading_subject import Failed, Raised, Subject, Unjudged

__all__ = ["SIGNATURE", "Grade", "Graded", "Mark", "grade", "load_function"]

SIGNATURE: Final = "attention(x, w_q, w_k, w_v, w_o, heads, *, mask=None, kv_heads=None) -> Tensor"

_FORM: Final = "FILE.py:FUNCTION"


class Mark(StrEnum):
    """What is said of one requirement."""

    PASSED = "passed"
    FAILED = "FAILED"
    UNSUPPORTED = "not supported"
    UNJUDGED = "not judged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """One requirement.

    Attributes:
        asks: what it asks.
        sentence: what was found; of a failure, what is wrong and on which smallest input.
        cause: the known mistakes that give just these numbers; "" where none do.
        case: the smallest failing input; ``case.inputs()`` makes it.
    """

    requirement: str
    asks: str
    mark: Mark
    sentence: str
    cause: str = ""
    case: Case | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """Every requirement of one function."""

    function: str
    results: tuple[Graded, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing failed and everything could be judged that is supported."""
        return all(each.mark in (Mark.PASSED, Mark.UNSUPPORTED) for each in self.results)

    @property
    def failures(self) -> tuple[Graded, ...]:
        """The requirements that failed."""
        return tuple(each for each in self.results if each.mark is Mark.FAILED)

    @property
    def sentence(self) -> str:
        """The grade in one sentence."""
        count = sum(each.mark is Mark.PASSED for each in self.results)
        said = f"{self.function} meets {count} of {len(self.results)} requirements"
        for mark in (Mark.FAILED, Mark.UNJUDGED, Mark.UNSUPPORTED):
            names = [each.requirement for each in self.results if each.mark is mark]
            if names:
                said += f"; {mark.lower()}: {', '.join(names)}"
        return f"{said}."


def grade(function: Callable[..., Any]) -> Grade:
    """Judge a function for multi-head attention; its signature stands at the top of this module.

    Every requirement is tried on small inputs first, so the input of a failure is the smallest on
    which it was found.

    Example:
        >>> from headwise.theorems.grading import grade
        >>> from headwise.theorems.grading_cases import Inputs, defined
        >>> def attention(x, w_q, w_k, w_v, w_o, heads, mask=None, kv_heads=None):
        ...     return defined(Inputs(x=x, w_q=w_q, w_k=w_k, w_v=w_v, w_o=w_o, heads=heads,
        ...                           mask=mask, kv_heads=kv_heads))
        >>> grade(attention).passed
        True
    """
    subject = Subject(function)
    results: list[Graded] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for requirement in REQUIREMENTS:
            results.append(_graded(subject, requirement, results))
    return Grade(function=subject.name, results=tuple(results))


def _graded(subject: Subject, requirement: Requirement, before: list[Graded]) -> Graded:
    def result(mark: Mark, sentence: str, **more: Any) -> Graded:
        name, asks = requirement.name, requirement.asks
        return Graded(requirement=name, asks=asks, mark=mark, sentence=sentence, **more)

    failed = {each.requirement: each for each in before if each.mark is Mark.FAILED}
    if requirement.mask != "none" and not subject.takes("mask"):
        return result(Mark.FAILED, "it takes no argument mask")
    if requirement.grouped and not subject.takes("kv_heads"):
        return result(Mark.UNSUPPORTED, "it takes no argument kv_heads")
    alone = requirement.heads_apart and "heads" in failed
    cases = requirement.cases(most_heads=1 if alone else None)
    for case in cases:
        try:
            requirement.check(subject, case)
        except Raised as error:
            shape = failed.get("shape")
            if shape is not None and _start(shape.sentence) == _start(str(error)):
                return result(Mark.UNJUDGED, "it does not run: see shape")
            return result(Mark.FAILED, f"{error} (on {case.said})", case=case)
        except Failed as error:
            cause = _cause(subject, case)
            return result(Mark.FAILED, f"{error} (on {case.said})", cause=cause, case=case)
        except Unjudged as reason:
            return result(Mark.UNJUDGED, f"{reason} (on {case.said})", case=case)
    only = ", with one head: more are not merged rightly" if alone else ""
    return result(Mark.PASSED, f"on {len(cases)} inputs up to {cases[-1].said}{only}")


def _start(sentence: str) -> str:
    return sentence.split(":")[0].split(" (")[0]


def _cause(subject: Subject, case: Case) -> str:
    """The mistakes that give the function's numbers on the failing input and on larger ones."""
    plain = _mistakes(subject, PROBES["none"])
    if case.mask == "none" and case.kv_heads is None:
        return _said(_needed(subject, plain, case) if plain else ())
    probes = PROBES["grouped"] if case.kv_heads else PROBES[case.mask]
    here = _mistakes(subject, (case, *probes))
    new = tuple(each for each in here if each not in plain)
    return _said(new or here)


def _mistakes(subject: Subject, cases: tuple[Case, ...]) -> tuple[Mistake, ...]:
    try:
        return recognise(_found(subject, cases))
    except Failed:
        return ()


def _needed(subject: Subject, mistakes: tuple[Mistake, ...], case: Case) -> tuple[Mistake, ...]:
    """Those of the mistakes that give the numbers of this case; all where it takes all."""
    try:
        return recognise(_found(subject, (case,)), allowed=mistakes) or mistakes
    except Failed:
        return mistakes


def _found(subject: Subject, cases: tuple[Case, ...]) -> list[tuple[Inputs, Tensor]]:
    made = [case.inputs() for case in cases]
    return [(inputs, subject(inputs).detach().double()) for inputs in made]


def _said(mistakes: tuple[Mistake, ...]) -> str:
    return "; and ".join(each.sentence for each in mistakes)


def load_function(where: str) -> Callable[..., Any]:
    """The function of a Python file, ``"file.py:function"``; the file is run as a fresh module.

    Raises:
        OptionError: no such file or function, or the file cannot be run; one line says which.

    Example:
        >>> load_function("no_such_file.py:attention")
        Traceback (most recent call last):
            ...
        headwise.errors.OptionError: there is no file no_such_file.py; allowed: FILE.py:FUNCTION
    """
    path_said, _, name = where.rpartition(":")
    if not path_said or not name.isidentifier():
        raise OptionError(f"{where!r} names no function of a file", allowed=_FORM)
    path = Path(path_said).expanduser()
    if not path.is_file():
        raise OptionError(f"there is no file {path_said}", allowed=_FORM)
    found = _run(path, path_said)
    function = getattr(found, name, None)
    if function is None:
        raise OptionError(
            f"{path_said} has no function {name!r}", allowed=_functions(found) or "none is there"
        )
    if not callable(function):
        raise OptionError(f"{name} in {path_said} is no function but {type(function).__name__}")
    call: Callable[..., Any] = function
    return call


def _run(path: Path, said: str) -> Any:
    spec = importlib.util.spec_from_loader("graded_function", loader=None, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    try:
        code = compile(path.read_bytes(), str(path), "exec")
        with _folder_first(path.resolve().parent), torch.random.fork_rng(devices=[]):
            exec(code, module.__dict__)
    except SyntaxError as error:
        raise OptionError(f"{said}, line {error.lineno}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise OptionError(f"{said} cannot be run: {text}") from None
    return module


@contextmanager
def _folder_first(folder: Path) -> Iterator[None]:
    """Modules beside the file can be imported, as when it is run; afterwards nothing is left."""
    loaded = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - loaded:
            origin = getattr(sys.modules[name], "__file__", None)
            if origin and Path(origin).resolve().parent == folder:
                del sys.modules[name]


def _functions(module: Any) -> str:
    names = [
        name
        for name, each in vars(module).items()
        if callable(each) and getattr(each, "__module__", None) == module.__name__
    ]
    return ", ".join(names)
