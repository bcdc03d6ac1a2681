"""The tiny models that stand in for the ones that README, docs and examples name."""

from __future__ import annotations

from pathlib import Path

from tests.observation import tiny_models

# The one declared substitution: the name in the text -> the folder that takes its place.
DECODER = "HuggingFaceTB/SmolLM2-135M-Instruct"
OTHER_DECODER = "HuggingFaceTB/SmolLM2-135M"
ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
ENCODER_DECODER = "google-t5/t5-small"


def stand_ins(folder: Path) -> dict[str, str]:
    """Models of two or three small layers, saved with a tokenizer of single bytes."""
    long = {"max_position_embeddings": 8192}
    saved = {
        DECODER: tiny_models.save(folder / "decoder", **long),
        OTHER_DECODER: tiny_models.save(folder / "other", num_hidden_layers=2, **long),
        ENCODER: tiny_models.save(folder / "encoder", "bert", "masked", around=True),
        ENCODER_DECODER: tiny_models.save(folder / "pair", "t5", "seq2seq"),
    }
    return {name: str(path) for name, path in saved.items()}


def substitute(text: str, models: dict[str, str]) -> str:
    """The text with every model name replaced, longest name first."""
    for name in sorted(models, key=len, reverse=True):
        text = text.replace(name, models[name])
    return text
