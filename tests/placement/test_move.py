"""One recursive mover for whatever a batch is made of. The second device is `meta`, which exists everywhere."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from transformers import BatchEncoding, BatchFeature
from transformers.modeling_outputs import CausalLMOutput, CausalLMOutputWithPast

from trimtab.placement import PlacementPlan, move


def tensor() -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3)


def kind(value: Any) -> str:
    return value.device.type


Pair = namedtuple("Pair", ["inputs", "labels"])


class Typed(NamedTuple):
    inputs: Any
    name: str


@dataclass
class Batch:
    inputs: Any
    name: str = "row"
    derived: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.derived = self.inputs + 1


@dataclass(frozen=True)
class Frozen:
    inputs: Any
    nested: Any = None


@dataclass(frozen=True, slots=True)
class Slotted:
    inputs: Any


def test_tensor() -> None:
    assert kind(move(tensor(), "meta")) == "meta"
    assert kind(move(tensor(), torch.device("meta"))) == "meta"


def test_by_plan() -> None:
    plan = PlacementPlan(
        device="meta", precision="fp32", scaler=False, weight_precision="fp32", strategy="single"
    )
    assert kind(move({"x": tensor()}, plan)["x"]) == "meta"


@pytest.mark.parametrize(
    "make", [dict, OrderedDict, UserDict, BatchFeature, BatchEncoding], ids=lambda m: m.__name__
)
def test_mappings_keep_their_type_and_the_input_is_left_alone(make: Any) -> None:
    batch = make({"input_ids": tensor(), "text": ["a", "b"]})
    moved = move(batch, "meta")
    assert type(moved) is make
    assert list(moved) == ["input_ids", "text"]
    assert kind(moved["input_ids"]) == "meta"
    assert moved["text"] == ["a", "b"]
    assert kind(batch["input_ids"]) == "cpu"


def test_defaultdict_keeps_its_factory() -> None:
    batch = defaultdict(list, x=[tensor()])
    moved = move(batch, "meta")
    assert kind(moved["x"][0]) == "meta"
    assert moved["new"] == []
    assert "new" not in batch


def test_read_only_mapping() -> None:
    moved = move(MappingProxyType({"x": tensor()}), "meta")
    assert isinstance(moved, MappingProxyType)
    assert kind(moved["x"]) == "meta"


def test_batch_encoding_keeps_what_it_knows_besides_its_items() -> None:
    batch = BatchEncoding({"input_ids": tensor()}, n_sequences=1)
    moved = move(batch, "meta")
    assert moved.n_sequences == 1
    assert kind(moved.input_ids) == "meta"
    assert kind(batch.input_ids) == "cpu"


def test_model_output_by_key_and_by_attribute() -> None:
    output = CausalLMOutput(logits=tensor(), hidden_states=(tensor(), tensor()))
    moved = move(output, "meta")
    assert type(moved) is CausalLMOutput
    assert kind(moved.logits) == kind(moved["logits"]) == "meta"
    assert [kind(h) for h in moved.hidden_states] == ["meta", "meta"]
    assert moved.loss is None
    assert "loss" not in moved
    assert kind(output.logits) == kind(output["logits"]) == "cpu"


def test_model_output_whose_only_field_is_a_dict() -> None:
    moved = move(CausalLMOutputWithPast(loss=tensor(), past_key_values={"k": tensor()}), "meta")
    assert kind(moved.past_key_values["k"]) == "meta"


def test_list_and_tuple() -> None:
    batch = [tensor(), (tensor(), 3), "text"]
    moved = move(batch, "meta")
    assert kind(moved[0]) == kind(moved[1][0]) == "meta"
    assert type(moved[1]) is tuple
    assert moved[1][1] == 3
    assert moved[2] == "text"
    assert kind(batch[0]) == "cpu"  # type: ignore[arg-type]


def test_named_tuples() -> None:
    moved = move(Pair(tensor(), labels=None), "meta")
    assert type(moved) is Pair
    assert kind(moved.inputs) == "meta"
    assert moved.labels is None
    typed = move(Typed(tensor(), "row"), "meta")
    assert type(typed) is Typed
    assert kind(typed.inputs) == "meta"
    assert typed.name == "row"


def test_what_torch_functions_return() -> None:
    moved = move(tensor().max(dim=0), "meta")
    assert kind(moved.values) == kind(moved.indices) == "meta"
    assert move(tensor().shape, "meta") == torch.Size([2, 3])


def test_dataclasses() -> None:
    batch = Batch(tensor())
    moved = move(batch, "meta")
    assert type(moved) is Batch
    assert kind(moved.inputs) == "meta"
    assert kind(moved.derived) == "meta", "also fields that __init__ does not take"
    assert moved.name == "row"
    assert kind(batch.inputs) == kind(batch.derived) == "cpu"


@pytest.mark.parametrize("make", [Frozen, Slotted])
def test_frozen_dataclasses(make: Any) -> None:
    batch = make(tensor())
    moved = move(batch, "meta")
    assert type(moved) is make
    assert kind(moved.inputs) == "meta"
    assert kind(batch.inputs) == "cpu"


def test_a_field_that_nobody_has_set_stays_unset() -> None:
    @dataclass
    class Later:
        inputs: Any
        labels: Any = field(init=False)

    moved = move(Later(tensor()), "meta")
    assert kind(moved.inputs) == "meta"
    assert not hasattr(moved, "labels")


def test_a_dataclass_type_is_not_a_dataclass() -> None:
    assert move(Frozen, "meta") is Frozen


def test_packed_sequence_keeps_its_batch_sizes_on_the_cpu() -> None:
    packed = pack_sequence([tensor(), tensor()])
    moved = move({"x": packed}, "meta")["x"]
    assert isinstance(moved, PackedSequence)
    assert kind(moved.data) == "meta"
    assert kind(moved.batch_sizes) == "cpu"
    assert kind(packed.data) == "cpu"


def test_nested() -> None:
    batch = {"a": [Frozen(tensor(), nested={"b": (Pair(tensor(), [tensor()]),)})]}
    moved = move(batch, "meta")
    inner = moved["a"][0].nested["b"][0]
    assert kind(inner.inputs) == kind(inner.labels[0]) == "meta"


def test_other_objects_pass_through() -> None:
    array, thing = np.arange(3), object()
    batch = {
        "s": "text",
        "b": b"x",
        "n": None,
        "i": 3,
        "f": 1.5,
        "t": True,
        "np": array,
        "o": thing,
        "set": {1},
    }
    moved = move(batch, "meta")
    assert moved["np"] is array
    assert moved["o"] is thing
    assert {k: v for k, v in moved.items() if k != "np"} == {k: v for k, v in batch.items() if k != "np"}


def test_a_shared_tensor_stays_shared() -> None:
    shared = tensor()
    moved = move({"input_ids": shared, "labels": shared, "other": tensor()}, "meta")
    assert moved["input_ids"] is moved["labels"]
    assert moved["other"] is not moved["labels"]


def test_values_and_types_survive() -> None:
    batch = {"x": torch.tensor([1, 2], dtype=torch.int16), "flags": torch.tensor([True, False])}
    moved = move(batch, "cpu")
    assert moved["x"].dtype == torch.int16
    assert moved["x"].tolist() == [1, 2]
    assert moved["flags"].tolist() == [True, False]


def test_gradients_flow_through() -> None:
    source = torch.ones(2, requires_grad=True)
    move([source * 2], "cpu")[0].sum().backward()
    assert source.grad is not None
    assert source.grad.tolist() == [2.0, 2.0]
