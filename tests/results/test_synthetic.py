"""The synthetic records that other tests stand on obey what a real record obeys."""

from __future__ import annotations

import torch

from headwise.results.records import PROFILED, VALUES
from tests.results.synthetic import make_record


def test_records_are_deterministic():
    a, b = make_record(), make_record()
    for x, y in zip(a.layers, b.layers, strict=True):
        for name in VALUES:
            assert torch.equal(x.values[name].nan_to_num(), y.values[name].nan_to_num())


def test_identities(record):
    for layer in record.layers:
        assert set(layer.values) == set(VALUES)
        assert set(layer.quantiles) == set(layer.profiles) == set(PROFILED)
        if layer.non_finite:
            assert layer.values["entropy"].isnan().all()
            continue
        v = layer.values
        assert (v["entropy"] >= 0).all()
        assert (v["entropy_without_sink"].nan_to_num() >= 0).all()
        assert (v["effective_keys"] >= 1 - 1e-12).all()
        assert (v["dead_rows_not_sink"].nan_to_num() <= v["dead_rows"].nan_to_num()).all()
        lost = v["null_mass"].nan_to_num()
        torch.testing.assert_close(layer.received.sum(1) / layer.rows_total, 1 - lost)
        if layer.role != "cross":
            torch.testing.assert_close(layer.bands.sum(1), 1 - lost)
            torch.testing.assert_close(layer.bands[:, 0], v["self_mass"])
        rows = layer.profile_rows.double()
        mean = (layer.profiles["entropy"].nan_to_num() * rows).sum(1) / rows.sum()
        torch.testing.assert_close(mean, v["entropy"])


def test_heads_have_their_character():
    values = make_record(layers=1, heads=5, tokens=101, unhealthy=False).layers[0].values
    for name, character in (("sink_mass", 0), ("previous_mass", 1), ("entropy_fraction", 3)):
        assert int(values[name].argmax()) == character
    assert float(make_record().layers[-1].values["max_logit"].max()) > 100
