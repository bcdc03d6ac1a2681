"""The table: a row per layer and head."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headwise.results.frame import to_dataframe
from headwise.results.label import to_dataset
from headwise.results.records import VALUES
from tests.results.synthetic import make_record


def test_one_row_per_head(record, dataset):
    frame = to_dataframe(dataset)
    assert len(frame) == sum(layer.heads for layer in record.layers)
    assert set(VALUES) <= set(frame.columns)
    np.testing.assert_array_equal(frame["entropy"], dataset["entropy"].to_numpy().ravel())
    assert frame["module"].tolist() == [
        layer.module for layer in record.layers for _ in range(layer.heads)
    ]


def test_heads_that_do_not_exist_have_no_row():
    few, many = make_record(layers=1, heads=2), make_record(layers=1, heads=5)
    frame = to_dataframe(to_dataset(replace(few, layers=(few.layers[0], many.layers[0]))))
    assert frame[["layer", "head"]].to_numpy().tolist() == [
        [0, 0],
        [0, 1],
        *([1, head] for head in range(5)),
    ]


def test_the_order_of_dimensions_is_irrelevant():
    dataset = to_dataset(make_record())
    turned = dataset.transpose(*reversed(list(dataset.sizes)))
    assert to_dataframe(turned).equals(to_dataframe(dataset))
