from __future__ import annotations

import pytest

from headwise.results.label import to_dataset
from tests.results.synthetic import make_record

# Every shape a scan can have: name -> arguments of make_record.
SHAPES = {
    "decoder": {},
    "grouped": {"heads": 6, "kv_heads": 2},
    "one head, one layer": {"layers": 1, "heads": 1},
    "two tokens": {"tokens": 2},
    "encoder": {"kind": "encoder"},
    "encoder-decoder": {"kind": "encoder-decoder"},
    "documents": {"documents": 3, "tokens": 53},
    "NaN layer": {"nan_layer": 1},
    "sampled": {"sampled": 11, "keep_rows": True},
    "no texts": {"texts": False},
    "no blocks": {"blocks": False},
    "everything": {"gradients": True, "keep_rows": True, "script": True, "null_sink": True},
}


@pytest.fixture(params=list(SHAPES))
def shape(request):
    return SHAPES[request.param]


@pytest.fixture
def record(shape):
    return make_record(**shape)


@pytest.fixture
def dataset(record):
    return to_dataset(record)
