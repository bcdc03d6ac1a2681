"""What the page decodes is what was measured, to the digits promised."""

from __future__ import annotations

import base64
import json
import zlib

import numpy as np

from headwise.report.embed import json_for_html, pack_coarse, pack_exact, pack_half, pack_text


def raw(packed):
    return zlib.decompress(base64.b64decode(packed.base64))


def decoded(packed):
    """The Python twin of templates/js/decode.js."""
    meta, data = packed.meta, np.frombuffer(raw(packed), dtype=np.uint8)
    if meta["dtype"] == "f4":
        return data.view("<f4").reshape(meta["shape"])
    if meta["dtype"] == "f2":
        halves = np.ascontiguousarray(data.reshape(2, -1).T).view("<f2").astype(np.float64)
        return (halves * 2.0 ** -meta["exponent"]).reshape(meta["shape"])
    ratio = meta["high"] / meta["low"]
    values = meta["low"] * ratio ** ((data.astype(np.float64) - 1) / 253)
    return np.where(data == 0, 0, np.where(data == 255, np.nan, values)).reshape(meta["shape"])


def test_exact():
    values = np.array([[1.5, np.nan, -np.inf], [1e30, 0.1, 3.0]])
    np.testing.assert_array_equal(decoded(pack_exact(values)), values.astype(np.float32))


def test_half_keeps_three_digits_over_eight_orders():
    for largest in (1.0, 3.7e5, 0.02):
        values = largest * np.logspace(0, -8, 101).reshape(1, 101)
        got = decoded(pack_half(values))
        assert np.max(np.abs(got / values - 1)) <= 2.0**-11
    assert np.isnan(decoded(pack_half(np.array([np.nan, np.inf, 1.0])))[:2]).all()
    np.testing.assert_array_equal(decoded(pack_half(np.zeros(3))), np.zeros(3))
    # A largest value just below a power of two must not overflow float16.
    assert np.isfinite(decoded(pack_half(np.array([1 - 2.0**-20])))).all()


def test_coarse_is_within_four_percent():
    values = np.logspace(-7, 0, 211)
    assert np.max(np.abs(decoded(pack_coarse(values)) / values - 1)) < 0.04
    got = decoded(pack_coarse(np.array([0.0, np.nan, 1.0, 1e-12])))
    assert got[0] == 0
    assert np.isnan(got[1])
    assert got[2] == 1
    assert got[3] > 0
    np.testing.assert_array_equal(decoded(pack_coarse(np.zeros(3))), np.zeros(3))
    assert np.isnan(decoded(pack_coarse(np.full(3, np.nan)))).all()


def test_text():
    tokens = ["</script>", "é", "\u2028", "海"]
    assert json.loads(raw(pack_text(tokens))) == tokens


def test_json_for_html_cannot_end_the_element():
    text = json_for_html(["</script><!--", "&amp;"])
    assert not set("<>&") & set(text)
    assert json.loads(text) == ["</script><!--", "&amp;"]
