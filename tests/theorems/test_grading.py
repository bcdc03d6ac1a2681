"""The grader: right functions of several styles pass, each mistake fails what it breaks alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from headwise.errors import OptionError
from headwise.theorems.grading import Mark, grade, load_function
from headwise.theorems.grading_cases import PROBES, Case, Inputs, cases, defined, rounding
from headwise.theorems.grading_mistakes import MISTAKES, Form, attention_with, recognise
from headwise.theorems.grading_requirements import REQUIREMENTS

ALL = [each.name for each in REQUIREMENTS]


def by_einsum(x, w_q, w_k, w_v, w_o, heads, *, mask=None, kv_heads=None):
    g, d_k = kv_heads or heads, w_q.shape[1] // heads
    q = torch.einsum("bnd,dhk->bhnk", x, w_q.view(-1, heads, d_k))
    k, v = (torch.einsum("bnd,dgk->bgnk", x, w.view(-1, g, d_k)) for w in (w_k, w_v))
    q = q.view(q.shape[0], g, heads // g, *q.shape[2:])
    s = torch.einsum("bgrik,bgjk->bgrij", q, k) / math.sqrt(d_k)
    if mask is not None:
        mask = mask if mask.dim() == 2 else mask[:, :, None]
        s = s.masked_fill(~mask, -torch.inf)
    a = torch.nan_to_num(torch.softmax(s, -1), nan=0.0)
    o = torch.einsum("bgrij,bgjk->bgrik", a, v).flatten(1, 2)
    return torch.einsum("bhik,hkd->bid", o, w_o.view(heads, d_k, -1))


def by_loop(x, w_q, w_k, w_v, w_o, heads, mask=None):
    d_k = x.shape[-1] // heads
    total = torch.zeros_like(x)
    for m in range(heads):
        here = slice(m * d_k, (m + 1) * d_k)
        s = (x @ w_q[:, here]) @ (x @ w_k[:, here]).mT * d_k**-0.5
        e = torch.exp(s - s.amax(-1, keepdim=True))
        if mask is not None:
            visible = mask if mask.dim() == 2 else mask[:, 0]
            s = torch.where(visible, s, -torch.inf)
            top = s.amax(-1, keepdim=True).clamp(min=-1e300)
            e = torch.exp(s - top)
        total = (
            total + e / e.sum(-1, keepdim=True).clamp(min=1e-300) @ (x @ w_v[:, here]) @ w_o[here]
        )
    return total


def by_torch(x, w_q, w_k, w_v, w_o, heads, **options):
    g = options.get("kv_heads", heads)
    q = (x @ w_q).unflatten(-1, (heads, -1)).transpose(1, 2)
    k, v = ((x @ w).unflatten(-1, (g, -1)).transpose(1, 2) for w in (w_k, w_v))
    o = scaled_dot_product_attention(q, k, v, attn_mask=options.get("mask"), enable_gqa=heads != g)
    return o.transpose(1, 2).flatten(2) @ w_o


def refusing(x, w_q, w_k, w_v, w_o, heads, *, mask=None, kv_heads=None):
    if mask is not None and not mask.any(-1).all():
        raise ValueError("a row of the mask hides every key")
    return by_einsum(x, w_q, w_k, w_v, w_o, heads, mask=mask, kv_heads=kv_heads)


def formed(form: Form):
    def attention(x, w_q, w_k, w_v, w_o, heads, *, mask=None, kv_heads=None):
        return attention_with(
            form, Inputs(x=x, w_q=w_q, w_k=w_k, w_v=w_v, w_o=w_o, heads=heads, mask=mask,
                         kv_heads=kv_heads)
        )  # fmt: skip

    return attention


def marks(found, mark):
    return [each.requirement for each in found.results if each.mark is mark]


@pytest.mark.parametrize("function", [by_einsum, by_torch, refusing, formed(Form())])
def test_right_functions_pass(function):
    found = grade(function)
    assert found.failures == ()
    assert marks(found, Mark.PASSED) == ALL
    assert found.passed
    assert found.sentence == f"{function.__name__} meets 17 of 17 requirements."


def test_a_function_without_grouped_heads_passes():
    found = grade(by_loop)
    assert found.passed
    assert marks(found, Mark.UNSUPPORTED) == ["grouped heads"]
    assert found.sentence.endswith("meets 16 of 17 requirements; not supported: grouped heads.")


# choice -> what fails besides agreement, and the smallest input of the first of them
BREAKS = {
    ("scale", "1"): (["scale"], (1, 2, 2, 1)),
    ("scale", "1/d_k"): (["scale"], (1, 2, 2, 1)),
    ("scale", "1/√d"): (["scale"], (1, 2, 4, 2)),
    ("scale", "1/d"): (["scale"], (1, 2, 2, 1)),
    ("scale", "√d_k"): (["scale"], (1, 2, 2, 1)),
    ("merge", "reshaped"): (["heads"], (1, 2, 2, 2)),
    ("merge", "interleaved"): (["heads"], (1, 1, 4, 2)),
    ("split", "reshaped"): (["heads", "grouped heads"], (1, 2, 2, 2)),
    ("split", "interleaved"): (["heads", "grouped heads"], (1, 1, 4, 2)),
    ("split", "one head"): (["heads", "grouped heads"], (1, 3, 2, 2)),
    ("normalised", "over queries"): (["rows", "causal mask", "padding"], (1, 2, 2, 1)),
    ("normalised", "over heads"): (["heads", "rows", "causal mask", "padding"], (1, 1, 2, 2)),
    ("normalised", "over batch"): (["rows", "batch", "causal mask", "padding"], (1, 2, 1, 1)),
    ("normalised", "not"): (["rows"], (1, 1, 1, 1)),
    ("normalised", "sigmoid"): (["rows"], (1, 1, 1, 1)),
    ("polarity", "True hides"): (["causal mask", "padding", "empty row"], (1, 2, 1, 1)),
    ("mask", "ignored"): (["causal mask", "padding", "empty row"], (1, 2, 1, 1)),
    ("mask", "always causal"): (["permutation"], (1, 2, 1, 1)),
    ("mask", "after"): (["causal mask", "padding"], (1, 2, 1, 1)),
    ("mask", "zero"): (["causal mask", "padding", "empty row"], (1, 2, 1, 1)),
    ("mask", "number"): (["causal mask", "padding", "empty row"], (1, 2, 1, 1)),
    ("mask", "nan"): (["empty row"], (1, 2, 1, 1)),
    ("mask", "fill"): (["empty row"], (1, 2, 1, 1)),
    ("mask", "add"): (["empty row"], (1, 2, 1, 1)),
    ("mask", "add 1e4"): (["padding", "empty row"], (1, 2, 1, 1)),
    ("mask", "add 1e4 before"): (["padding", "empty row"], (1, 2, 1, 1)),
    ("shared", "tiled"): (["grouped heads"], (1, 1, 4, 4)),
    ("shared", "ignored"): (["grouped heads"], (1, 1, 2, 2)),
    ("projections", "x Wᵀ"): (["heads", "grouped heads"], (1, 1, 2, 2)),
    ("output", "none"): ([], None),
    ("output", "W_Oᵀ"): (["heads"], (1, 1, 2, 2)),
    ("logits", "k·q"): ([], None),
}  # fmt: skip
AGREEMENT = ["agreement", "masked agreement"]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda each: f"{each.field} {each.choice}")
def test_a_mistake_fails_what_it_breaks_and_is_named(mistake):
    found = grade(formed(replace(Form(), **{mistake.field: mistake.choice})))
    alone = [each for each in found.failures if each.requirement not in AGREEMENT]
    names, smallest = BREAKS[mistake.field, mistake.choice]
    assert [each.requirement for each in alone] == names
    assert not found.passed
    if smallest is not None:
        case = alone[0].case
        assert (case.batch, case.n, case.d, case.heads) == smallest
        assert case.said in alone[0].sentence
    causes = {each.cause for each in found.failures if each.cause}
    if mistake.choice != "ignored" or mistake.field != "shared":  # that one raises, in words
        assert mistake.sentence in causes


def test_every_mistake_is_tested():
    assert set(BREAKS) == {(each.field, each.choice) for each in MISTAKES}


def test_two_mistakes_are_told_apart():
    found = {
        each.requirement: each for each in grade(formed(Form(scale="1", merge="reshaped"))).results
    }
    assert found["scale"].cause.startswith("the scale 1/√d_k is missing")
    assert found["heads"].cause.startswith("the heads are merged without the transpose")
    assert "; and " not in found["scale"].cause + found["heads"].cause
    both = {each.requirement: each for each in grade(
        formed(Form(scale="1", polarity="True hides"))).results}  # fmt: skip
    assert (
        both["causal mask"].cause == "the mask is read the other way round: True has to mean attend"
    )


def wrong(change):
    """A right function with something else wrong."""

    def attention(x, w_q, w_k, w_v, w_o, heads, *, mask=None, kv_heads=None):
        return change(by_einsum(x, w_q, w_k, w_v, w_o, heads, mask=mask, kv_heads=kv_heads), x)

    return attention


def changed_in_place(o, x):
    x += 1
    return o


@pytest.mark.parametrize(
    ("change", "names", "said"),
    [
        (lambda o, x: o.detach(), ["gradients"], "no gradient reaches x"),
        (lambda o, x: o.float(), ["dtype"], "inputs of float64 give an output of float32"),
        (lambda o, x: o[:, :-1], ["shape"], "it returned the shape (1, 0, 1), not (1, 1, 1)"),
        (lambda o, x: o.detach().tolist(), ["shape"], "it returned a list, not a torch.Tensor"),
        (lambda o, x: None, ["shape"], "it returned a NoneType, not a torch.Tensor"),
        (lambda o, x: o * math.nan, ["finite", "causal mask", "padding", "empty row"],
         "NaN or infinity for ordinary logits"),
        (lambda o, x: torch.nn.functional.dropout(o, 0.5), ["repeatable"], "dropout or noise"),
        (lambda o, x: o + x.mean(0, keepdim=True) - x, ["batch"], "differ by"),
        (lambda o, x: 1 / 0, ["shape"], "it raised ZeroDivisionError: division by zero"),
        (changed_in_place, ["inputs kept"], "it changes its input x in place"),
    ],
)  # fmt: skip
def test_other_mistakes(change, names, said):
    found = grade(wrong(change))
    failed = [each.requirement for each in found.failures]
    assert failed[: len(names)] == names or set(names) <= set(failed)
    first = next(each for each in found.failures if each.requirement == names[0])
    assert said in first.sentence
    if names == ["shape"]:
        assert failed == ["shape"]
        assert set(marks(found, Mark.UNJUDGED)) >= {"heads", "rows", "gradients", "causal mask"}


def test_exp_without_the_largest_logit_is_said():
    def naive(x, w_q, w_k, w_v, w_o, heads):
        q, k, v = ((x @ w).unflatten(-1, (heads, -1)).transpose(1, 2) for w in (w_q, w_k, w_v))
        e = torch.exp(q @ k.mT / math.sqrt(q.shape[-1]))
        return (e / e.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2) @ w_o

    found = {each.requirement: each for each in grade(naive).results}
    assert "subtract the largest logit of a row before exp" in found["finite"].sentence
    assert found["causal mask"].sentence == "it takes no argument mask"
    assert found["scale"].mark is found["gradients"].mark is Mark.PASSED


def test_an_error_of_a_function_is_one_short_line():
    def raising(*arguments, **options):
        raise KeyError("a\nb" * 200)

    (failure,) = grade(raising).failures
    assert "\n" not in failure.sentence
    assert len(failure.sentence) < 260


def test_the_callers_random_numbers_are_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    grade(by_torch)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize("kind", PROBES)
def test_the_tolerance_lies_between_rounding_and_mistakes(kind):
    for case in PROBES[kind]:
        inputs = case.inputs()
        near = rounding(inputs)
        right = defined(inputs)
        other = attention_with(Form(), inputs)
        assert float((right - other).abs().max()) <= near
        if not case.large:
            assert near < 1e-10
            assert float((attention_with(Form(scale="1"), inputs) - right).abs().max()) > 1e6 * near


def test_a_right_function_has_no_mistake():
    inputs = PROBES["none"][0].inputs()
    assert recognise([(inputs, defined(inputs))]) == ()
    assert recognise([(inputs, torch.zeros_like(inputs.x))]) == ()


def test_cases_grow():
    sizes = [c.batch * c.n * c.d for c in cases()]
    assert sizes == sorted(sizes)
    assert len(set(cases())) == len(sizes)
    assert all(c.kv_heads and c.heads % c.kv_heads == 0 for c in cases(grouped=True))
    large = Case(batch=1, n=3, heads=2, d_head=2, mask="padding", large=8e3)
    assert "as large as 8000" in large.said
    assert float(large.inputs().x.abs().max()) > 1e3


SOURCE = """
import math
import torch
from beside import scale

def attention(x, w_q, w_k, w_v, w_o, heads):
    return x

number = 3
"""


def test_a_function_is_loaded_from_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "beside.py").write_text("scale = 2")
    where = tmp_path / "mine.py"
    assert load_function(f"{where}:attention").__name__ == "attention"
    (tmp_path / "beside.py").write_text("scale = 3\nlonger = True")
    assert load_function(f"{where}:attention").__globals__["scale"] == 3
    with pytest.raises(OptionError, match=r"has no function 'other'; allowed: attention"):
        load_function(f"{where}:other")
    with pytest.raises(OptionError, match=r"number in .* is no function but int"):
        load_function(f"{where}:number")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def attention(:\n", "mine.py, line 1: invalid syntax"),
        ("import no_such_module_anywhere", "cannot be run: ModuleNotFoundError: No module named"),
        ("1 / 0", "cannot be run: ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "cannot be run: SystemExit: 3"),
        ("\0", "mine.py"),
        ("", "has no function 'attention'; allowed: none is there"),
    ],
)
def test_a_file_that_cannot_be_run_is_one_line(tmp_path, source, said):
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(OptionError) as error:
        load_function(f"{tmp_path / 'mine.py'}:attention")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "where", ["", "mine.py", ":attention", "mine.py:", "mine.py:a b", "x.py:f"]
)
def test_what_names_no_function_is_refused(where):
    with pytest.raises(OptionError, match=r"FILE\.py:FUNCTION"):
        load_function(where)


def test_bytes_that_are_no_python_are_one_line(tmp_path):
    (tmp_path / "mine.py").write_bytes(b"x = '\xff\xfe'")
    with pytest.raises(OptionError, match=r"mine\.py"):
        load_function(f"{tmp_path / 'mine.py'}:attention")
