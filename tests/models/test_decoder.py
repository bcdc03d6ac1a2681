"""The decoder as a user calls it: shapes, what belongs together, half precision, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.errors import InputError, OptionError, ShapeError
from headwise.models import (
    Architecture,
    Decoder,
    Embedding,
    Stack,
    build,
    decoder_sizes,
    fused,
    preset,
)
from tests.models.architectures import sharp, some_ids
from tests.models.oracle import decoder_of, model_bound, spread
from tests.tolerance import ROUNDING, assert_close, finite_max

SIZES: dict[str, Any] = {
    "vocab": 17, "d_model": 12, "layers": 2, "heads": 3, "kv_heads": 1, "d_ff": 7, "context": 13,
}  # fmt: skip


def tiny(**more: Any) -> Decoder:
    return sharp(decoder_sizes(**{**SIZES, **more}))


def test_logits_are_the_unembedded_hidden_states() -> None:
    model, ids = tiny(), some_ids(2, 11)
    hidden = model.hidden(ids)
    assert hidden.shape == (2, 11, 12)
    assert torch.equal(model.unembed(hidden), model(ids))
    assert model(ids).shape == (2, 11, 17)
    assert_close(model(ids), hidden @ model.embedding.tokens.weight.T, model_bound(model, hidden))


def test_a_tied_model_has_one_table() -> None:
    tied, untied = tiny(), tiny(tied=False)
    assert "unembedding.weight" not in tied.state_dict()
    assert untied.state_dict()["unembedding.weight"].shape == (17, 12)
    ids = some_ids(1, 5)
    tied(ids).sum().backward()
    used = tied.embedding.tokens.weight.grad
    assert used is not None
    assert bool((used != 0).any(-1).all())  # every row: as an output


def test_position_ids_are_one_row_or_one_each() -> None:
    model, ids = tiny(), some_ids(2, 11)
    places = torch.arange(11)
    want = model(ids)
    for given in (places, places[None], places.expand(2, 11), places.int()):
        assert_close(model(ids, position_ids=given), want, model_bound(model, want))
    both = torch.stack((places, 2 * places))
    got = model(ids, position_ids=both)
    assert_close(got[:1], want[:1], model_bound(model, want))
    assert finite_max(got[1] - want[1]) > 1e6 * model_bound(model, want)


def test_batches_are_their_rows() -> None:
    model, ids = tiny(), some_ids(3, 11)
    whole = model(ids)
    rows = torch.cat([model(ids[b : b + 1]) for b in range(3)])
    assert_close(rows, whole, model_bound(model, whole))


def test_gradients_do_not_depend_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding and windows: as arrays for the fused kernel, or streaming."""
    ids, keep = some_ids(2, 11), torch.ones(2, 11, dtype=torch.bool)
    keep[0, :4] = False
    model = tiny(windows=(3, None), qk_norm="head")

    def gradients() -> list[Tensor]:
        loss = model(ids, mask=keep)[keep].square().mean()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    want = gradients()
    monkeypatch.setattr(fused, "ARRAY_LIMIT", 0)
    for a, b in zip(gradients(), want, strict=True):
        assert not a.isnan().any()
        assert_close(a, b, 1e3 * model_bound(model, torch.ones(1).double() * finite_max(b)))
    assert max(finite_max(b) for b in want) > 1e-3


def relative(a: Tensor, b: Tensor) -> float:
    """Root mean square of the difference over that of what is right."""
    return float(((a - b).square().mean() / b.square().mean()).detach().sqrt())


@pytest.mark.parametrize("norm", ["rms", "rms+1", "layer"])
def test_bfloat16_is_near_float32(norm: str) -> None:
    """The same rounded weights in both.

    A block rounds about 6 times on each of its two writes (norm, projection, product or rotation,
    weights times values, projection, sum), the embedding and the last norm twice: each time by at
    most 2^-8 of what is rounded, and errors add at worst: 2^-8 (12 · layers + 4) of the hidden
    state. Logits (one more product) are held to the same.
    """
    low = decoder_of(spread(build(decoder_sizes(**SIZES, norm=norm)))).to(torch.bfloat16).eval()
    high = build(low.architecture)
    high.load_state_dict(low.state_dict())
    high.eval()
    ids = some_ids(5, 13)
    with torch.no_grad():
        got, want = low(ids).float(), high(ids)  # type: ignore[operator]
    assert got.dtype == torch.float32
    limit = ROUNDING[torch.bfloat16] * (12 * 2 + 5)
    assert relative(got, want) <= limit
    assert relative(got, want) > 2.0**-12  # it is bfloat16
    high.decoder.norm = torch.nn.Identity()  # type: ignore[union-attr]
    with torch.no_grad():
        assert relative(got, high(ids)) > 2 * limit  # type: ignore[operator]


@pytest.mark.parametrize(
    "more",
    [{}, {"qk_norm": "head"}, {"qk_norm": "all", "softcap": 2.0}, {"sinks": True}],
    ids=["plain", "norms", "norms and softcap", "sinks"],
)
def test_autocast_trains_every_way(more: dict[str, Any]) -> None:
    """Norms answer in float32 there, linear maps in bfloat16: attention takes one type.

    Within the roundings of ``test_bfloat16_is_near_float32`` and as many for the weights.
    """
    model = decoder_of(spread(build(decoder_sizes(**SIZES, **more)))).eval()
    ids, keep = some_ids(3, 11), torch.ones(3, 11, dtype=torch.bool)
    keep[0, :3] = False
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model(ids, mask=keep)
        low[keep].float().square().mean().backward()
    assert relative(low[keep].float(), model(ids, mask=keep)[keep]) <= 2 * 2.0**-8 * (12 * 2 + 5)
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert bool(p.grad.isfinite().all()), name


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        ({"ids": [[1, 2]]}, ShapeError, "a list; allowed: a tensor (batch, position) of one pos"),
        ({"ids": some_ids(1, 5)[0]}, ShapeError, "token ids of shape (5,); allowed: a tensor (ba"),
        ({"ids": some_ids(1, 5)[:, :0]}, ShapeError, "token ids of shape (1, 0); allowed: a ten"),
        ({"ids": some_ids(1, 5).float()}, ShapeError, "token ids of shape (1, 5) and type torch.f"),
        ({"ids": some_ids(1, 5) + 17}, OptionError, "token id "),
        ({"ids": some_ids(1, 14)}, OptionError, "a sequence of 14 tokens for a context of 13; al"),
        (
            {"position_ids": torch.arange(4)},
            ShapeError,
            "position ids of shape (4,) and type torch.int64 for ids of shape (2, 5); allowed: who",
        ),
        (
            {"position_ids": torch.arange(5.0)},
            ShapeError,
            "position ids of shape (5,) and type torch.float32 for ids of shape (2, 5); allowed: w",
        ),
        ({"mask": torch.ones(2, 5)}, ShapeError, "a mask of type torch.float32; allowed: a mask"),
        ({"mask": torch.ones(2, 4).bool()}, ShapeError, "a mask of shape (2, 4) for 2 sequences,"),
        ({"mask": torch.ones(2, 3, 5).bool()}, ShapeError, "a mask of shape (2, 3, 5) for 2 seq"),
    ],
)
def test_bad_input_is_one_clear_line(
    call: dict[str, Any], kind: type[InputError], words: str
) -> None:
    with pytest.raises(kind) as caught:
        tiny()(**{"ids": some_ids(2, 5), **call})
    message = str(caught.value)
    assert message.startswith(words)
    assert "\n" not in message
    assert "; allowed: " in message


def test_a_position_beyond_the_learned_table_is_refused_however_long_is_allowed() -> None:
    stack = Stack(layers=1, heads=2, kv_heads=2, d_head=5, d_ff=7)
    model = build(
        Architecture(
            vocab=17, d_model=10, context=13, decoder=stack,
            embedding=Embedding(positions="learned"),
        )
    )  # fmt: skip
    model.allow_long = True
    with pytest.raises(
        OptionError, match="position 13 in a learned table of 13 positions; allowed"
    ):
        model(some_ids(1, 14))


def test_longer_than_the_context_runs_where_it_is_allowed() -> None:
    model = decoder_of(build(preset("tiny")))
    ids = some_ids(1, 65)
    with pytest.raises(OptionError, match="or set allow_long = True on the model"):
        model(ids)
    model.allow_long = True
    assert model(ids).shape == (1, 65, 257)
