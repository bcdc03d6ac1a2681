"""Records become labelled data: every number in its place, nothing invented."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headwise.errors import InputError, MeasurementError
from headwise.results.bins import coarser_map, coarser_means, coarser_rows
from headwise.results.label import to_dataset
from headwise.results.records import PROFILED, QUANTILES, VALUES, ScanRecord
from headwise.results.schema import VARIABLES
from headwise.results.validate import about
from tests.results.synthetic import make_record


def test_every_value_is_where_it_belongs(record, dataset):
    for i, layer in enumerate(record.layers):
        for name in (set(VALUES) - {"max_logit_query", "max_logit_key"}) & set(layer.values):
            got = dataset[name].sel(layer=i).isel(head=slice(layer.heads))
            np.testing.assert_array_equal(got, layer.values[name])
        for name in PROFILED:
            got = dataset[f"{name}_quantile"].sel(layer=i)
            np.testing.assert_array_equal(got, layer.quantiles[name])
        assert dataset["module"].sel(layer=i) == layer.module
        assert dataset["rows"].sel(layer=i) == layer.rows
    assert dataset["quantile"].to_numpy().tolist() == list(QUANTILES)


def test_every_variable_says_what_it_is(dataset):
    for name, array in dataset.data_vars.items():
        entry = VARIABLES[name]
        assert array.attrs["units"] == entry.units
        assert array.attrs["long_name"] == entry.long_name
        assert array.attrs["definition"] == entry.definition
        assert array.attrs["exactness"]


def test_exactness_says_what_sampling_did():
    whole = to_dataset(make_record())
    assert {v.attrs["exactness"] for v in whole.data_vars.values()} == {"exact"}
    some = to_dataset(make_record(sampled=11))
    assert some["entropy"].attrs["exactness"] == (
        "unbiased estimate from 55 of 185 rows, each exact"
    )
    assert some["max_logit"].attrs["exactness"] == (
        "extreme over 55 of 185 rows, each exact: a bound on the extreme over all"
    )
    assert some["rows"].attrs["exactness"] == "exact"


def test_about_survives(record, dataset):
    assert about(dataset) == record.about


def test_token_streams_share_the_key_axis():
    record = make_record(kind="encoder-decoder", layers=2, tokens=37, source_tokens=23)
    dataset = to_dataset(record)
    assert dataset["stream"].to_numpy().tolist() == ["source"] * 23 + ["target"] * 37
    for i, layer in enumerate(record.layers):
        received = dataset["received"].sel(layer=i)
        own = dataset["stream"] == layer.key_stream
        np.testing.assert_array_equal(
            received.isel(key=own), layer.received.to(torch.float32).numpy()
        )
        assert received.isel(key=~own).isnull().all()
        assert (dataset["received_visible"].sel(layer=i).isel(key=~own) == 0).all()
        key = dataset["max_logit_key"].sel(layer=i).astype(int)
        assert (dataset["stream"][key] == layer.key_stream).all()
        query = dataset["max_logit_query"].sel(layer=i).astype(int)
        assert (dataset["stream"][query] == layer.query_stream).all()
    assert dataset["band_mass"].isel(layer=-1).isnull().all()  # cross-attention has no distance


def test_layers_of_different_head_counts_are_filled_with_nan():
    few, many = make_record(layers=1, heads=2), make_record(layers=1, heads=5)
    record = replace(few, layers=(few.layers[0], many.layers[0]))
    dataset = to_dataset(record)
    assert dataset.sizes["head"] == 5
    assert dataset["entropy"].isel(layer=0).isnull().to_numpy().tolist() == [0, 0, 1, 1, 1]
    assert not dataset["entropy"].isel(layer=1).isnull().any()


def test_bins_of_different_width_become_one_width_exactly():
    fine, coarse = make_record(bin_width=2), make_record(bin_width=8)
    mixed = to_dataset(replace(fine, layers=(fine.layers[0], coarse.layers[1])))
    right = to_dataset(coarse)
    for name in ["profile_rows", "pooled", "pool_rows", *(f"{k}_profile" for k in PROFILED)]:
        np.testing.assert_allclose(
            mixed[name].isel(layer=0), right[name].isel(layer=0), rtol=1e-6, err_msg=name
        )
    assert mixed["position_bin"].to_numpy().tolist() == [0, 8, 16, 24, 32]
    # Widths that do not divide each other meet at their least common multiple.
    odd = make_record(bin_width=3)
    both = to_dataset(replace(fine, layers=(fine.layers[0], odd.layers[0])))
    assert both["position_bin"].to_numpy().tolist() == [0, 6, 12, 18, 24, 30, 36]
    np.testing.assert_allclose(
        both["entropy_fraction_profile"][0], both["entropy_fraction_profile"][1], rtol=1e-12
    )


def test_joining_bins_weighs_by_rows():
    rows = torch.tensor([3, 1, 2])
    means = np.array([[1.0, 5.0, 7.0], [np.nan, 2.0, np.nan]])
    np.testing.assert_array_equal(coarser_rows(rows, 2), [4, 2])
    np.testing.assert_array_equal(coarser_means(means, rows, 2), [[2.0, 7.0], [2.0, np.nan]])
    pooled = np.array([[[1.0, 0.0, 0.0], [0.2, 0.8, 0.0], [0.1, 0.2, 0.7]]])
    np.testing.assert_allclose(coarser_map(pooled, rows, 2), [[[1.0, 0.0], [0.3, 0.7]]])


def test_pooled_rows_sum_to_one(dataset):
    total = dataset["pooled"].sum("key_block", skipna=False)
    there = (dataset["pool_rows"] > 0) & (dataset["non_finite"] == "")
    learned = dataset["null_mass"].fillna(0) > 0
    np.testing.assert_allclose(
        total.where(there & ~learned).stack(a=total.dims).dropna("a"), 1, 1e-6
    )


def test_tokens_that_files_cannot_hold_are_made_storable():
    record = make_record(tokens=5)
    stream = replace(record.tokens[0], texts=("a\0b", "\ud800", "é", "<b>", ""))
    dataset = to_dataset(replace(record, tokens=(stream,)))
    assert dataset["token"].to_numpy().tolist() == ["a␀b", "?", "é", "<b>", ""]


def test_half_precision_and_gradients_are_no_obstacle():
    record = make_record(layers=1)
    layer = record.layers[0]
    received = layer.received.to(torch.bfloat16).requires_grad_()
    dataset = to_dataset(replace(record, layers=(replace(layer, received=received),)))
    np.testing.assert_allclose(dataset["received"][0], layer.received, rtol=0.01)


def test_what_cannot_be_labelled_is_refused():
    record = make_record(layers=1)
    layer = record.layers[0]
    with pytest.raises(MeasurementError, match="the scan holds no attention layer"):
        to_dataset(ScanRecord(layers=()))

    def with_layer(**changes):
        return replace(record, layers=(replace(layer, **changes),))

    with pytest.raises(MeasurementError, match="reads the token stream 'image', which the scan"):
        to_dataset(with_layer(key_stream="image"))
    with pytest.raises(MeasurementError, match="has 36 positions, but its token stream has 37"):
        to_dataset(with_layer(received=layer.received[:, :-1]))
    with pytest.raises(MeasurementError, match=r"entropy of layer .* but the layer has 3 heads"):
        to_dataset(with_layer(values={**layer.values, "entropy": torch.ones(2)}))
    with pytest.raises(MeasurementError, match="'surprise', which is not in the schema"):
        to_dataset(with_layer(values={**layer.values, "surprise": torch.ones(3)}))
    with pytest.raises(TypeError, match="not JSON serializable"):
        to_dataset(replace(record, about={"model": object()}))


def test_input_errors_are_value_errors():
    assert issubclass(InputError, ValueError)
