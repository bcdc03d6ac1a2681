"""Utilisation: what share of a machine's peak a measured number of tokens per second makes.

Two ways to count the FLOPs of a token are in use. PaLM's: 6 N + 12 L H Q T, forward and backward,
without halving for the causal mask and without recomputation. The exact one: every matrix product
of the forward pass, twice that for the backward pass.

Source: Chowdhery et al. 2022, PaLM (arXiv:2204.02311), appendix B.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from headwise.cost.counting import count
from headwise.cost.parts import Parts, Rows
from headwise.cost.workload import Workload
from headwise.errors import OptionError

__all__ = ["hardware_flops", "mfu", "model_flops", "palm_flops"]

_NO_WEIGHTS = (Rows.NONE, Rows.BATCH)  # picked rows, and similarities of sequences


def palm_flops(parts: Parts, length: int) -> int:
    """FLOPs of one token of training in PaLM's convention: 6 N + 12 L H Q T.

    N counts what works on a token and multiplies: experts that are used, a tied embedding (it makes
    the logits), no table whose rows are only picked. H Q is the width of the heads, T the length;
    where keys and values differ in width, 12 H Q is 6 H (d_qk + d_value).

    Raises:
        OptionError: the length is below 1.

    Example:
        >>> from headwise.cost.explicit import explicit
        >>> parts = explicit(d_model=64, layers=2, heads=4, vocab=257, tied=True)
        >>> palm_flops(parts, 8) == 6 * (2 * 12 * 64**2 + 257 * 64 + 5 * 64) + 12 * 2 * 64 * 8
        True
    """
    if length < 1:
        raise OptionError(f"length is {length}", allowed="1 or more")
    products = (matrix for _, _, matrix in parts.matrices() if matrix.rows not in _NO_WEIGHTS)
    numbers = sum(matrix.used * (matrix.d_in * matrix.d_out + matrix.bias) for matrix in products)
    numbers += sum(vector.size for _, _, vector in parts.vectors())
    widths = sum(each.heads * (each.d_qk + each.d_value) for _, _, each in parts.attentions())
    return 6 * numbers + 6 * widths * length


def model_flops(parts: Parts, workload: Workload) -> Fraction:
    """FLOPs of one token of training, exactly: forward and backward, nothing computed again.

    Pairs of queries and keys are those of the workload: "all", or "visible" for the causal half.

    Example:
        >>> from headwise.cost.explicit import explicit
        >>> parts = explicit(d_model=64, layers=2, heads=4, vocab=257, tied=True)
        >>> palm_flops(parts, 8) - model_flops(parts, Workload(length=8)) == 6 * 5 * 64  # the norms
        True
    """
    plain = replace(workload, attention="materialised", recompute="none")
    return Fraction(count(parts, plain).training_flops, workload.batch * workload.length)


def hardware_flops(parts: Parts, workload: Workload) -> Fraction:
    """FLOPs of one token of training that the machine really does: what is computed again as well.

    Example:
        >>> from headwise.cost.explicit import explicit
        >>> parts = explicit(d_model=64, layers=2, heads=4, vocab=257, tied=True)
        >>> full = Workload(length=8, recompute="full", attention="materialised")
        >>> hardware_flops(parts, full) > model_flops(parts, full)
        True
    """
    return Fraction(count(parts, workload).training_flops, workload.batch * workload.length)


def mfu(
    flops_per_token: float | Fraction, tokens_per_second: float, peak: float, devices: int = 1
) -> float:
    """The share of the peak that is used: FLOPs per token · tokens per second / (peak · devices).

    With ``palm_flops`` or ``model_flops`` it is the model FLOPs utilisation (MFU), with
    ``hardware_flops`` the hardware FLOPs utilisation (HFU).

    Args:
        flops_per_token: of forward and backward in training, of the forward pass in inference.
        tokens_per_second: measured, over all devices.
        peak: FLOP/s of one device, dense.
        devices: how many work together.

    Raises:
        OptionError: one of them is not above 0.

    Example:
        >>> round(mfu(3.278e12, 238_300, 275e12, 6144), 3)  # PaLM 540B on 6144 TPU v4
        0.462
    """
    given = {
        "flops_per_token": flops_per_token, "tokens_per_second": tokens_per_second,
        "peak": peak, "devices": devices,
    }  # fmt: skip
    for name, value in given.items():
        if not value > 0:
            raise OptionError(f"{name} is {value}", allowed="above 0")
    return float(flops_per_token) * tokens_per_second / (peak * devices)
