"""Results of papers about attention, repeated."""

from __future__ import annotations

import pytest
import torch

from headwise.theorems import flash
from headwise.theorems.rank_collapse import draw_layer
from headwise.theorems.reproductions import circuits, collapse, memory
from headwise.theorems.saved_bytes import materialised

FOUND = (*collapse.THEOREMS, *circuits.THEOREMS, *memory.THEOREMS)
BY_NAME = {each.name: each for each in FOUND}
QUICK = [name for name in BY_NAME if name != "olsson-induction"]  # that one is in test_induction


def test_what_is_repeated():
    told = [each.reproduces.partition(":")[0] for each in FOUND]
    assert told == ["B4", "B5", "B6", "B9", "B10", "B18", "B13", "B14", "B15"]


@pytest.mark.parametrize("name", QUICK)
def test_it_holds(name):
    assert BY_NAME[name].check().verdict == "HOLDS"


def test_attention_without_collapse_is_noticed(monkeypatch):
    # Branches that write nothing leave tokens apart: the control then holds.
    def silent(*given, **around):
        layer = draw_layer(*given, **around)
        layer.output.mul_(1e-9)
        return layer

    monkeypatch.setattr(collapse, "draw_layer", silent)
    assert BY_NAME["noci-signal-propagation"].check().verdict == "CHECK-BROKEN"


def test_a_clip_that_changes_others_is_noticed(monkeypatch):
    clip = circuits._clip

    def wide(attention, largest, power=0.5):
        clip(attention, largest.clamp(min=101.0), power)

    monkeypatch.setattr(circuits, "_clip", wide)
    assert BY_NAME["kimi-qk-clip"].check().verdict == "FAILS"


def test_logits_without_row_means_are_needed(monkeypatch):
    centred = circuits._centred_log

    def shifted(n, seed):
        return centred(n, seed) + torch.arange(1.0, n + 1, dtype=torch.float64)[:, None]

    monkeypatch.setattr(circuits, "_centred_log", shifted)
    assert BY_NAME["bhojanapalli-bottleneck"].check().verdict == "FAILS"


def test_memory_that_is_kept_is_noticed(monkeypatch):
    monkeypatch.setattr(flash.streaming, "attend", materialised)
    assert BY_NAME["dao-memory"].check().verdict in ("FAILS", "CHECK-BROKEN")


def test_figures():
    # notes: n = 8, rank 7 3e-16, rank 6 .011; recurrent form 4.8e-7.
    bottleneck = BY_NAME["bhojanapalli-bottleneck"].check().evidence
    assert bottleneck.measured[1].value < 1e-13
    assert bottleneck.controls[0].measured[0].value > 1e-3
    assert BY_NAME["katharopoulos-recurrence"].check().evidence.measured[0].value < 1e-6
