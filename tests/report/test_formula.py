"""Formulas as MathML, and indices in plain words."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from headwise.report.formula import formula
from headwise.report.shell import indices
from headwise.theorems.registry import reproductions, theorems

NAME = "{http://www.w3.org/1998/Math/MathML}"


def tags(part):
    return {each.tag.removeprefix(NAME) for each in ET.fromstring(part).iter()}


def test_fractions_roots_and_indices():
    (part,) = formula(r"\frac{x_i}{\sqrt{d_k}}")
    assert {"math", "mfrac", "msqrt", "msub"} <= tags(part)
    assert ET.fromstring(part).get("display") == "block"


@pytest.mark.parametrize(
    ("latex", "parts"),
    [
        ("a", 1),
        (r"a, \qquad b, \qquad c", 3),
        (r"{a \qquad b}, \qquad c", 2),
        (r"\left( a \qquad b \right) \qquad c", 2),
        (r"a \leftarrow b \qquad c", 2),
        (r"\begin{pmatrix} a \qquad b \end{pmatrix}", 1),
        (r"\qquad a", 1),
        (r"\{ a \qquad b", 2),
    ],
)
def test_parts_that_can_stand_in_several_lines(latex, parts):
    assert len(formula(latex)) == parts


def test_arg_min():
    (part,) = formula(r"\arg\min_x f(x)")
    assert ">arg<" in part


@pytest.mark.parametrize(
    ("latex", "shown"),
    [(r"\Big\| x \Big\|", "‖"), (r"\big\{ x \big\}", "{"), (r"\Bigl\langle x \Bigr\rangle", "⟨")],
)
def test_delimiters_of_a_size(latex, shown):
    (part,) = formula(latex)
    assert f">{shown}</mo>" in part


def test_an_unknown_command_is_refused():
    with pytest.raises(ValueError, match="no MathML"):
        formula(r"\E x")


@pytest.mark.parametrize("theorem", [*theorems(), *reproductions()], ids=lambda each: each.name)
def test_every_formula_can_be_drawn(theorem):
    for part in formula(theorem.latex):
        assert "math" in tags(part)


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("d_k", "d<sub>k</sub>"),
        ("1/√d_k, W_QK", "1/√d<sub>k</sub>, W<sub>QK</sub>"),
        ("Σ_j a_ij − 1", "Σ<sub>j</sub> a<sub>ij</sub> − 1"),
        ("m_qᵀS_k m_q", "m<sub>q</sub>ᵀS<sub>k</sub> m<sub>q</sub>"),
        ("2d_k² at d^0.5, n^(−1/2)", "2d<sub>k</sub>² at d<sup>0.5</sup>, n<sup>−1/2</sup>"),
        ("scaled_dot_product", "scaled_dot_product"),
        ("a_long_name, head_dim", "a_long_name, head_dim"),
        ("x < y & z_i", "x &lt; y &amp; z<sub>i</sub>"),
    ],
)
def test_indices_of_single_letters(text, marked):
    assert str(indices(text)) == marked
