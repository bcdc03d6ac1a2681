"""What models of one family may still differ in: scalings, biases, norms, placements, adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, T5EncoderModel

from headwise.circuits.head_weights import HeadWeights, head_weights
from headwise.errors import ModelError
from headwise.models import Architecture, build, decoder_sizes
from headwise.models.architecture import Stack
from headwise.models.low_rank import add_low_rank, merge
from headwise.models.presets import transformer_sizes
from tests.circuits.known_heads import dense_logits, shaken, shown, tiny

F64 = torch.float64
SIZES: dict[str, Any] = {
    "vocab": 131, "d_model": 24, "layers": 2, "heads": 4, "d_ff": 31, "context": 127
}  # fmt: skip
SCALINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {"factor": 4.0}),
    "dynamic": ("llama", {"factor": 4.0}),
    "yarn": ("llama", {"factor": 4.0, "original_max_position_embeddings": 64}),
    "llama3": (
        "llama",
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "longrope": (
        "phi3",
        {
            "short_factor": [1.1] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 64,
        },
    ),
}


def logits_agree(model: Any, found: HeadWeights, relative: float) -> None:
    seen = shown(model)
    for w in found.layers:
        call = seen.calls[w.module]
        want = call.call.scale * call.call.q[0].double() @ w.shared(call.call.k[0].double()).mT
        got = dense_logits(w, call.stream[0], call.source[0])
        assert float((got - want).abs().max()) <= relative * (1 + float(want.abs().max()))


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_scaled_rotations(kind):
    """The attention factor of YaRN and LongRoPE is part of every logit, squared."""
    family, settings = SCALINGS[kind]
    more = {"original_max_position_embeddings": 64} if kind == "longrope" else {}
    scaling = {"rope_type": kind, "rope_theta": 10000.0, **settings}
    model = tiny(family, rope_parameters=scaling, **more)
    found = head_weights(model)
    assert (found.layers[0].rotary.factor > 1) == (kind in ("yarn", "longrope"))
    logits_agree(model, found, 2.0**-24 * 64)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"attention_bias": True}),
        ("granite", {"attention_multiplier": 0.3, "residual_multiplier": 0.25}),
        ("gpt2", {"scale_attn_weights": False}),
        ("gptj", {"rotary_dim": 16}),
        ("gpt_neox", {"use_parallel_residual": False}),
    ],
)
def test_settings_of_families(family, settings):
    model = tiny(family, **settings)
    found = head_weights(model)
    logits_agree(model, found, 2.0**-24 * 64)
    w = found.layers[0]
    assert (w.query_bias is None) == (family in ("granite", "gptj"))
    assert w.write_scale == settings.get("residual_multiplier", 1.0)


@pytest.mark.parametrize(
    ("family", "setting", "said"),
    [("phi", "qk_layernorm", "add a bias"), ("cohere", "use_qk_norm", "norms of their own:")],
)
def test_optional_norms_of_queries(family, setting, said):
    assert head_weights(tiny(family)).layers[0].fixed
    w = head_weights(tiny(family, **{setting: True})).layers[0]
    assert not w.fixed
    assert said in w.why_not
    assert w.query_norm.kind == "layer"


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_cross_attention_of_decoders_is_refused(family):
    more = {"is_decoder": True} if family == "bert" else {}
    with pytest.raises(ModelError, match=f"cross-attention of {family} is not known"):
        head_weights(tiny(family, add_cross_attention=True, **more))


@pytest.mark.parametrize("family", ["t5", "bart", "marian"])
def test_encoder_decoders_with_a_head(family):
    found = head_weights(tiny(family, AutoModelForSeq2SeqLM))
    assert [w.role for w in found.layers].count("cross") == 2
    assert found.unembedding.shape == (64, 127)
    assert found.final_norm is not None


def test_parts_of_models():
    clip = tiny("clip")
    assert {w.role for w in head_weights(clip.text_model).layers} == {"decoder"}
    assert {w.role for w in head_weights(clip.vision_model).layers} == {"encoder"}
    encoder = T5EncoderModel(tiny("t5").config).eval()
    assert {w.role for w in head_weights(encoder).layers} == {"encoder"}


@pytest.mark.parametrize("placement", ["pre", "sandwich", "branch", "post"])
@pytest.mark.parametrize("final", [True, False])
def test_placements_of_own_encoder_decoders(placement, final):
    a = transformer_sizes(**SIZES)

    def placed(stack: Stack) -> Stack:
        return stack.model_copy(update={"placement": placement, "final_norm": final})

    a = a.model_copy(update={"encoder": placed(a.encoder), "decoder": placed(a.decoder)})
    model = shaken(build(Architecture.checked(**dict(a)), dtype=F64).eval())
    found = head_weights(model)
    logits_agree(model, found, 1e-12)
    cross = next(w for w in found.layers if w.role == "cross")
    assert (cross.source_norm is not None) == (final or placement == "post")
    assert (cross.norm is None) == (placement == "branch")
    assert (cross.output_norm is not None) == (placement in ("sandwich", "branch"))
    assert (found.final_norm is not None) == (final or placement == "post")


@pytest.mark.parametrize("family", ["own", "gpt2"])
def test_adapters_are_part_of_the_weights(family):
    """An adapter of this library counts, merged or not, in both orders of storage."""
    own = family == "own"
    sizes = decoder_sizes(**SIZES, kv_heads=2)
    model = shaken(build(sizes, dtype=F64).eval()) if own else tiny(family)
    before = head_weights(model).layers[0].query.clone()
    add_low_rank(model, rank=2, alpha=4.0, targets=["query"] if own else ["c_attn"])
    shaken(model)
    apart = head_weights(model).layers[0].query
    assert float((apart - before).abs().max()) > 1e-3
    merge(model)
    torch.testing.assert_close(head_weights(model).layers[0].query, apart, rtol=0, atol=1e-12)
