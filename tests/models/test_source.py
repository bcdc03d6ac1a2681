"""What a decoder with cross-attention may be given to read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headwise.errors import ShapeError
from headwise.models import Cache, EncoderDecoder, build, preset
from headwise.models.attention import MultiHeadAttention
from tests.models.oracle import model_bound, spread
from tests.tolerance import assert_close, finite_max


def model() -> EncoderDecoder:
    made = spread(build(preset("tiny-encoder-decoder"), dtype=torch.float64)).eval()
    assert isinstance(made, EncoderDecoder)
    return made


IDS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "a source of type NoneType for 2 sequences of ids; allowed: (2, key, 32); give wh"),
        (IDS, "a source of shape (2, 5) and type torch.int64 for 2 sequences of ids; allowed"),
        (torch.zeros(1, 7, 32), "a source of shape (1, 7, 32) and type torch.float32 for 2 seq"),
        (torch.zeros(2, 7, 31), "a source of shape (2, 7, 31) and type torch.float32 for 2 seq"),
    ],
)
def test_a_source_that_does_not_fit_is_refused(source: Tensor, words: str) -> None:
    with pytest.raises(ShapeError) as caught:
        model().hidden(IDS, source)
    assert str(caught.value).startswith(words)


def test_a_mask_for_another_source_is_refused() -> None:
    made = model()
    source = made.encode(IDS)
    with pytest.raises(ShapeError, match=r"a mask of shape \(2, 4\) for 2 sequences, 5 queries"):
        made.hidden(IDS, source, source_mask=torch.ones(2, 4, dtype=torch.bool))


def test_a_cache_serves_the_source_of_its_first_pass() -> None:
    made = model()
    with torch.no_grad():
        source = made.encode(IDS)
        want = made.hidden(IDS, source)
        cache = Cache.empty(made.architecture, batch=2, capacity=7, dtype=torch.float64)
        made.hidden(IDS[:, :2], source, cache=cache)
        counted = [
            m.key for m in made.decoder.modules() if isinstance(m, MultiHeadAttention) and m.cross
        ]
        calls: list[int] = []
        for key in counted:
            key.register_forward_hook(lambda *_: calls.append(1))
        got = made.hidden(IDS[:, 2:], source, cache=cache)
        assert not calls  # not projected again
        other = made.hidden(IDS, 2 * source)
        assert len(calls) == 2
    assert_close(got, want[:, 2:], model_bound(made, want))
    assert finite_max(other - want) > 1e6 * model_bound(made, want)
