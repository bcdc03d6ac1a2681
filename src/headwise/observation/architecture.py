"""Which class loads a checkpoint, what kind of model it is, and whether it can be measured.

Everything is decided from the configuration, before a weight is read.
"""

from __future__ import annotations

from typing import Any, Final

from headwise.errors import ModelError
from headwise.observation.driver import Kind

__all__ = ["check_routed", "model_class", "model_kind", "position_limit"]

# Heads that turn states into logits over the vocabulary; a class without one is loaded as its body.
_HEADS: Final = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "MTModel")
_OWN_LOOP: Final = "measure your own loop with headwise.observe(model)"


def model_class(config: Any) -> type[Any]:
    """The transformers class for a configuration: with its language-model head where it has one.

    ``architectures`` decides; a checkpoint of another task (a classifier) is loaded as its body,
    whose attention is the same.
    """
    import transformers
    from transformers.models.auto import modeling_auto as auto

    for name in config.architectures or ():
        found: Any = getattr(transformers, name, None)
        if found is None:
            continue
        if name.endswith(_HEADS) or (config.is_encoder_decoder and name.endswith("EncoderModel")):
            return _text_only(found)
        break
    tables = [auto.MODEL_MAPPING]
    if not config.architectures:
        tables = [auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, auto.MODEL_MAPPING]
        if not config.is_encoder_decoder:
            encoder = config.model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
            tables = [] if encoder else [auto.MODEL_FOR_CAUSAL_LM_MAPPING]
            tables.append(auto.MODEL_MAPPING)
    for table in tables:
        if type(config) in table:
            if table is auto.MODEL_MAPPING and hasattr(config, "vision_config"):
                raise ModelError(
                    f"{config.model_type} reads pictures together with text",
                    allowed="models that read input_ids alone",
                    to_do=_OWN_LOOP,
                )
            found = table[type(config)]
            return _text_only(found[0] if isinstance(found, tuple | list) else found)
    raise ModelError(
        f"transformers has no text model for the architecture {config.model_type!r}"
        f" (architectures: {', '.join(config.architectures or ('none',))})"
    )


def _text_only(found: type[Any]) -> type[Any]:
    reads = getattr(found, "main_input_name", "input_ids")
    if reads != "input_ids":
        raise ModelError(
            f"{found.__name__} reads {reads}, not text",
            allowed="models that read input_ids",
            to_do=_OWN_LOOP,
        )
    return found


def check_routed(found: type[Any], architecture: str) -> None:
    """Refuse a class whose attention Headwise cannot see.

    Such a model would either ignore the measurement or compute wrong outputs.
    """
    if not found._can_set_attn_implementation():
        raise ModelError(
            f"{architecture} ({found.__name__}) cannot be measured: its attention does not go"
            " through transformers' attention interface",
            to_do="use a model whose attention does, such as gpt2, gpt_neox, llama, qwen3, gemma3,"
            " bert, t5 or bart",
        )


def model_kind(model: Any) -> Kind:
    """Decoder, encoder or encoder-decoder, from the configuration and the modules that exist."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED

    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder" if _has_decoder(model) else "encoder"
    text = config.get_text_config()
    bidirectional = getattr(text, "use_bidirectional_attention", False) is True
    if bidirectional or (text.model_type in MASKED and not getattr(text, "is_decoder", False)):
        return "encoder"
    return "decoder"


def _has_decoder(model: Any) -> bool:
    return any(
        name.rpartition(".")[2] == "decoder" and any(True for _ in module.parameters())
        for name, module in model.named_modules()
    )


def position_limit(model: Any) -> int | None:
    """The number of tokens for which the model has learned positions; None when it has no table.

    RoBERTa-like tables begin after the padding index, OPT-like tables have two extra rows.
    """
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if leaf not in {"wpe", "position_embeddings", "embed_positions", "position_embedding"}:
            continue
        weight = getattr(module, "weight", None)
        if weight is None or weight.dim() != 2:
            continue
        rows = int(weight.shape[0]) - int(getattr(module, "offset", 0))
        padding = getattr(module, "padding_idx", None)
        return rows if padding is None else rows - int(padding) - 1
    return None
