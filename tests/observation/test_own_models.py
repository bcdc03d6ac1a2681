"""Headwise's own models under observation: statistics by the definition, outputs, restoring."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.attention.masks import Documents, KeyPadding
from headwise.errors import MeasurementError, ModelError, OptionError
from headwise.models import Cache, Context, build, decoder_sizes, preset
from headwise.models.fused import WATCHER
from headwise.observation.attach import observe
from headwise.observation.recorder import ACTIVE
from tests.observation.own_models import KINDS, definitions, ids, own, watched
from tests.observation.records import NOISE, assert_same
from tests.observation.test_observe import hooks
from tests.parity.test_statistics import compare, expected
from tests.parity.watching import captured_calls
from tests.tolerance import Tolerance

LONG, MIDDLE, SHORT = 41, 29, 23
DECODERS = [kind for kind in KINDS if not kind.startswith("encoder")]


def padded(side: str = "right") -> tuple[Tensor, Tensor]:
    """Three rows of different length as one batch, and which tokens are real."""
    words, keep = torch.zeros(3, LONG, dtype=torch.long), torch.zeros(3, LONG, dtype=torch.bool)
    for i, row in enumerate(ids(LONG, SHORT, MIDDLE)):
        n = row.shape[1]
        at = slice(0, n) if side == "right" else slice(LONG - n, LONG)
        words[i, at], keep[i, at] = row[0], True
    return words, keep


def positions(keep: Tensor) -> Tensor:
    return (keep.cumsum(-1) - 1).clamp(min=0)


def forward(kind: str) -> tuple[nn.Module, Callable[[], Tensor], dict[str, Tensor]]:
    """A model, a pass over a padded batch, and which tokens of each stream are real."""
    model, (words, keep) = own(kind), padded()
    if kind == "encoder-decoder":
        target, real = words[:, :19], torch.ones(3, 19, dtype=torch.bool)
        return (
            model,
            lambda: model(words, target, source_mask=keep),
            {"source": keep, "target": real},
        )
    return model, lambda: model(words, mask=keep), {"text": keep}


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_are_those_of_the_definition(kind: str) -> None:
    model, run, real = forward(kind)
    with captured_calls() as calls:
        scan = watched(model, run)
    for layer, call, a in zip(scan.record.layers, calls, definitions(model, run), strict=True):
        queries, keys = real[layer.query_stream], real[layer.key_stream]
        bias = call.bias if isinstance(call.bias, Tensor) else None
        bound = Tolerance.of(call.q, call.k, call.scale, bias, call.sinks)
        compare(layer, expected(a, queries, keys, layer.role != "cross"), bound, a.shape[3])
        assert layer.rows == int(queries.sum())


def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A softcap that is left out is noticed."""
    from headwise.observation import own as module

    original = module.read_attending

    def without(attending: Any, rules: Any) -> Any:
        return original(replace(attending, softcap=None), rules)

    from dataclasses import replace

    monkeypatch.setattr(module, "read_attending", without)
    with pytest.raises(AssertionError):
        test_statistics_are_those_of_the_definition("softcap")


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_stay_what_they_are(kind: str) -> None:
    model, run, real = forward(kind)
    with torch.no_grad():
        plain = run()
    with observe(model), torch.no_grad():
        observed = run()
    here = real.get("text", real.get("target"))
    assert (plain - observed)[here].abs().max() <= NOISE * plain.abs().max()
    with torch.no_grad():
        assert torch.equal(run(), plain)


def test_what_each_layer_is() -> None:
    model = own("window")
    record = watched(model, lambda: model(ids(SHORT)[0])).record
    first, second, third = record.layers
    assert [layer.module for layer in record.layers] == [
        f"decoder.blocks.{i}.attention.branch" for i in range(3)
    ]
    assert [layer.number for layer in record.layers] == [0, 1, 2]
    assert (first.mask, first.window, second.mask, second.window, third.window) == (
        "window of 7 keys", 7, "causal", None, 11
    )  # fmt: skip
    assert {layer.role for layer in record.layers} == {"decoder"}
    assert record.tokens[0].ids.tolist() == ids(SHORT)[0][0].tolist()
    about = record.about
    assert (about["model"], about["architecture"], about["context"]) == ("Decoder", "headwise", 127)


def test_roles_and_streams_of_an_encoder_decoder() -> None:
    model, (source, target) = own("encoder-decoder"), ids(LONG, 19)
    record = watched(model, lambda: model(source, target)).record
    roles = [(layer.role, layer.query_stream, layer.key_stream) for layer in record.layers]
    pair = [("decoder", "target", "target"), ("cross", "target", "source")]
    assert roles == [("encoder", "source", "source")] * 3 + pair * 3
    streams = {stream.name: stream.ids.tolist() for stream in record.tokens}
    assert streams == {"source": source[0].tolist(), "target": target[0].tolist()}


@pytest.mark.parametrize("kind", ["grouped", "sandwich", "branch", "parallel"])
def test_writes_to_the_stream_are_verified(kind: str) -> None:
    model = own(kind)
    record = watched(model, lambda: model(ids(LONG)[0])).record
    assert [block.module for block in record.blocks] == [f"decoder.blocks.{i}" for i in range(3)]
    assert all(block.writes_verified and block.stack == "decoder" for block in record.blocks)
    kept: dict[str, Tensor] = {}
    block = model.decoder.blocks[1]
    block.register_forward_pre_hook(lambda m, args: kept.update(x=args[0][0]))
    block.attention.dropout.register_forward_hook(lambda m, a, out: kept.update(write=out[0]))
    with torch.no_grad():
        model(ids(LONG)[0])
    for name, at in (("x", "stream_in_rms"), ("write", "attention_write_rms")):
        rms = kept[name][1:].square().mean().sqrt()
        assert abs(getattr(record.blocks[1], at) - float(rms)) <= NOISE * float(rms)


def test_a_post_norm_block_is_not_a_sum() -> None:
    model = own("encoder")
    record = watched(model, lambda: model(ids(LONG)[0])).record
    assert [block.writes_verified for block in record.blocks] == [False] * 3


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", DECODERS)
def test_a_padded_batch_is_its_single_runs(kind: str, side: str) -> None:
    model, (words, keep) = own(kind), padded(side)
    single = watched(model, *(lambda row=row: model(row) for row in ids(LONG, SHORT, MIDDLE)))
    batch = watched(model, lambda: model(words, mask=keep, position_ids=positions(keep)))
    assert_same(batch.record, single.record)


def test_a_padded_batch_of_an_encoder_is_its_single_runs() -> None:
    model, (words, keep) = own("encoder"), padded()
    single = watched(model, *(lambda row=row: model(row) for row in ids(LONG, SHORT, MIDDLE)))
    assert_same(watched(model, lambda: model(words, mask=keep)).record, single.record)


@pytest.mark.parametrize("tail", [0, 5])
@pytest.mark.parametrize("kind", DECODERS)
def test_a_packed_row_is_its_documents(kind: str, tail: int) -> None:
    """Also when padding follows the documents."""
    model, rows = own(kind), ids(LONG, SHORT, MIDDLE)
    names = torch.cat([torch.full_like(row, i) for i, row in enumerate(rows)], 1)
    places = torch.cat([torch.arange(row.shape[1]) for row in rows])
    names = torch.nn.functional.pad(names, (0, tail), value=2)
    words = torch.nn.functional.pad(torch.cat(rows, 1), (0, tail))
    keep = torch.arange(names.shape[1])[None] < names.shape[1] - tail
    mask = Documents(names) & KeyPadding(keep) if tail else Documents(names)
    places = torch.nn.functional.pad(places, (0, tail))
    single = watched(model, *(lambda row=row: model(row) for row in rows))
    packed = watched(model, lambda: model(words, mask=mask, position_ids=places))
    assert_same(packed.record, single.record)


@pytest.mark.parametrize("kind", DECODERS)
def test_a_cached_run_is_one_run(kind: str) -> None:
    model, (words,) = own(kind), ids(LONG)
    plain = watched(model, lambda: model(words), keep_rows=True)
    cache = Cache.empty(model.architecture, batch=1, capacity=LONG, dtype=torch.float64)
    steps = ((0, 17), (17, 36), *((i, i + 1) for i in range(36, LONG)))
    cached = watched(
        model, *(lambda a=a, b=b: model(words[:, a:b], cache=cache) for a, b in steps),
        keep_rows=True,
    )  # fmt: skip
    assert_same(cached.record, plain.record)


def test_a_cached_decoder_with_cross_attention_is_one_run() -> None:
    model, (source, target) = own("encoder-decoder"), ids(LONG, 19)
    plain = watched(model, lambda: model(source, target))
    cache = Cache.empty(model.architecture, batch=1, capacity=19, dtype=torch.float64)

    def run() -> None:
        states = model.encode(source)
        for a, b in ((0, 7), *((i, i + 1) for i in range(7, 19))):
            model.hidden(target[:, a:b], states, cache=cache)

    assert_same(watched(model, run).record, plain.record)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_halves_are_the_whole(kind: str) -> None:
    model, (first, second) = own(kind), ids(SHORT, 2 * LONG)
    more = (ids(17)[0],) if kind == "encoder-decoder" else ()
    halves = [lambda: model(first, *more), lambda: model(second, *more)]
    whole = watched(model, *halves, keep_rows=True)
    merged = watched(model, halves[0], keep_rows=True).merge(
        watched(model, halves[1], keep_rows=True)
    )
    assert_same(merged.record, whole.record)


def test_scans_of_two_models_of_one_family_do_not_merge() -> None:
    """The same name and the same shapes of every map, and another window: another model."""
    (words,) = ids(SHORT)
    plain, capped = own("window"), own("softcap")
    one, other, again = (watched(m, lambda m=m: m(words)) for m in (plain, capped, plain))
    assert one.record.about["architecture"] == other.record.about["architecture"] == "headwise"
    with pytest.raises(
        MeasurementError, match=r"of headwise \(\w{12}\) cannot take in one of head"
    ):
        one.merge(other)
    assert one.merge(again).record.about["tokens"] == 2 * SHORT


@pytest.mark.parametrize("kind", ["alibi", "relative"])
def test_a_bias_by_tiles_is_the_bias_as_an_array(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long sequences get their bias as a function: cut, padded and for some heads alike."""
    from headwise.models import relative

    model, (words, keep) = own(kind), padded()
    keep[0, 5:9] = False  # holes, so that rows and keys are lists
    runs = (lambda: model(words, mask=keep), lambda: model(ids(2 * LONG)[0]))
    options: dict[str, Any] = {"heads": [1, 3]}
    array = [watched(model, *runs), watched(model, *runs, **options)]
    monkeypatch.setattr(relative, "_ARRAY_LIMIT", 0)
    with captured_calls() as calls:
        tiles = [watched(model, *runs), watched(model, *runs, **options)]
    assert all(callable(call.bias) for call in calls)
    for got, want in zip(tiles, array, strict=True):
        assert_same(got.record, want.record)


def test_gradients_flow_as_in_the_plain_model() -> None:
    model, (words,) = own("sinks"), ids(SHORT)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(words).square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    want = gradients()
    with observe(model) as scan:
        got = gradients()
    largest = max(float(w.abs().max()) for w in want)
    assert all((g - w).abs().max() <= NOISE * largest for g, w in zip(got, want, strict=True))
    assert_same(scan.record, watched(model, lambda: model(words)).record)


@pytest.mark.parametrize("failure", [None, RuntimeError, KeyboardInterrupt])
def test_everything_is_as_it_was(failure: type[BaseException] | None) -> None:
    model = own("encoder-decoder")
    before = (hooks(model), model.training, dict(vars(model)).keys())

    def body() -> None:
        with observe(model):
            model(*ids(LONG, 19))
            if failure is not None:
                raise failure("stop")

    if failure is None:
        body()
    else:
        with pytest.raises(failure):
            body()
    assert (hooks(model), model.training, dict(vars(model)).keys()) == before
    assert ACTIVE.get() is None
    assert WATCHER.get() is None


def test_refusals() -> None:
    model, (words,) = own("grouped"), ids(SHORT)
    with pytest.raises(ModelError, match="another observation is active"), observe(model):  # noqa: PT012
        model(words)
        with observe(own("window")):
            pass
    with pytest.raises(MeasurementError, match="no attention call was seen"), observe(model):
        pass
    with pytest.raises(OptionError, match="the model has no head 4; allowed: heads 0 to 3"):
        watched(model, lambda: model(words), heads=[4])
    with pytest.raises(OptionError, match="the model has no layer 3; allowed: layers 0 to 2"):
        watched(model, lambda: model(words), layers=[3])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own imports
def test_a_compiled_model_is_refused() -> None:
    model = own("grouped")
    with pytest.raises(ModelError, match="compiled"), observe(torch.compile(model)):
        pass
    model.compile()
    with pytest.raises(ModelError, match="compiled"), observe(model):
        pass


def test_dropout_of_attention_is_refused_in_training() -> None:
    sizes = {"vocab": 131, "d_model": 24, "layers": 1, "heads": 4, "d_ff": 31, "context": 97}
    model = build(decoder_sizes(**sizes, attention_dropout=0.1)).train()
    with pytest.raises(OptionError, match=r"dropout 0.1.*call model.eval\(\)"), observe(model):
        model(ids(SHORT)[0])
    assert WATCHER.get() is None
    watched(model.eval(), lambda: model(ids(SHORT)[0]))


def test_a_module_that_never_calls_is_an_error() -> None:
    class Deaf(nn.Module):
        def forward(self, x: Tensor, context: Context, slot: Any) -> Tensor:
            return x

    model = own("grouped")
    with (  # noqa: PT012
        pytest.raises(MeasurementError, match=r"blocks.1.attention.branch never called"),
        observe(model),
    ):
        model.decoder.blocks[1] = Deaf()
        model(ids(SHORT)[0])


def test_other_models_inside_the_block_are_left_alone() -> None:
    model, teacher, (words,) = own("grouped"), own("window"), ids(SHORT)
    with torch.no_grad():
        plain = teacher(words)
    with observe(model) as scan, torch.no_grad():
        model(words)
        assert torch.equal(teacher(words), plain)
    assert len(scan.record.layers) == 3
    assert scan.record.about["notes"] == ["MultiHeadAttention was run outside the observed model"]


def test_a_model_that_somebody_put_together_from_the_parts() -> None:
    """Without a stack of blocks, the model itself is the stack; its tokens have no ids."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = own("grouped").decoder.blocks

        def forward(self, x: Tensor) -> Tensor:
            context = Context(x.shape[0], x.shape[1], 0, x.device, x.dtype)
            for layer in self.layers:
                x = layer(x, context)
            return x

    model, x = Layers(), torch.randn(2, SHORT, 24, dtype=torch.float64)
    record = watched(model, lambda: model(x)).record
    assert [layer.rows for layer in record.layers] == [2 * SHORT] * 3
    assert all(block.writes_verified for block in record.blocks)
    assert record.tokens[0].texts[:2] == ("token 0", "token 1")


def test_transformers_is_not_loaded_for_it() -> None:
    code = (
        "import sys, torch\n"
        "from headwise.models import build, preset\n"
        "from headwise.observation.attach import observe\n"
        "model = build(preset('tiny')).eval()\n"
        "with observe(model) as scan:\n"
        "    model(torch.tensor([[1, 2, 3]]))\n"
        "assert scan.record.layers[0].rows == 3\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_half_precision() -> None:
    model = build(preset("tiny"), dtype=torch.bfloat16).eval()
    record = watched(model, lambda: model(torch.arange(1, 30)[None])).record
    assert (record.about["dtype"], record.about["computed_dtype"]) == ("bfloat16", "float32")
    assert bool(record.layers[1].values["entropy"].isfinite().all())
