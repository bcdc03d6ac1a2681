"""What a mask has to do in a function for multi-head attention, seen from what reaches what."""

from __future__ import annotations

import torch

from headwise.theorems.grading_cases import Case, rounding
from headwise.theorems.grading_subject import Failed, Raised, Subject

__all__ = ["causal", "empty_row", "padding"]


def causal(subject: Subject, case: Case) -> None:
    """Token j is replaced: exactly the queries that may see it (and its own) change."""
    inputs = case.inputs()
    keep = inputs.mask
    assert keep is not None
    before, near = subject.finite(inputs), 2 * rounding(inputs)
    sees = torch.zeros(case.n, case.n, dtype=torch.bool)
    for j in range(case.n):
        x = inputs.x.clone()
        x[:, j] += torch.randn(case.d, generator=case.generator(), dtype=torch.float64)
        changed = inputs.with_(x=x)
        difference = (subject.finite(changed) - before).abs().amax((0, 2))
        sees[:, j] = difference > max(near, 2 * rounding(changed))
    apart = ~torch.eye(case.n, dtype=torch.bool)
    leaks, missing = sees & ~keep & apart, keep & ~sees & apart
    if bool(leaks.any()):
        i, j = leaks.nonzero()[0].tolist()
        raise Failed(f"query {i} sees key {j}, which the mask hides (False)")
    if bool(missing.any()):
        i, j = missing.nonzero()[0].tolist()
        raise Failed(f"query {i} does not see key {j}, which the mask allows (True)")


def padding(subject: Subject, case: Case) -> None:
    """The last sequence without its last token, alone and without a mask, has the same outputs.

    Also where the hidden key is so large that no finite number hides its logit.
    """
    inputs = case.inputs()
    short = inputs.with_(x=inputs.x[-1:, :-1], mask=None)
    difference = float((subject.finite(inputs)[-1, :-1] - subject.finite(short)[0]).abs().max())
    if difference > 2 * rounding(short):
        raise Failed(f"the hidden last token changes outputs by {difference:.3g}")


def empty_row(subject: Subject, case: Case) -> None:
    """Row 0 sees nothing: its output is 0, or the function refuses and says what is wrong."""
    inputs = case.inputs()
    try:
        found = subject(inputs)
    except Raised as error:
        if isinstance(error.__context__, ValueError) and str(error.__context__):
            return  # it refuses such a mask, and says so
        raise
    row = found[:, 0]
    if bool(torch.isnan(row).any()):
        raise Failed("a row that may see nothing gives NaN, not 0")
    largest = float(row.abs().max())
    if largest > rounding(inputs):
        raise Failed(f"a row that may see nothing gives outputs up to {largest:.3g}, not 0")
