"""The real models of the tests, each read once."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from headwise.observation.run import opened
from headwise.theorems.trained import Trained

PLACES = {"smollm2": "smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "minilm": "minilm"}


@cache
def loaded_model(name: str) -> Trained:
    folder = os.environ.get("HEADWISE_MODELS")
    if folder is None:
        pytest.skip("HEADWISE_MODELS does not name the folder with the real models")
    return Trained(opened(Path(folder) / PLACES[name], None, None, False))
