"""Published models by name: their sizes, counted from the model that is built, and their text."""

from __future__ import annotations

import math

import pytest
import torch

from headwise.errors import ModelError
from headwise.models import (
    PRESETS,
    Architecture,
    Decoder,
    Encoder,
    EncoderDecoder,
    decoder_sizes,
    encoder_sizes,
    preset,
    skeleton,
    transformer_sizes,
)


def count(architecture: Architecture) -> int:
    """Parameters of the built model, shared ones once; no memory is taken."""
    return sum(p.numel() for p in skeleton(architecture).parameters())


# From the released checkpoints. GPT-2: 124M, 355M, 774M, 1.5B in the authors' repository. BERT
# base: BertForMaskedLM, that is BertModel's 109,482,240 without its pooler (590,592), and with the
# transform (592,128) and the bias (30,522) of the head.
PUBLISHED = {
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bert-base": 109_482_240 - 590_592 + 592_128 + 30_522,
    "smollm2-135m": 134_515_008,
    "llama-15m": 15_191_712,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name: str) -> None:
    assert count(preset(name)) == PUBLISHED[name]


def test_bert_base_is_what_the_checkpoint_holds() -> None:
    assert PUBLISHED["bert-base"] == 109_514_298
    model = preset("bert-base").model_copy(update={"pooler": True, "unembedding": None})
    assert count(model) == 109_482_240


@pytest.mark.parametrize(("name", "millions"), [("transformer-base", 65), ("transformer-big", 213)])
def test_the_original_transformer(name: str, millions: int) -> None:
    """Vaswani et al. 2017, table 3, to the two or three digits that the paper prints.

    The paper's shared vocabulary is "about 37000" (section 5.1); no single size gives both 65 and
    213 million, so 4 percent are left. The count itself is this closed form.
    """
    a = preset(name)
    d, f, v = a.d_model, a.stack.d_ff, a.vocab
    attention, norm, network = 4 * (d * d + d), 2 * d, 2 * d * f + d + f
    layers = 6 * (attention + network + 2 * norm) + 6 * (2 * attention + network + 3 * norm)
    assert count(a) == v * d + layers
    assert abs(count(a) / (millions * 1e6) - 1) < 0.04


def test_a_missing_bias_would_be_seen() -> None:
    small = preset("gpt2-small")
    stack = small.stack.model_copy(update={"output_bias": False})
    assert count(small.model_copy(update={"decoder": stack})) == PUBLISHED["gpt2-small"] - 12 * 768


@pytest.mark.parametrize("name", PRESETS)
def test_json_gives_it_back(name: str) -> None:
    made = preset(name)
    text = made.model_dump_json()
    assert Architecture.from_json(text) == made
    assert Architecture.from_json(text).model_dump_json() == text


@pytest.mark.parametrize("name", PRESETS)
def test_kinds(name: str) -> None:
    made = preset(name)
    kinds = {"decoder": Decoder, "encoder": Encoder, "encoder-decoder": EncoderDecoder}
    assert type(skeleton(made)) is kinds[made.kind]


def test_published_choices() -> None:
    small = preset("gpt2-small").stack
    assert (small.norm, small.placement, small.activation) == ("layer", "pre", "gelu_tanh")
    bert = preset("bert-base")
    assert (bert.stack.placement, bert.stack.activation) == ("post", "gelu")
    assert (bert.stack.norm_eps, bert.embedding.segments, bert.context) == (1e-12, 2, 512)
    base = preset("transformer-base")
    assert (base.stack.placement, base.stack.activation, base.stack.dropout) == (
        "post", "relu", 0.1,
    )  # fmt: skip
    assert base.embedding.scale == math.sqrt(512)
    smol = preset("smollm2-135m").stack
    assert (smol.heads, smol.kv_heads, smol.rotary.base) == (9, 3, 100000.0)  # type: ignore[union-attr]


def test_an_unknown_name() -> None:
    with pytest.raises(ModelError) as caught:
        preset("gpt-5")
    assert str(caught.value).startswith("no preset is called 'gpt-5'; allowed: transformer-base, ")
    assert str(caught.value).endswith("; or give sizes: decoder_sizes(vocab=…, d_model=…, …)")


SIZES = {"vocab": 11, "d_model": 12, "layers": 1, "heads": 3, "d_ff": 7, "context": 13}


@pytest.mark.parametrize("sizes", [decoder_sizes, encoder_sizes, transformer_sizes])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"heads": 5},
            "5 heads do not divide the width 12; allowed: a number of heads that divides d_model; "
            "change one of the two, or give d_head",
        ),
        ({"heads": 0}, "0 heads do not divide the width 12; allowed: a number of heads"),
        ({"kv_heads": 2}, "3 query heads cannot share 2 key-value heads; allowed: a number of key"),
        ({"kv_heads": 0}, "kv_heads is 0: Input should be greater than or equal to 1; change"),
        ({"layers": 0}, "layers is 0: Input should be greater than or equal to 1; change the si"),
        ({"vocab": 0}, "vocab is 0: "),
        ({"colour": "red"}, "colour is 'red': Extra inputs are not permitted; change the sizes"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, change, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ModelError) as caught:
        sizes(**{**SIZES, **change})
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)


def test_a_head_of_odd_width_cannot_turn() -> None:
    with pytest.raises(ModelError, match="a rotary width of 3, which cannot be cut into pairs"):
        decoder_sizes(**{**SIZES, "heads": 4})
    wide = decoder_sizes(**{**SIZES, "heads": 4}, d_head=6)
    assert wide.stack.d_head == 6
    assert skeleton(wide)(torch.zeros(1, 5, dtype=torch.long, device="meta")).shape == (1, 5, 11)
