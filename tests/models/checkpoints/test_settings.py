"""Whatever stands under a key of a configuration, it is understood or refused in one line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from headwise.errors import HeadwiseError, ModelError
from headwise.models.checkpoints.files import TensorFiles
from headwise.models.checkpoints.loading import FAMILIES
from headwise.models.checkpoints.settings import Settings
from tests.parity.loaded_checks import saved
from tests.parity.loaded_encoders import ENCODER_CASES
from tests.parity.loaded_models import CASES

ODD: list[Any] = [
    None, -1, 0, 1, 2.5, 1e400, math.nan, "", "x", [], [1], ["full_attention"], {}, {"a": 1}, True,
    False, {"rope_type": ["x"]}, {"rope_type": "yarn", "factor": -1.0}, {"type": 3},
    {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [-1.0]},
    {"rope_type": "default", "rope_theta": -5.0},
]  # fmt: skip
NAMES = ("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "gemma2", "bert", "marian", "t5")


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_our_own_errors(name: str, tmp_path: Path) -> None:
    case = next(case for case in (*CASES, *ENCODER_CASES) if case.name == name)
    folder = saved(case.make(), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    names = set(TensorFiles.open(folder))
    family = next(each for each in FAMILIES if config["model_type"] in each.model_types)
    keys = sorted({*config, "rope_scaling", "something_new", "head_dim", "layer_types"})
    refusals = []
    for key in keys:
        if key == "model_type":
            continue
        for value in ODD:
            settings = Settings({**config, key: value})
            try:
                family.copies(settings, names)
                family.architecture(settings, names)
                settings.finish()
            except HeadwiseError as error:
                refusals.append(str(error))
    assert len(refusals) > 5 * len(keys)
    assert [message for message in refusals if "\n" in message] == []


def test_a_missing_key_takes_the_default_or_is_named() -> None:
    assert Settings({}).number("a", 3.0) == 3.0
    assert Settings({"a": None}).number("a", 3.0) == 3.0
    assert Settings({}).number_or_none("a", 3.0) == 3.0
    assert Settings({"a": None}).number_or_none("a", 3.0) is None
    with pytest.raises(ModelError, match=r"^config\.json lacks a; fetch the file again$"):
        Settings({}).whole("a")


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "", [], {}])
def test_a_key_that_holds_nothing_says_nothing(value: Any) -> None:
    Settings({"unheard_of": value}).finish()


def test_a_key_that_nobody_read_is_refused() -> None:
    settings = Settings({"use_cache": True, "read": 1, "unheard_of": 1e-9})
    settings.get("read")
    with pytest.raises(ModelError, match="has unheard_of = 1e-09, which is not known here"):
        settings.finish()
    settings.silent("unheard_of")
    settings.finish()
