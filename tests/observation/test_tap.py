"""A tap: the model's own functions with its own arguments, and every call read beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers.models.llama.modeling_llama as llama_file
from torch import Tensor
from transformers import masking_utils

from headwise.attention.masks import Causal
from headwise.models.fused import WATCHER
from headwise.observation.attach import observe
from headwise.observation.survey import survey
from headwise.observation.tap import Seen, tapped
from tests.observation.own_models import KINDS, VOCABULARY, own
from tests.parity.families import FAMILIES, build, hidden, inputs
from tests.parity.watching import run

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*")

# Without one softmax attention of their own for each layer, or slow to build.
_MODELS = sorted(set(FAMILIES) - {"qwen3_next", "jamba", "recurrent_gemma"})


def seen(model: Any, given: dict[str, Tensor]) -> tuple[list[Seen], Any]:
    calls: list[Seen] = []
    with tapped(model, survey(model), calls.append):
        output = run(model, given)
    return calls, output


@pytest.mark.parametrize("name", _MODELS)
def test_outputs_are_the_same_bits_and_every_module_is_told(name: str) -> None:
    model = build(name)
    given, _ = inputs(name)
    plain = hidden(run(model, given))
    calls, output = seen(model, given)
    assert torch.equal(hidden(output), plain)
    paths = [info.path for info in survey(model).modules.values()]
    assert {call.path for call in calls} == set(paths)


@pytest.mark.parametrize("kind", KINDS)
def test_our_own_models(kind: str) -> None:
    model = own(kind)
    ids = torch.arange(1, 30)[None] % VOCABULARY
    given = (ids, ids[:, :17]) if kind == "encoder-decoder" else (ids,)
    calls: list[Seen] = []
    with torch.no_grad():
        plain = model(*given)
        with tapped(model, survey(model), calls.append):
            assert torch.equal(model(*given), plain)
    assert len(calls) == len(survey(model).modules)


def test_padding_is_cut_away_and_batches_stay_together() -> None:
    given, _ = inputs("llama")
    calls, _ = seen(build("llama"), given)
    real = given["attention_mask"].bool()
    for call in calls:
        assert torch.equal(call.real, real)
        assert call.first.nonzero().tolist() == [[0, 0], [1, 0]]
        assert [piece.queries for piece in call.pieces] == real.sum(1).tolist()
        assert all(piece.mask == Causal() for piece in call.pieces)
    whole, _ = seen(build("llama"), {"input_ids": given["input_ids"]})
    assert [piece.batch for piece in whole[0].pieces] == [(0, 2)]
    # Layers that share a mask share the work of reading it.
    assert whole[0].pieces is whole[1].pieces
    assert calls[0].pieces is calls[1].pieces


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_rule_of_a_window_is_read_and_not_its_array(attention: str) -> None:
    model = build("mistral", attn_implementation=attention)
    given, _ = inputs("mistral")
    calls, _ = seen(model, given)
    for call in calls:
        pattern = call.call.spec.pattern
        assert pattern is not None
        assert pattern.before == 15
        assert call.call.bias is None


def test_masks_that_a_kernel_does_without_keep_their_rule() -> None:
    """Flash attention is given None and the window apart; here a function that reads neither."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def kernel(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(module, q, k, v, None, **kwargs)

    AttentionInterface.register("kernel", kernel)
    AttentionMaskInterface.register("kernel", masking_utils.flash_attention_mask)
    model = build("mistral")
    model.set_attn_implementation("kernel")
    packed = torch.cat((torch.arange(17), torch.arange(26)))[None]
    ids = inputs("mistral")[0]["input_ids"]
    calls, _ = seen(model, {"input_ids": ids})
    assert calls[0].call.spec.pattern.before == 15  # type: ignore[union-attr]
    model.train()
    given = {"input_ids": ids[:1], "position_ids": packed, "use_cache": False}
    calls, _ = seen(model, given)
    assert [piece.queries for piece in calls[0].pieces] == [17, 26]
    mask = inputs("mistral")[0]["attention_mask"]
    calls, _ = seen(model, {"input_ids": ids, "attention_mask": mask})  # the padding alone is given
    assert torch.equal(calls[0].real, mask.bool())
    assert calls[0].call.spec.pattern.before == 15  # type: ignore[union-attr]


def test_a_mask_of_the_user_is_read_as_an_array() -> None:
    keep = torch.ones(43, 43, dtype=torch.bool).tril() & (torch.rand(43, 43) > 0.3)
    keep |= torch.eye(43, dtype=torch.bool)
    given = {"input_ids": inputs("llama")[0]["input_ids"][:1], "attention_mask": keep[None, None]}
    calls, _ = seen(build("llama"), given)
    [piece] = calls[0].pieces
    assert torch.equal(piece.mask.dense(0, 43, 43), keep)


def test_queries_of_cross_attention_are_the_tokens_of_their_stack() -> None:
    given, _ = inputs("t5")
    given["decoder_attention_mask"] = torch.ones_like(given["decoder_input_ids"])
    given["decoder_attention_mask"][0, 11:] = 0
    calls, _ = seen(build("t5"), given)
    crossing = [call for call in calls if call.cross]
    assert len(crossing) == 2
    for call in crossing:
        assert call.real.sum(1).tolist() == [11, 19]
        assert [(p.queries, p.length) for p in call.pieces] == [(11, 43), (19, 31)]


def test_an_observed_model_may_be_tapped() -> None:
    for model, given in ((build("llama"), inputs("llama")[0]), (own("grouped"), None)):
        ids = torch.arange(1, 30)[None]
        body = (lambda: run(model, given)) if given else (lambda: model(ids))  # noqa: B023
        calls: list[Seen] = []
        with torch.no_grad(), observe(model) as scan, tapped(model, survey(model), calls.append):
            body()
        assert len(calls) == len(scan.record.layers)


@pytest.mark.parametrize("failure", [None, KeyboardInterrupt])
def test_nothing_is_left_behind(failure: type[BaseException] | None) -> None:
    model, other = build("llama"), own("grouped")
    before = (llama_file.ALL_ATTENTION_FUNCTIONS, masking_utils.ALL_MASK_ATTENTION_FUNCTIONS)

    def tell(call: Seen) -> None:
        if failure is not None:
            raise failure

    for each, given in ((model, inputs("llama")[0]["input_ids"]), (other, torch.ones(1, 3).long())):
        try:
            with tapped(each, survey(each), tell):
                each(given)
        except KeyboardInterrupt:
            assert failure is not None
    assert llama_file.ALL_ATTENTION_FUNCTIONS is before[0]
    assert masking_utils.ALL_MASK_ATTENTION_FUNCTIONS is before[1]
    assert WATCHER.get() is None
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_two_taps_may_end_in_any_order() -> None:
    first, second = build("llama"), build("llama")
    before = llama_file.ALL_ATTENTION_FUNCTIONS
    told: dict[str, list[Seen]] = {"first": [], "second": []}
    one = tapped(first, survey(first), told["first"].append)
    two = tapped(second, survey(second), told["second"].append)
    one.__enter__()
    two.__enter__()
    for model in (first, second):
        run(model, inputs("llama")[0])
    one.__exit__(None, None, None)
    run(second, inputs("llama")[0])
    two.__exit__(None, None, None)
    assert [len(calls) for calls in told.values()] == [2, 4]
    assert llama_file.ALL_ATTENTION_FUNCTIONS is before


def test_the_registry_looks_as_it_did() -> None:
    model = build("llama")
    plain = llama_file.ALL_ATTENTION_FUNCTIONS
    with tapped(model, survey(model), lambda call: None):
        watched = llama_file.ALL_ATTENTION_FUNCTIONS
        assert watched is not plain
        assert "sdpa" in watched
        assert "nothing" not in watched
        assert set(watched) == set(plain)
        assert len(watched) == len(plain)
        assert watched.valid_keys() == plain.valid_keys()
