"""Filling a model: every tensor exactly once, everything else an error with its name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from headwise.errors import ModelError
from headwise.models.checkpoints.filling import fill, slots


class Small(nn.Module):
    """A tied pair, a buffer that is kept and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 3)
        self.norm = nn.BatchNorm1d(3)
        self.up = nn.Linear(3, 5)
        self.out = nn.Linear(3, 7, bias=False)
        self.out.weight = self.tokens.weight
        with torch.device("cpu"):
            self.register_buffer("angles", torch.arange(3.0), persistent=False)


def skeleton() -> Small:
    with torch.device("meta"):
        return Small()


def given(model: nn.Module, *, leave_out: str = "out.weight") -> dict[str, Callable[[], Tensor]]:
    state = model.state_dict()
    return {name: (lambda t=t: t) for name, t in state.items() if name != leave_out}


def refused(tensors: dict[str, Callable[[], Tensor]]) -> str:
    with pytest.raises(ModelError) as caught:
        fill(skeleton(), tensors, source="m")
    return str(caught.value)


@pytest.mark.parametrize("leave_out", ["out.weight", "tokens.weight"])
def test_everything_arrives_and_ties_stay(leave_out: str) -> None:
    original, model = Small(), skeleton()
    model.up.weight.requires_grad_(False)
    fill(model, given(original, leave_out=leave_out))
    for name, tensor in original.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert model.out.weight is model.tokens.weight
    assert [p.requires_grad for p in (model.up.weight, model.up.bias)] == [False, True]
    assert isinstance(model.up.weight, nn.Parameter)
    assert dict(model.named_buffers()).keys() == dict(original.named_buffers()).keys()


def test_the_dtype_is_kept_or_converted() -> None:
    original = Small().to(torch.float64)
    model = skeleton()
    fill(model, given(original))
    assert model.up.weight.dtype == torch.float64
    fill(model := skeleton(), given(original), dtype=torch.bfloat16)
    assert model.up.weight.dtype == torch.bfloat16
    assert model.norm.num_batches_tracked.dtype == torch.int64


def test_each_tensor_is_read_once() -> None:
    reads = []
    state = Small().state_dict()
    del state["out.weight"]

    def read(name: str) -> Tensor:
        reads.append(name)
        return state[name]

    fill(skeleton(), {name: (lambda name=name: read(name)) for name in state})
    assert sorted(reads) == sorted(state)


def test_parts_of_one_tensor_do_not_share_memory() -> None:
    with torch.device("meta"):
        model = nn.ModuleList([nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False)])
    fused = torch.arange(12.0).view(6, 2)
    fill(model, {"0.weight": lambda: fused[:3], "1.weight": lambda: fused[3:]})
    model.double()
    fused.zero_()
    assert model[1].weight.flatten().tolist() == [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]
    one = torch.ones(3, 2)
    with torch.device("meta"):
        model = nn.ModuleList([nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False)])
    fill(model, {"0.weight": lambda: one, "1.weight": lambda: one})
    assert model[0].weight.data_ptr() != model[1].weight.data_ptr()


def test_what_is_missing_or_left_over_is_named() -> None:
    tensors = given(Small())
    tensors["extra"] = lambda: torch.ones(1)
    del tensors["up.weight"]
    assert refused(tensors) == (
        "m lacks up.weight, and has extra, which the model has no place for; the tensors do not"
        " belong to this architecture, or are incomplete"
    )
    assert refused({}).startswith(
        "m lacks tokens.weight, norm.weight, norm.bias and 5 more; the tensors"
    )


def test_two_tensors_for_one_tied_place() -> None:
    tensors = given(Small(), leave_out="")
    assert "two tensors for one tied tensor: tokens.weight and out.weight" in refused(tensors)


def test_another_shape_or_kind() -> None:
    tensors = given(Small())
    tensors["up.weight"] = lambda: torch.ones(3, 5)
    tensors["up.bias"] = lambda: torch.ones(5, dtype=torch.int64)
    message = refused(tensors)
    assert message.startswith("m does not fit the model: ")
    assert "up.weight (3, 5) for (5, 3)" in message
    assert "up.bias (torch.int64 for torch.float32)" in message


def test_nothing_is_left_without_numbers() -> None:
    model = skeleton()
    model.register_buffer("table", torch.ones(2, device="meta"), persistent=False)
    with pytest.raises(ModelError, match=r"^nothing in m gives a value to table$"):
        fill(model, given(Small()), source="m")


def test_slots_are_the_state_with_ties_once() -> None:
    model = Small()
    names = {name for slot in slots(model) for name in slot.names}
    assert names == set(model.state_dict())
    assert sum(len(slot.names) for slot in slots(model)) == len(slots(model)) + 1
