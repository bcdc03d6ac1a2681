from __future__ import annotations

import pytest

from tests.examples.models import stand_ins


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return stand_ins(tmp_path_factory.mktemp("stand-ins"))


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """A name that was not substituted fails at once instead of being fetched."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
