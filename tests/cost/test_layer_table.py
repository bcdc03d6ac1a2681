"""The textbook's table of one block: 3nd², n²d, n²d, nd², 8nd² and 3nd, hn², nd, nd, 4nd."""

from __future__ import annotations

import pytest

from headwise.cost.counting import count
from headwise.cost.explicit import explicit
from headwise.cost.layer_table import layer_table
from headwise.cost.parts import Component
from headwise.cost.workload import Workload


@pytest.mark.parametrize(("n", "d", "h"), [(2048, 4096, 32), (128_000, 4096, 32), (7, 30, 5)])
def test_the_textbook(n, d, h):
    rows = layer_table(explicit(d_model=d, layers=1, heads=h, vocab=11).stacks[0], n)
    assert [row.macs for row in rows] == [3 * n * d**2, n**2 * d, n**2 * d, n * d**2, 8 * n * d**2]
    assert [row.numbers for row in rows] == [3 * n * d, h * n**2, n * d, n * d, 4 * n * d]
    assert all(row.flops == 2 * row.macs for row in rows)


@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": 4, "kv_heads": 2, "gated": True, "d_ff": 40},
        {
            "heads": 4,
            "experts": 5,
            "experts_used": 2,
            "shared_experts": 1,
            "gated": True,
            "d_ff": 12,
        },
        {"heads": 3, "d_head": 7, "window": 3},
    ],
)
def test_the_rows_add_up_to_the_count(sizes):
    parts = explicit(d_model=24, layers=1, vocab=11, **sizes)
    rows = layer_table(parts.stacks[0], 13)
    found = count(parts, Workload(length=13)).by_component()
    outside = (Component.UNEMBEDDING, Component.EMBEDDING)
    assert sum(row.macs for row in rows) == sum(
        macs for component, macs in found.items() if component not in outside
    )


def test_doubling_the_expansion_changes_the_mlp_alone():
    one = layer_table(explicit(d_model=24, layers=1, heads=4, vocab=11, d_ff=96).stacks[0], 13)
    two = layer_table(explicit(d_model=24, layers=1, heads=4, vocab=11, d_ff=192).stacks[0], 13)
    assert one[:-1] == two[:-1]
    assert (two[-1].macs, two[-1].numbers) == (2 * one[-1].macs, 2 * one[-1].numbers)
