"""The table of complexity, counted."""

from __future__ import annotations

import pytest

from headwise.attention.streaming import attend
from headwise.theorems import complexity
from headwise.theorems.complexity import THEOREMS
from headwise.theorems.saved_bytes import attention_bytes, materialised

BY_NAME = {each.name: each for each in THEOREMS}


@pytest.mark.parametrize("name", BY_NAME)
def test_it_holds(name):
    assert BY_NAME[name].check().verdict == "HOLDS"


def test_a_wider_mlp_is_noticed(monkeypatch):
    sizes = complexity.encoder_sizes
    monkeypatch.setattr(complexity, "encoder_sizes", lambda d_ff, **x: sizes(d_ff=d_ff + 1, **x))
    assert BY_NAME["complexity-table"].check().verdict == "FAILS"
    assert BY_NAME["crossover-lengths"].check().verdict == "FAILS"


def test_a_planner_with_other_sizes_is_noticed(monkeypatch):
    explicit = complexity.explicit
    monkeypatch.setattr(
        complexity, "explicit", lambda d_model, **x: explicit(
            d_model=d_model, **{"d_ff": 3 * d_model, **x}
        ),
    )  # fmt: skip
    assert BY_NAME["complexity-table"].check().verdict == "FAILS"
    assert BY_NAME["crossover-lengths"].check().verdict == "FAILS"


def test_a_form_that_keeps_no_matrix_is_noticed(monkeypatch):
    monkeypatch.setattr(complexity, "materialised", attend)
    assert BY_NAME["score-memory"].check().verdict == "FAILS"


def test_shared_storages_count_once():
    # A, q, k and v: v is saved as it is, q and k are views of themselves.
    assert attention_bytes(materialised, 3, 17, 5) == 4 * 3 * (17 * 17 + 3 * 17 * 5)


def test_figures():
    found = {
        each.name: each.value for each in BY_NAME["crossover-lengths"].check().evidence.measured
    }
    assert found["n / d at 128,000 and d = 4096"] == 31.25
    assert found["n / (4d) there"] == 7.8125
