"""Every measured head has one role, by the thresholds of the findings."""

from __future__ import annotations

import pytest

from headwise.report.findings import findings
from headwise.report.roles import in_words, roles
from headwise.results.label import to_dataset
from tests.results.synthetic import make_record


def calm(layers=3, heads=5, **options):
    dataset = to_dataset(make_record(layers, heads, 149, unhealthy=False, **options))
    for name in ("previous_mass", "sink_mass"):
        dataset[name][:] = 0.1
    dataset["entropy_fraction"][:] = 0.5
    dataset["band_mass"][:] = 1.0 / dataset.sizes["band"]
    return dataset


def told(dataset):
    return {role.key: role.places for role in roles(dataset)}


@pytest.mark.parametrize(
    ("key", "variable", "beyond", "at"),
    [
        ("previous", "previous_mass", 0.41, 0.4),
        ("uniform", "entropy_fraction", 0.951, 0.95),
        ("sink", "sink_mass", 0.31, 0.3),
    ],
)
def test_one_head_has_the_role_past_its_threshold_only(key, variable, beyond, at):
    dataset = calm()
    dataset[variable][1, 3] = at
    assert key not in told(dataset)
    dataset[variable][1, 3] = beyond
    assert told(dataset)[key] == ((1, 3),)
    assert (1, 3) not in told(dataset)["other"]
    assert any(finding.places == ((1, 3),) for finding in findings(dataset))


def test_the_most_particular_role_wins():
    dataset = calm()
    dataset["previous_mass"][2, 1] = 0.5
    dataset["sink_mass"][2, 1] = 0.5
    assert told(dataset)["previous"] == ((2, 1),)
    assert "sink" not in told(dataset)


@pytest.mark.parametrize("kind", ["decoder", "encoder", "encoder-decoder"])
def test_every_measured_head_is_counted_once(kind):
    dataset = to_dataset(make_record(3, 5, 149, kind=kind, nan_layer=1))
    places = [place for role in roles(dataset) for place in role.places]
    assert len(places) == len(set(places)) == (dataset.sizes["layer"] - 1) * 5


def test_a_learned_sink_is_not_called_the_first_token():
    dataset = calm(null_sink=True)
    dataset["sink_mass"][:] = 0.1
    dataset["null_mass"][:] = 0.0
    dataset["null_mass"][0, 0] = 0.3
    assert "1 rests on a sink" in in_words(roles(dataset))


def test_silent_where_nothing_was_measured():
    dataset = to_dataset(make_record(1, 2, 11, nan_layer=0))
    assert roles(dataset) == []
