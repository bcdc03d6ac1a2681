"""Tensors, states and options that linear attention refuses, in one line that says why."""

from __future__ import annotations

import pytest
import torch

from headwise.attention.feature_maps import elu_plus_one
from headwise.attention.linear import (
    LinearState,
    linear_attention,
    linear_attention_chunked,
    linear_attention_recurrent,
)
from headwise.attention.linear_definition import kernel_attention
from headwise.errors import OptionError, ShapeError
from tests.attention.test_linear import CAUSAL, DOUBLE, Form, case, causal_forms


@pytest.mark.parametrize("form", [linear_attention, *CAUSAL, kernel_attention])
@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((6, 3, 5), (6, 3, 5), (6, 3, 7)), "four axes"),
        (((1, 6, 3, 5), (2, 3, 3, 5), (2, 3, 3, 7)), "one batch"),
        (((1, 6, 3, 5), (1, 3, 3, 4), (1, 3, 3, 7)), "one width"),
        (((1, 6, 3, 5), (1, 3, 3, 5), (1, 3, 2, 7)), "one number of heads, keys"),
        (((1, 5, 3, 5), (1, 3, 3, 5), (1, 3, 3, 7)), "5 query heads cannot share 3"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(form: Form, shapes: tuple, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        form(*(torch.zeros(s) for s in shapes), elu_plus_one)


@causal_forms
def test_causal_forms_need_as_many_queries_as_keys(form: Form) -> None:
    with pytest.raises(ShapeError, match=r"3 queries and 7 keys.*pass earlier keys as a state"):
        form(*case(3, 7).inputs)


def test_dtypes_and_feature_maps_that_do_not_fit_are_refused() -> None:
    x = case(3, 3)
    with pytest.raises(ShapeError, match="one floating-point dtype"):
        linear_attention(x.q.float(), x.k, x.v, x.phi)
    with pytest.raises(ShapeError, match="only the last axis changes"):
        linear_attention(x.q, x.k, x.v, lambda t: t.sum(-1))
    with pytest.raises(OptionError, match="chunk is 0"):
        linear_attention_chunked(*x.inputs, chunk=0)


def test_states_that_do_not_fit_are_refused() -> None:
    x = case(3, 3)
    for batch, kv_heads, features, d_value in (
        (1, 3, 5, 7),
        (2, 6, 5, 7),
        (2, 3, 4, 7),
        (2, 3, 5, 1),
    ):
        state = LinearState.empty(batch, kv_heads, features, d_value, DOUBLE)
        for form in (linear_attention_recurrent, linear_attention_chunked):
            with pytest.raises(ShapeError, match="for a state of"):
                form(*x.inputs, state=state)
        with pytest.raises(ShapeError, match="one shape and one dtype"):
            state.merge(LinearState.empty(2, 3, 5, 7, DOUBLE))
    with pytest.raises(ShapeError, match="one shape and one dtype"):
        LinearState.empty(2, 3, 5, 7).merge(LinearState.empty(2, 3, 5, 7, DOUBLE))
    with pytest.raises(ShapeError, match="batch kv_head feature d_value"):
        LinearState(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 4), 0)
