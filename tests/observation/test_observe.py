"""Entering, options, restoring, refusals, memory, gradients, and what is said about a run."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from headwise.errors import MeasurementError, ModelError, OptionError
from headwise.observation.attach import observe
from headwise.observation.interface import NAME
from headwise.observation.recorder import ACTIVE
from tests.observation.records import NOISE, assert_same
from tests.observation.test_laws_of_observation import ids, padded, watched
from tests.parity.families import build, hidden, in_double, inputs
from tests.parity.watching import SquareTensors, run

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*")


def hooks(model: nn.Module) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._forward_hooks_always_called)
        for m in model.modules()
    )


def implementations(model: PreTrainedModel) -> list[str]:
    return [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")]


@pytest.mark.parametrize("failure", [None, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["llama", "t5", "clip"])
def test_everything_is_as_it_was(name: str, failure: type[BaseException] | None) -> None:
    model = build(name)
    given, _ = inputs(name)
    before = (hooks(model), implementations(model), model.training, dict(vars(model)).keys())
    plain = hidden(run(model, given))

    def body() -> None:
        with observe(model) as scan:
            run(model, given)
            assert NAME in implementations(model)
            if failure is not None:
                raise failure("stop")
        assert not scan.record.about["interrupted"]

    if failure is None:
        body()
    else:
        with pytest.raises(failure):
            body()
    assert (
        hooks(model),
        implementations(model),
        model.training,
        dict(vars(model)).keys(),
    ) == before
    assert ACTIVE.get() is None
    assert torch.equal(hidden(run(model, given)), plain)


def test_an_interrupted_run_keeps_what_was_measured() -> None:
    model = build("llama")
    given, _ = inputs("llama")
    with pytest.raises(KeyboardInterrupt), observe(model) as scan:  # noqa: PT012
        run(model, given)
        raise KeyboardInterrupt
    assert scan.record.about["interrupted"]
    assert scan.record.layers[0].rows == int(given["attention_mask"].sum())


def test_one_observation_at_a_time() -> None:
    model, other = build("llama"), build("gpt2")
    with pytest.raises(ModelError, match="active"), observe(model), observe(other):
        pass
    assert ACTIVE.get() is None


def test_one_observation_of_a_model_also_across_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    model = build("llama")
    given, _ = inputs("llama")

    def other() -> None:
        with observe(model):
            pass

    with observe(model), ThreadPoolExecutor(1) as pool:
        run(model, given)
        with pytest.raises(ModelError, match="is being observed already"):
            pool.submit(other).result()
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own imports
def test_a_compiled_model_is_refused() -> None:
    model = build("llama")
    with pytest.raises(ModelError, match="compiled"), observe(torch.compile(model)):
        pass
    model.compile()
    with pytest.raises(ModelError, match="compiled"), observe(model):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "rows is 0; allowed: 1 or more"),
        ({"layers": [2]}, "the model has no layer 2; allowed: layers 0 to 1"),
        ({"layers": range(100)}, "the model has no layer 2, 3, 4 and 95 more; allowed: layers"),
        ({"layers": []}, "no layers were named; allowed: layers 0 to 1"),
        ({"heads": [4]}, "the model has no head 4; allowed: heads 0 to 3"),
        ({"sink_keys": -1}, "sink_keys is -1"),
        ({"workers": 0}, "workers is 0"),
    ],
)
def test_options_are_checked_on_entering(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message), observe(build("llama"), **options):
        pytest.fail("the block must not be entered")


def test_dropout_is_refused() -> None:
    model = build("llama", attention_dropout=0.1).train()
    given, _ = inputs("llama")
    with pytest.raises(OptionError, match=r"dropout 0.1.*call model.eval\(\)"), observe(model):
        model(**given)
    assert model.training
    assert model.config._attn_implementation == "sdpa"


def test_a_block_without_a_forward_pass_is_an_error() -> None:
    with (
        pytest.raises(MeasurementError, match="no attention call was seen"),
        observe(build("llama")),
    ):
        pass


def test_a_module_that_never_calls_is_an_error() -> None:
    model = build("llama")
    given, _ = inputs("llama")

    class Deaf(nn.Module):
        def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
            return hidden_states

    with pytest.raises(MeasurementError, match=r"layers.1.self_attn never called"), observe(model):  # noqa: PT012
        model.layers[1] = Deaf()
        run(model, given)


def test_a_tower_that_was_not_run_is_a_note() -> None:
    model = build("clip")
    given, _ = inputs("clip")
    with observe(model) as scan, torch.no_grad():
        model.get_text_features(given["input_ids"], given["attention_mask"])
    assert scan.record.about["notes"] == ["vision_model was not run, so it was not measured"]
    assert {layer.module.split(".")[0] for layer in scan.record.layers} == {"text_model"}


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "t5"])
def test_gradients_flow_as_in_the_plain_model(name: str) -> None:
    model = in_double(build(name))
    given = {k: v[:1, :23] for k, v in inputs(name)[0].items()}

    def gradients() -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        out = hidden(model(**given))
        out.square().mean().backward()
        kept = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return out.detach(), kept

    plain, want = gradients()
    with observe(model) as scan:
        observed, got = gradients()
    # gemma2, gpt_oss: eager mode takes its softmax in float32, so the reference is that rough.
    noise = NOISE if name in ("llama", "t5") else 2.0**-18
    assert (plain - observed).abs().max() <= noise * plain.abs().max()
    assert len(got) == len(want)
    largest = max(float(w.abs().max()) for w in want)
    assert all((g - w).abs().max() <= noise * largest for g, w in zip(got, want, strict=True))
    assert_same(scan.record, watched(model, given).record)


def test_only_some_layers_and_heads() -> None:
    model = in_double(build("llama"))
    given, real = inputs("llama")
    full = watched(model, given)
    plain = hidden(run(model, given))
    with observe(model, layers=[1], heads=[0, 3]) as scan:
        observed = hidden(run(model, given))
    assert (plain - observed)[real].abs().max() <= NOISE * plain.abs().max()
    (layer,) = scan.record.layers
    assert layer.number == 1
    for name, value in layer.values.items():
        want = full.record.layers[1].values[name]
        assert torch.allclose(value[[0, 3]], want[[0, 3]], rtol=NOISE, atol=NOISE, equal_nan=True)
        assert value[[1, 2]].isnan().all()


def test_only_some_rows() -> None:
    """A sampled run measures each of its rows exactly."""
    model = in_double(build("llama"))
    (words,) = ids(41)
    full = watched(model, {"input_ids": words}, keep_rows=True).record.layers[1]
    some = watched(model, {"input_ids": words}, keep_rows=True, rows=7).record
    layer = some.layers[1]
    assert (layer.rows, layer.rows_total) == (7, 41)
    assert some.about["exactness"] == "exact on 7 of 41 rows"
    for name, rows in layer.row_values.items():
        here = ~layer.row_values["entropy"].isnan()
        assert int(here[0].sum()) == 7
        assert torch.allclose(rows[here], full.row_values[name][here], rtol=NOISE, equal_nan=True)
    assert torch.allclose(layer.received.sum(-1), torch.tensor(41.0, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["bool", "additive", "per_head"])
def test_masks_that_users_give(kind: str) -> None:
    """A 4-D causal mask says the same as no mask."""
    model = in_double(build("llama"))
    (words,) = ids(29)
    keep = torch.ones(29, 29, dtype=torch.bool).tril()[None, None]
    mask: Tensor = keep
    if kind != "bool":
        mask = torch.zeros(keep.shape, dtype=torch.float64)
        mask = mask.masked_fill(~keep, torch.finfo(torch.float64).min)
    if kind == "per_head":
        mask = mask.expand(1, 4, -1, -1)
    got = watched(model, {"input_ids": words, "attention_mask": mask}).record
    want = watched(model, {"input_ids": words}).record
    for a, b in zip(got.layers, want.layers, strict=True):
        assert a.role == "decoder"
        for name in ("entropy", "received", "pooled", "distance"):
            x, y = (getattr(r, name) if hasattr(r, name) else r.values[name] for r in (a, b))
            assert torch.allclose(x, y, rtol=NOISE, atol=NOISE)


@pytest.mark.parametrize(
    ("name", "more"),
    [("llama", {}), ("llama", {"padding": True}), ("mistral", {}), ("bert", {"padding": True}),
     ("llama", {"rows": 16}), ("gemma2", {})],
)  # fmt: skip
def test_nothing_square_is_allocated(name: str, more: dict[str, Any]) -> None:
    length = 709
    model = build(name, max_position_embeddings=1024)
    given: dict[str, Tensor] = {"input_ids": ids(length)[0]}
    if more.get("padding"):
        given = padded([*ids(length), *ids(length - 101)], "right")
        given.pop("position_ids")
    options = {key: value for key, value in more.items() if key != "padding"}
    with observe(model, **options) as scan, SquareTensors(length - 101) as watch:
        run(model, given)
    assert watch.found == []
    assert scan.record.about["notes"] == []


def test_the_watcher_sees_eager_attention() -> None:
    model = build("llama", max_position_embeddings=1024)
    model.set_attn_implementation("eager")
    with SquareTensors(600) as watch:
        run(model, {"input_ids": ids(709)[0]})
    assert watch.found


def test_nan_is_found_and_named_and_the_rest_goes_on() -> None:
    model = build("llama", num_hidden_layers=3)
    with torch.no_grad():
        model.layers[1].self_attn.k_proj.weight[3, 5] = float("nan")
    given, _ = inputs("llama")
    record = watched(model, given).record
    first, second, third = record.layers
    assert first.non_finite is None
    assert first.values["entropy"].isfinite().all()
    assert second.non_finite == (
        "layer 1 (layers.1.self_attn): its keys hold NaN, first at position 0; it is the first "
        "module where this was seen"
    )
    assert second.values["entropy"].isnan().all()
    assert third.non_finite is not None
    assert "layers.1.self_attn" in third.non_finite


def test_half_precision_is_measured_in_float32() -> None:
    model = build("llama")
    (words,) = ids(41)
    want = watched(model, {"input_ids": words}).record.layers[0]
    got = watched(model.to(torch.bfloat16), {"input_ids": words}).record
    assert (got.about["dtype"], got.about["computed_dtype"]) == ("bfloat16", "float32")
    # bfloat16 keeps 8 bits: logits of size s move by 2^-8 s.
    reach = want.values["max_abs_logit"].max()
    error = (got.layers[0].values["entropy"] - want.values["entropy"]).abs().max()
    assert error <= 8 * 2.0**-8 * reach * 4


def test_tokens_are_named() -> None:
    class Words:
        def decode(self, which: list[int]) -> str:
            return f"<{which[0]}>"

    model = build("t5")
    given, _ = inputs("t5")
    source, target = watched(model, given, tokenizer=Words()).record.tokens
    assert (source.name, target.name) == ("source", "target")
    assert source.ids.tolist()[:3] == given["input_ids"][0, :3].tolist()
    assert source.texts[0] == f"<{int(given['input_ids'][0, 0])}>"
    assert len(source.texts) == int(given["attention_mask"].sum())
    frames = watched(build("whisper"), inputs("whisper")[0]).record.tokens[0]
    assert frames.texts[:2] == ("frame 0", "frame 1")
    patches = watched(build("vit"), inputs("vit")[0]).record.tokens[0]
    assert patches.texts[17 + 2] == "patch 2"
    assert watched(model, given).record.tokens[0].texts[0] == ""


def test_the_scan_grows_while_the_block_is_open() -> None:
    model = build("llama")
    (words,) = ids(17)
    with observe(model) as scan:
        run(model, {"input_ids": words})
        assert scan.record.layers[0].rows == 17
        run(model, {"input_ids": words})
    assert scan.record.layers[0].rows == 34
    assert scan.dataset.sizes["key"] == 34
    assert len(scan.to_dataframe()) == 8
    assert "LlamaModel" in str(scan)
    assert "LlamaModel" in scan._repr_html_()


def test_the_model_is_not_kept_alive() -> None:
    import weakref

    model = build("llama")
    scan = watched(model, {"input_ids": ids(17)[0]})
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    assert scan.record.layers


def test_beam_search_is_said() -> None:
    from transformers import AutoModelForCausalLM

    model = build("llama", AutoModelForCausalLM)
    words = torch.cat(ids(17, 17))
    given = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    more = {"num_beams": 3, "max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(**given, **more)
    with observe(model) as scan:
        observed = model.generate(**given, **more)
    assert torch.equal(plain, observed)
    (note,) = scan.record.about["notes"]
    assert "beam search" in note
    with observe(model) as scan:
        model.generate(**given, **{**more, "num_beams": 1})
    assert scan.record.about["notes"] == []


def test_inference_mode() -> None:
    model = in_double(build("llama"))
    (words,) = ids(17)
    with torch.inference_mode(), observe(model) as scan:
        model(words)
    assert_same(scan.record, watched(model, {"input_ids": words}).record)


def test_scans_of_different_models_do_not_merge() -> None:
    words = {"input_ids": ids(17)[0]}
    with pytest.raises(MeasurementError, match="a scan of llama cannot take in one of gpt2"):
        watched(build("llama"), words).merge(watched(build("gpt2"), words))


def test_the_registered_name_is_not_one_that_transformers_interprets() -> None:
    assert not any(word in NAME for word in ("flash", "sdpa", "flex_attention", "paged", "/"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own imports
def test_a_compiled_caller_is_run_as_it_is_written_while_the_model_is_observed() -> None:
    torch.manual_seed(0)
    model = build("llama")
    compiled = torch.compile(model, backend="eager")
    given = torch.cat(ids(13, 13))
    with torch.no_grad():
        before = compiled(given).last_hidden_state
        with observe(model) as scan:
            during = compiled(given).last_hidden_state
        after = compiled(given).last_hidden_state
    assert [layer.rows for layer in scan.record.layers] == [26, 26]
    torch.testing.assert_close(during, before)
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_inference_mode_and_ordinary_calls_are_added_up() -> None:
    torch.manual_seed(0)
    model = build("llama")
    given = torch.cat(ids(13, 13))
    with observe(model) as plain, torch.no_grad():
        model(given)
        model(given)
    with observe(model) as mixed:
        with torch.inference_mode():
            model(given)
        with torch.no_grad():
            model(given)
    assert_same(mixed.record, plain.record)
    with torch.inference_mode(), observe(model) as inside:
        model(given)
        model(given)
    assert_same(inside.record, plain.record)
    with observe(model) as again, torch.no_grad():
        model(given)
    inside.merge(again)
    assert inside.record.layers[0].rows == 3 * 26


def test_other_threads_that_run_the_model_do_not_touch_the_scan() -> None:
    from concurrent.futures import ThreadPoolExecutor

    torch.manual_seed(0)
    model = build("llama")
    given = torch.cat(ids(13, 13))
    with torch.no_grad(), observe(model) as alone:
        model(given)
    elsewhere: list[Tensor] = []

    def run_elsewhere(*_: Any) -> None:
        # In the middle of the forward pass that is measured: the worst moment.
        hook.remove()
        with ThreadPoolExecutor(1) as pool:
            elsewhere.append(pool.submit(torch.no_grad()(model), given[:, :7]).result()[0])

    hook = model.layers[1].self_attn.q_proj.register_forward_hook(run_elsewhere)
    with torch.no_grad(), observe(model) as scan:
        model(given)
    assert_same(scan.record, alone.record)
    assert scan.record.about["notes"] == ["calls of the model from other threads were not measured"]
    torch.testing.assert_close(elsewhere[0], model(given[:, :7]).last_hidden_state)


def test_proposals_that_were_rejected_are_said() -> None:
    torch.manual_seed(0)
    model = build("llama")
    given = torch.cat(ids(13))
    with torch.no_grad(), observe(model) as scan:
        cache = DynamicCache(config=model.config)
        model(given, cache=cache, use_cache=True)
        cache.crop(-2)
        model(given[:, 5:7], cache=cache, use_cache=True)
    assert scan.record.layers[0].rows == 15
    assert scan.record.tokens[0].position.tolist() == [*range(11), 11, 11, 12, 12]
    assert [note for note in scan.record.about["notes"] if "proposed and rejected" in note]
