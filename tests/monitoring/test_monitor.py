"""A monitor changes nothing, leaves nothing, sees every step once, and says what it cannot do."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers.models.llama.modeling_llama as llama_file
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer
from transformers import masking_utils

from headwise.errors import ModelError, OptionError
from headwise.models.fused import WATCHER
from headwise.monitoring.head_sums import sums_of
from headwise.monitoring.monitor import _MONITORED, Monitor
from headwise.observation.attach import observe
from headwise.observation.survey import survey
from headwise.observation.tap import tapped
from tests.monitoring.dense import NOISE, one_record, one_step, trained
from tests.monitoring.test_head_sums import LONG, SHORT, padded, words
from tests.observation.own_models import VOCABULARY, own
from tests.parity.families import build

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*")


def small(**changes: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return build("llama", AutoModelForCausalLM, **changes).train()


def batches(count: int = 2) -> list[dict[str, Tensor]]:
    found = []
    for i in range(count):
        ids = words(2, LONG - 6 * i, seed=i)
        found.append({"input_ids": ids, "labels": ids})
    return found


def checkpointed(reentrant: bool) -> Any:
    model = small()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    return model


SETTINGS = {
    "plain": small,
    "eager": lambda: small(attn_implementation="eager"),
    "checkpointing": lambda: checkpointed(False),
    "reentrant": lambda: checkpointed(True),
    "dropout": lambda: small(attention_dropout=0.1),
    "autocast": small,
    "own": lambda: own("grouped").float().train(),
}


def run(name: str, model: Any, steps: int = 3) -> tuple[list[float], list[Tensor], list[Tensor]]:
    """Losses, the last gradients, and the weights after some steps of two micro-batches."""
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, gradients = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        for batch in batches():
            with torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast"):
                if name == "own":
                    loss = model(batch["input_ids"] % VOCABULARY).square().mean()
                else:
                    loss = model(**batch).loss
            losses.append(float(loss.detach()))
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        gradients = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return losses, gradients, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("rows", [None, 7])
@pytest.mark.parametrize("name", SETTINGS)
def test_losses_gradients_and_weights_are_the_same_bits(name: str, rows: int | None) -> None:
    plain = run(name, SETTINGS[name]())
    model = SETTINGS[name]()
    with Monitor(model, every=1, rows=rows) as monitor:
        watched = run(name, model)
    assert [record.step for record in monitor.records] == [1, 2, 3]
    assert len(monitor.records[0].layers) == len(monitor._found.modules)
    assert monitor.records[0].non_finite == ""
    assert plain[0] == watched[0]
    for a, b in zip(plain[1] + plain[2], watched[1] + watched[2], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_counts_nothing_twice(reentrant: bool) -> None:
    plain = one_record(small(), *batches())
    again = one_record(checkpointed(reentrant), *batches())
    for a, b in zip(plain.layers, again.layers, strict=True):
        for name, values in a.figures.items():
            # The same operations on the same numbers, save the order of gradients' sums.
            assert b.figures[name] == pytest.approx(values, rel=1e-6), name
    for path, figures in plain.stream.items():
        assert again.stream[path] == pytest.approx(figures, rel=1e-5)
    for path, figures in plain.weights.items():
        assert again.weights[path]["gradient"] == pytest.approx(figures["gradient"], rel=1e-5)


def test_autocast_is_measured_in_full_precision() -> None:
    """Autocast would compute logits of what attention was given in bfloat16, off by 2^-9."""
    given, seen = {"input_ids": words(1, LONG)}, []
    model = small()
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.no_grad(),
        tapped(model, survey(model), seen.append),
    ):
        model(**given)
    exact = sums_of(seen[0])
    assert exact is not None
    with torch.autocast("cpu", torch.bfloat16):
        figures = one_record(model, given).layers[0].figures
    for name, values in exact.figures().items():
        assert figures[name] == pytest.approx(values, rel=1e-6), name


# ---------------------------------------------------------------------------- nothing is left


def state(model: nn.Module) -> tuple[Any, ...]:
    """Everything that a monitor hangs itself on."""
    hooks = sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._forward_hooks_always_called)
        for m in model.modules()
    )
    return (
        hooks,
        len(torch_optimizer._global_optimizer_pre_hooks),
        len(torch_optimizer._global_optimizer_post_hooks),
        [sorted(vars(m)) for m in model.modules()],
        llama_file.ALL_ATTENTION_FUNCTIONS,
        masking_utils.ALL_MASK_ATTENTION_FUNCTIONS,
        WATCHER.get(),
        len(_MONITORED),
    )


class _Stop(BaseException):
    """As Ctrl-C does, this passes by hooks that are called after errors."""


@pytest.mark.parametrize("failure", [None, RuntimeError, _Stop])
@pytest.mark.parametrize("kind", ["llama", "own"])
def test_nothing_is_left_behind(kind: str, failure: type[BaseException] | None) -> None:
    model = small() if kind == "llama" else own("grouped").float().train()
    given = words(1, LONG) % VOCABULARY
    before = state(model)
    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]

    def fail(*_: Any) -> None:
        if failure is not None:
            raise failure("stop")

    handle = last.register_forward_pre_hook(fail)
    monitor = Monitor(model, every=1)
    if failure is None:
        model(given)
    else:
        with pytest.raises(failure):
            model(given)
    handle.remove()
    monitor.close()
    monitor.close()
    assert state(model) == before


def test_a_run_goes_on_after_an_interrupted_pass() -> None:
    model = small()
    expected = one_record(small(), *batches(1))

    def fail(*_: Any) -> None:
        raise _Stop

    with Monitor(model, every=1, spectra=0) as monitor:
        handle = model.lm_head.register_forward_pre_hook(fail)
        with pytest.raises(_Stop):
            model(**batches(1)[0])
        handle.remove()
        one_step(model, *batches(1))
    assert monitor.records[0].layers[0].figures == expected.layers[0].figures


def test_a_closed_monitor_is_collected() -> None:
    import weakref

    model = small()
    with Monitor(model, every=1) as monitor:
        one_step(model, *batches())
    gone = weakref.ref(monitor)
    del monitor
    gc.collect()
    assert gone() is None


def test_a_copy_of_the_model_is_not_monitored(tmp_path: Any) -> None:
    model = small()
    with Monitor(model, every=1, out=tmp_path) as monitor:
        average = copy.deepcopy(model)
        one_step(average, *batches())
        assert monitor.step == 0
        with Monitor(average, every=1):
            pass
        one_step(model, *batches())
    assert monitor.step == 1


# ------------------------------------------------------------------------- what is no training


def test_evaluation_is_not_recorded() -> None:
    model, [batch] = small(), batches(1)
    alone = one_record(small(), batch)
    with Monitor(model, every=1, spectra=0) as monitor:
        other = {"input_ids": words(3, SHORT, seed=9)}
        model.eval()
        model(**other)
        model.train()
        with torch.no_grad():
            model(**other)
        with observe(model) as scan, torch.no_grad():
            model(**other)
        one_step(model, batch)
    assert scan.record.layers[0].rows == 3 * SHORT
    assert monitor.records[0].layers == alone.layers
    assert monitor.records[0].stream == alone.stream


def test_a_training_step_may_be_observed_too() -> None:
    model, [batch] = small(), batches(1)
    alone = one_record(small(), batch)
    with Monitor(model, every=1, spectra=0) as monitor, observe(model) as scan:
        one_step(model, batch)
    assert scan.record.layers[0].rows == 2 * LONG
    got, want = monitor.records[0].layers[0].figures, alone.layers[0].figures
    for name, values in want.items():
        assert got[name] == pytest.approx(values, rel=1e-5), name


def test_a_call_from_another_thread_is_recorded() -> None:
    for model, batch in ((small(), batches(1)[0]), (own("grouped").train(), {"ids": words(1, 9)})):
        with Monitor(model, every=1, spectra=0) as monitor:
            thread = threading.Thread(target=one_step, args=(model, batch))
            thread.start()
            thread.join()
        assert len(monitor.records[0].layers) == len(monitor._found.modules)
        assert WATCHER.get() is None


def test_two_models_of_one_kind_in_two_threads() -> None:
    first, second = small(), small()
    before = llama_file.ALL_ATTENTION_FUNCTIONS
    inside, leave = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        inside.set()
        assert leave.wait(60)

    with Monitor(first, every=1, spectra=0) as a, Monitor(second, every=1, spectra=0) as b:
        handle = second.lm_head.register_forward_pre_hook(wait)
        thread = threading.Thread(target=one_step, args=(second, *batches(1)))
        thread.start()
        assert inside.wait(60)
        one_step(first, *batches(1))
        leave.set()
        thread.join()
        handle.remove()
    assert llama_file.ALL_ATTENTION_FUNCTIONS is before
    assert a.records[0].layers == b.records[0].layers


# ------------------------------------------------------------------------------------ refusals


def test_two_monitors_are_refused() -> None:
    model = small()
    with Monitor(model), pytest.raises(ModelError, match="has a monitor already; close that one"):
        Monitor(model)
    with Monitor(model), pytest.raises(ModelError, match="has a monitor already"):
        Monitor(model.model)
    with Monitor(model.model), pytest.raises(ModelError, match="has a monitor already"):
        Monitor(model)
    Monitor(model).close()


def test_a_model_without_routed_attention_is_refused() -> None:
    with pytest.raises(ModelError, match="computes attention in its own code"):
        Monitor(build("bloom"))
    with pytest.raises(ModelError, match="neither a transformers model nor one of Headwise's own"):
        Monitor(nn.Linear(2, 3))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own imports
def test_a_compiled_model_is_refused() -> None:
    model = small()
    with pytest.raises(ModelError, match=r"is compiled.*train without torch\.compile"):
        Monitor(torch.compile(model, backend="eager"))
    model.model.layers[1].compile(backend="eager")
    with pytest.raises(ModelError, match="is compiled"):
        Monitor(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_that_is_compiled_later_is_refused_at_its_first_step() -> None:
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))  # dynamo is loaded
    for model in (small(), own("grouped").float().train()):
        before = state(model)
        with Monitor(model, every=1):
            compiled = torch.compile(model, backend="eager")
            with pytest.raises(ModelError, match=r"is compiled.*close the monitor"):
                compiled(words(1, LONG) % VOCABULARY)
        after = state(model)
        assert (*after[:3], *after[4:]) == (*before[:3], *before[4:])  # dynamo marks the modules
        with Monitor(model, every=1):
            model.compile(backend="eager")
            with pytest.raises(ModelError, match=r"is compiled"):
                model(words(1, LONG) % VOCABULARY)


@pytest.mark.parametrize(("name", "value"), [("every", 0), ("rows", 0), ("spectra", -1)])
def test_numbers_out_of_range(name: str, value: int) -> None:
    with pytest.raises(OptionError, match=f"{name} is {value}"):
        Monitor(small(), **{name: value})


# ---------------------------------------------------------------------------------------- steps


def test_every_so_many_steps() -> None:
    model = small()
    seen: list[int] = []
    with Monitor(model, every=3, spectra=0, on_record=lambda r: seen.append(r.step)) as monitor:
        for step in range(7):
            monitor.log(rate=step)
            one_step(model, *batches(1))
    assert [r.step for r in monitor.records] == seen == [1, 3, 6]
    assert [r.values["rate"] for r in monitor.records] == [0, 2, 5]
    assert monitor.step == 7


def test_a_value_of_a_step_that_is_not_recorded_is_not_in_the_next() -> None:
    model = small()
    with Monitor(model, every=2, spectra=0) as monitor:
        one_step(model, *batches(1))
        one_step(model, *batches(1))
        monitor.log(late=1.0)
        one_step(model, *batches(1))
        one_step(model, *batches(1))
    assert [sorted(r.values) for r in monitor.records] == [["loss"]] * 3


@contextmanager
def halves(model: Any) -> Iterator[list[torch.optim.Optimizer]]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    yield [torch.optim.SGD(matrices, lr=0.1), torch.optim.AdamW(rest, lr=0.1)]


def test_two_optimizers_make_one_step() -> None:
    model = small()
    with halves(model) as optimizers, Monitor(model, every=1, spectra=0) as monitor:
        for _ in range(3):
            model(**batches(1)[0]).loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert [r.step for r in monitor.records] == [1, 2, 3]
    for record in monitor.records:
        assert len(record.layers) == 2
        assert all(figures["update"] > 0 for figures in record.weights.values())


def test_optimizers_that_take_turns_make_a_step_each() -> None:
    model = small()
    with halves(model) as optimizers, Monitor(model, every=1, spectra=0) as monitor:
        for optimizer in (*optimizers, *optimizers):
            model(**batches(1)[0]).loss.backward()
            optimizer.step()
    assert [r.step for r in monitor.records] == [1, 2, 3, 4]
    moved = [
        {name for name, figures in r.weights.items() if figures["update"] > 0}
        for r in monitor.records
    ]
    assert moved[0] == moved[2]
    assert moved[1] == moved[3]
    assert not moved[0] & moved[1]


def test_a_weight_that_no_optimizer_has_does_not_hold_up_the_step() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.model.layers.parameters(), lr=0.1)
    with Monitor(model, every=1, spectra=0) as monitor:
        for _ in range(2):
            model(**batches(1)[0]).loss.backward()
            optimizer.step()
    assert [r.step for r in monitor.records] == [1, 2]


def test_an_optimizer_of_another_model_is_no_step() -> None:
    model, other = small(), small()
    with Monitor(model, every=1) as monitor:
        one_step(other, *batches(1))
    assert monitor.step == 0


def test_steps_that_a_gradient_scaler_skips_are_left_out() -> None:
    model = small()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Monitor(model, every=1, spectra=0, loss_scale=scaler.get_scale) as monitor:
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(model(**batches(1)[0]).loss).backward()
            if step == 0:
                next(model.parameters()).grad[0, 0] = float("inf")
                model.model.layers[1].self_attn.q_proj.weight.grad.fill_(float("nan"))
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert [r.step for r in monitor.records] == [1, 2]
    alone = one_scaled(small())
    first = monitor.records[0]
    assert first.layers == alone.layers
    assert first.non_finite == ""
    for name, figures in alone.weights.items():
        assert first.weights[name]["gradient"] == pytest.approx(figures["gradient"], rel=1e-6)
    for name, figures in alone.stream.items():
        assert first.stream[name] == pytest.approx(figures, rel=1e-6)


def one_scaled(model: Any) -> Any:
    with Monitor(model, every=1, spectra=0) as monitor:
        model(**batches(1)[0]).loss.backward()
        torch.optim.SGD(model.parameters(), lr=1e-3).step()
    return monitor.records[0]


def test_a_closure_of_the_optimizer_is_part_of_its_step() -> None:
    model = small()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def again() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(**batches(1)[0]).loss
        loss.backward()
        return loss

    with Monitor(model, every=1, spectra=0) as monitor:
        optimizer.step(again)
    assert [r.step for r in monitor.records] == [1]
    assert monitor.records[0].weights["lm_head.weight"]["update"] > 0


# ----------------------------------------------------------------------------------- the record


def test_the_loss_is_the_mean_of_the_micro_batches() -> None:
    model = small()
    losses = [float(model(**batch).loss.detach()) for batch in batches()]
    with Monitor(model, every=1, spectra=0) as monitor:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches():
            model(**batch).loss.backward()
        optimizer.step()
    assert monitor.records[0].values["loss"] == pytest.approx(sum(losses) / 2, rel=1e-6)


def test_losses_of_parts_of_a_step_add_up() -> None:
    model = small()
    tokens = sum(batch["labels"][:, 1:].numel() for batch in batches())
    with Monitor(model, every=1, spectra=0) as monitor:
        parts = [model(**batch, num_items_in_batch=tokens).loss for batch in batches()]
        sum(parts).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert monitor.records[0].values["loss"] == pytest.approx(float(sum(parts).detach()), rel=1e-6)


def poison(module: nn.Module, where: str) -> Any:
    def forward(_: nn.Module, args: Any, output: Any) -> Any:
        x = output[0] if isinstance(output, tuple) else output
        bad = x * torch.tensor(float("nan"))
        return (bad, *output[1:]) if isinstance(output, tuple) else bad

    def backward(_: nn.Module, given: Any, gradient: Any) -> Any:
        return tuple(None if g is None else g * float("nan") for g in given)

    if where == "forward":
        return module.register_forward_hook(forward)
    return module.register_full_backward_hook(backward)


def test_the_first_tensor_that_is_not_finite_is_named() -> None:
    found = {}
    for name, part, where in (
        ("block", lambda m: m.model.layers[0].mlp, "forward"),
        ("queries", lambda m: m.model.layers[1].self_attn.q_proj, "forward"),
        ("backward", lambda m: m.model.layers[1].mlp, "backward"),
    ):
        model = small()
        handle = poison(part(model), where)
        with Monitor(model, every=1, spectra=0) as monitor:
            one = batches(1)[0]
            model(**one).loss.backward()
            torch.optim.SGD(model.parameters(), lr=0.0).step()
        handle.remove()
        found[name] = monitor.records[0].non_finite
    assert found == {
        "block": "the output of model.layers.0",
        "queries": "the queries of model.layers.1.self_attn",
        "backward": "the gradient at model.layers.0",
    }


def test_a_weight_and_a_loss_that_are_not_finite_are_named() -> None:
    model = small()
    with Monitor(model, every=1) as monitor:
        model(**batches(1)[0]).loss.backward()
        model.model.norm.weight.grad[3] = float("inf")
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        model(**batches(1)[0]).loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.0).step()
    assert [r.non_finite for r in monitor.records] == [
        "the weight of model.norm.weight", "the loss"
    ]  # fmt: skip
    assert monitor.records[1].values["loss"] != monitor.records[1].values["loss"]


def test_padding_is_in_no_residual_norm() -> None:
    model = trained("llama")
    given, places = padded("left")
    states: list[Tensor] = []
    handle = model.layers[0].register_forward_hook(
        lambda m, args, out: states.append((out[0] if isinstance(out, tuple) else out).detach())
    )
    record = one_record(model, given)
    handle.remove()
    first = torch.stack([states[0][b, row[0]] for b, [row] in enumerate(places)])
    rest = torch.cat([states[0][b, row[1:]] for b, [row] in enumerate(places)])
    figures = record.stream["layers.0"]
    # Squares of single entries are taken in float32.
    assert figures["rms_first"] == pytest.approx(float(first.square().mean().sqrt()), rel=1e-6)
    assert figures["rms"] == pytest.approx(float(rest.square().mean().sqrt()), rel=1e-6)
    assert abs(figures["rms"] - float(states[0].square().mean().sqrt())) > NOISE
