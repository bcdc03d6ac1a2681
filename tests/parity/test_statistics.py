"""Statistics of observed models against the dense attention matrices that eager mode returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.observation.attach import observe
from headwise.results.records import LayerRecord
from tests.parity.families import FAMILIES, build, in_double, inputs
from tests.parity.test_outputs import doubled
from tests.parity.watching import captured_calls, run
from tests.tolerance import Tolerance, assert_close

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*")

# Eager mode gives no matrices here (two towers), or those of another rule (chosen keys per query
# are folded into the mask there; outputs are compared in test_outputs).
_NO_MATRICES = ("clip",)


def matrices(output: Any) -> dict[str, list[Tensor]]:
    """The attention matrices by role, in the order of layers."""
    get = output.get
    encoder, decoder = get("encoder_attentions"), get("decoder_attentions")
    if decoder is not None:
        return {"encoder": [*(encoder or ())], "decoder": [*decoder],
                "cross": [*(get("cross_attentions") or ())]}  # fmt: skip
    return {"": [a for a in output.attentions if a is not None]}


def expected(a: Tensor, queries: Tensor, keys: Tensor, relative: bool) -> dict[str, Tensor]:
    """Means over the real rows of a dense matrix ``batch head query key``, from the definitions."""
    a = a.double() * keys[:, None, None, :]
    rows = queries[:, None, :].expand(a.shape[:3])
    count = rows[:, 0].sum()

    def mean(x: Tensor) -> Tensor:
        return torch.where(rows, x, 0.0).sum((0, 2)) / count

    square = (a * a).sum(-1)
    i, j = torch.arange(a.shape[2])[:, None], torch.arange(a.shape[3])[None]
    values = {
        "entropy": mean(-torch.xlogy(a, a).sum(-1)),
        "effective_keys": mean(1 / square),
        "jacobian_trace": mean(1 - square),
        "top_weight": mean(a.amax(-1)),
        "sink_mass": mean(a[..., 0]),
    }
    if relative:
        values["distance"] = mean((a * (i - j).abs()).sum(-1))
        values["self_mass"] = mean((a * (i == j)).sum(-1))
        values["previous_mass"] = mean((a * (i - 1 == j)).sum(-1))
    received = torch.where(rows[..., None], a, 0.0).sum(2).transpose(0, 1)
    values["received"] = received[:, keys]
    return values


def compare(layer: LayerRecord, want: dict[str, Tensor], bound: Tolerance, longest: int) -> None:
    rows = layer.rows
    # 1/Σa² errs by a share of itself; it is at most n, unless a sink takes a part of the row.
    most = max(float(want["effective_keys"].max()), longest)
    absolute = {
        "entropy": bound.entropy, "effective_keys": bound.square * most,
        "jacobian_trace": bound.square, "top_weight": bound.weight, "sink_mass": bound.weight,
        "distance": bound.distance(longest), "self_mass": bound.weight,
        "previous_mass": bound.weight, "received": bound.weight * rows,
    }  # fmt: skip
    for name, value in want.items():
        got = layer.received if name == "received" else layer.values[name]
        assert_close(got, value, absolute[name])


@pytest.mark.parametrize("name", [n for n in FAMILIES if n not in _NO_MATRICES])
def test_against_the_matrices_of_eager_mode(name: str) -> None:
    """The model runs in float64, but eager mode takes its softmax in float32: its weights are
    those of logits rounded to float32, so the bounds are those of float32. Each layer reads the
    rounding of the layers before it, hence one ε per layer (hidden sizes are of order one)."""
    model = in_double(build(name))
    given, _ = inputs(name)
    given = doubled(given)
    with captured_calls() as calls, observe(model) as scan:
        run(model, given)
    model.set_attn_implementation("eager")
    dense = matrices(run(model, {**given, "output_attentions": True}))
    queue = {role: list(found) for role, found in dense.items()}
    assert sum(map(len, queue.values())) == len(scan.record.layers)
    for depth, (layer, call) in enumerate(zip(scan.record.layers, calls, strict=True)):
        a = queue[layer.role if layer.role in queue else ""].pop(0)
        queries = real_rows(given, a.shape[0], a.shape[2], layer.query_stream)
        keys = real_rows(given, a.shape[0], a.shape[3], layer.key_stream)
        want = expected(a, queries, keys, layer.role != "cross")
        bound = Tolerance.of(call.q.float(), call.k.float(), call.scale, call.bias, call.sinks)
        wide = Tolerance(bound.epsilon * (depth + 1), bound.reach, bound.keys)
        compare(layer, want, wide, a.shape[3])


def real_rows(given: dict[str, Tensor], batch: int, length: int, stream: str) -> Tensor:
    """Which tokens are real: those of the text or the source carry a mask."""
    mask = given.get("attention_mask")
    if stream == "target" or mask is None or mask.shape[1] != length:
        return torch.ones(batch, length, dtype=torch.bool)
    return mask.bool()


def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of one key less is noticed."""
    from headwise.observation.rule import Pattern

    original = Pattern.mask

    def narrower(self: Pattern, batch: int, start: int = 0) -> Any:
        mask = original(self, batch, start)
        return type(mask)(mask.before - 1, mask.after) if hasattr(mask, "before") else mask

    monkeypatch.setattr(Pattern, "mask", narrower)
    with pytest.raises(AssertionError):
        test_against_the_matrices_of_eager_mode("mistral")
