"""Steps that are executed by shapes alone in a process beside this one: what they count, and how they fail."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trimtab.config import load_request
from trimtab.config.schema import Config
from trimtab.errors import RequestError
from trimtab.hardware.catalogue import accelerators
from trimtab.launches import Work
from trimtab.recipes.planning import Known, know_model, machine_with, resolve_for
from trimtab.recipes.trial_server import Answer
from trimtab.recipes.trial_step import Executed, Trial
from trimtab.recipes.trials import Trials

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
}
LAYER = 256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 512 + 2 * 256
"""Numbers in a layer, by hand: queries and output, keys and values, gate, up and down, two norms."""
WHOLE = 2 * 4096 * 256 + 4 * LAYER + 256
R = 8
ADAPTER = 4 * R * (2 * (256 + 256) + 2 * (256 + 128) + 3 * (256 + 512))
"""Numbers of the adapters on all seven products of four layers."""


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    with Trials() as made:
        made.begin()
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with a config and nothing else: no weights, no tokenizer."""
    path = tmp_path_factory.mktemp("model")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SHAPE}
    (path / "config.json").write_text(json.dumps(config))
    return path


def config_of(folder: Path, *words: str) -> Config:
    given = (
        *(f"model={folder}", "data.source=/nowhere.jsonl", f"lora.r={R}", "device=cuda"),
        *(
            "data.max_length=512",
            "training.batch_size=2",
            "speed.compile=false",
            "speed.kernels=plain",
            *words,
        ),
    )
    return load_request(None, list(given)).config


def made(trials: Trials, config: Config, gpus: str = "H200", counts: bool = False) -> Answer:
    known: Known = know_model(config)
    plan = resolve_for(config, machine_with(gpus), known)
    return trials.make(Trial(config=config, plan=plan, gpus=accelerators(gpus), counts=counts))


_EXECUTED: dict[tuple[str, str, bool], Executed] = {}
"""Steps that several tests look at are executed once."""


def executed(trials: Trials, config: Config, gpus: str = "H200", counts: bool = False) -> Executed:
    asked = config.model_dump_json(), gpus, counts
    if asked not in _EXECUTED:
        answer = made(trials, config, gpus, counts)
        assert answer.executed is not None, answer.failed + answer.trace
        _EXECUTED[asked] = answer.executed
    return _EXECUTED[asked]


def near(found: int, counted: int, share: float = 0.01) -> bool:
    return abs(found - counted) <= share * counted


def test_weights_and_moments_are_those_counted_by_hand(trials: Trials, folder: Path) -> None:
    done = executed(trials, config_of(folder))
    held = done.memory["cuda:0"]
    # Frozen numbers in bf16, adapters in fp32. Buffers are a few numbers more.
    assert near(held.kinds["weights"], 2 * WHOLE + 4 * ADAPTER)
    # Two moments of each number, and of each of 56 tensors a count of its steps, for which CUDA gives out 512 bytes.
    assert held.kinds["optimizer"] == 2 * 4 * ADAPTER + 56 * 512
    assert held.peak == sum(held.kinds.values())
    assert held.reserved >= held.peak
    assert held.context > 0
    assert done.rows == "2 rows of 512 tokens"
    assert not done.work  # nobody asked for it


def flops(work: Work) -> float:
    return sum(launch.flops * number for launch, number in work.items())


def moved(work: Work) -> float:
    return sum(launch.nbytes * number for launch, number in work.items())


def test_a_steps_kernels_are_counted_by_what_was_executed(trials: Trials, folder: Path) -> None:
    def of(*words: str) -> Executed:
        return executed(trials, config_of(folder, *words), counts=True)

    plain = of()
    tokens = 2 * 512
    # A token takes four operations for each frozen number of layers and head, and six for each of the adapters. A pair
    # of tokens, of which there are half, takes two products of all heads forward and five backward, in each layer.
    numbers = tokens * (4 * (4 * (LAYER - 512) + 4096 * 256) + 6 * ADAPTER)
    attention = 4 * 7 * 2 * 256 * (2 * 512 * 512 // 2)
    assert near(int(flops(plain.work["pass"])), numbers + attention, 0.02)
    assert {launch.by for launch in plain.work["pass"]} == {"eager"}
    # The update computes no product, and reads and writes weights, gradients and two moments.
    assert flops(plain.work["update"]) == 0
    assert moved(plain.work["update"]) >= 7 * 4 * ADAPTER
    # What is computed again is counted: half as much where weights are frozen.
    again = flops(of("training.gradient_checkpointing=true").work["pass"])
    assert 1.3 * flops(plain.work["pass"]) < again < 1.6 * flops(plain.work["pass"])
    # Two of the accumulated passes are executed, and counted.
    often = of("training.gradient_accumulation_steps=16")
    assert often.passes == 2
    assert near(int(flops(often.work["pass"])), int(2 * flops(plain.work["pass"])))


def test_compiled_layers_launch_what_their_graphs_come_down_to(trials: Trials, folder: Path) -> None:
    plain = executed(trials, config_of(folder), counts=True).work["pass"]
    fused = executed(trials, config_of(folder, "speed.compile=true"), counts=True).work["pass"]
    assert near(int(flops(fused)), int(flops(plain)), 0.02)
    assert {launch.by for launch in fused} == {"eager", "compiled", "entry"}
    assert sum(fused.values()) < sum(plain.values()) / 1.5
    assert moved(fused) < moved(plain) / 1.5


def test_every_token_of_a_generation_is_counted(trials: Trials, folder: Path) -> None:
    def generating(tokens: int, *more: str) -> Work:
        words = (
            f"model={folder}",
            "data.source=/nowhere.jsonl",
            "recipe=grpo",
            "grpo.rewards=[length]",
            "device=cuda",
        )
        sizes = ("data.max_length=512", "training.batch_size=8", f"grpo.max_completion_length={tokens}")
        config = load_request(
            None, [*words, *sizes, *more, "grpo.num_generations=8", "speed.compile=false"]
        ).config
        return executed(trials, config, counts=True).work["generate"]

    short, long = generating(24), generating(48)
    # Twice as many passes over a single token, each of which reads all weights; the prompt is read once.
    assert near(int(sum(long.values())), int(2 * sum(short.values())), 0.05)
    assert moved(long) - moved(short) > 24 * 2 * (WHOLE - 4096 * 256)
    # A prompt that is one token, or is read in pieces of which the last is one, is no token that was generated.
    for prompt in (1, 19):
        told = generating(24, f"grpo.max_prompt_length={prompt}")
        assert near(int(sum(told.values())), int(sum(short.values())), 0.05)


def test_a_captured_pass_is_counted_at_each_replay(trials: Trials, folder: Path) -> None:
    words = (
        f"model={folder}",
        "data.source=/nowhere.jsonl",
        "recipe=zeroth_order",
        "method=full",
        "device=cuda",
    )
    asked = ("zeroth.method=mezo", "zeroth.template={text} It was", "zeroth.labels={0: ' bad', 1: ' good'}")
    config = load_request(None, [*words, *asked, "data.max_length=64", "training.batch_size=4"]).config
    work = executed(trials, config, counts=True).work["pass"]
    assert "graph" in {launch.by for launch in work}
    # Two lanes forward, the head at the answers alone; attention is small.
    assert near(int(flops(work)), 2 * 4 * 64 * 2 * 4 * (LAYER - 512), 0.15)


def test_activations_grow_with_the_rows_and_shrink_with_checkpointing(trials: Trials, folder: Path) -> None:
    def activations(*words: str) -> int:
        kinds = executed(trials, config_of(folder, *words)).memory["cuda:0"].kinds
        return kinds["activations"]

    two, four = activations(), activations("training.batch_size=4")
    assert near(four, 2 * two, 0.03)
    # At least the input of every layer in bf16.
    assert two > 4 * 2 * 512 * 256 * 2
    assert activations("training.gradient_checkpointing=true") < two / 2


def test_accumulated_gradients_lie_beside_the_activations(trials: Trials, folder: Path) -> None:
    once = executed(trials, config_of(folder)).memory["cuda:0"]
    often = executed(trials, config_of(folder, "training.gradient_accumulation_steps=16")).memory["cuda:0"]
    assert near(often.peak - once.peak, 4 * ADAPTER, 0.1)


def test_rows_that_are_grouped_by_length_are_executed(trials: Trials, folder: Path) -> None:
    grouped = executed(trials, config_of(folder, "training.group_by_length=true")).memory["cuda:0"]
    assert grouped.peak == executed(trials, config_of(folder)).memory["cuda:0"].peak


def test_every_strategy_is_executed(trials: Trials, folder: Path) -> None:
    single = executed(trials, config_of(folder)).memory["cuda:0"].kinds["weights"]
    copies = executed(trials, config_of(folder), "2xH200").memory
    assert copies["cuda:0"] == copies["cuda:1"]
    assert near(copies["cuda:0"].kinds["weights"], single)
    sharded = executed(trials, config_of(folder, "sharding=true"), "2xH200").memory["cuda:0"].kinds["weights"]
    # Half of them, and a table that is gathered where the peak is.
    assert near(sharded, single / 2 + 2 * 4096 * 256, 0.05)
    split = executed(trials, config_of(folder, "model_parallel=true"), "2xH200").memory
    assert near(sum(held.kinds["weights"] for held in split.values()), single)
    assert min(held.kinds["weights"] for held in split.values()) > LAYER


def test_packed_weights_of_a_split_lie_nowhere_unpacked(trials: Trials, tmp_path: Path) -> None:
    """As they are read: each matrix is packed on its own GPU, which never holds all of them as they were."""
    wide = {"hidden_size": 2048, "intermediate_size": 8192}
    shape = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SHAPE, **wide}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    words = ("data.max_length=16", "training.batch_size=1", "model_parallel=true")
    plain = executed(trials, config_of(tmp_path, *words), "2xH200").memory
    packed = executed(trials, config_of(tmp_path, *words, "model.quantize=nf4"), "2xH200").memory
    assert packed.keys() == plain.keys()
    assert sum(held.peak for held in packed.values()) < sum(held.kinds["weights"] for held in plain.values())


def test_all_weights_are_tuned_in_fp32(trials: Trials, folder: Path) -> None:
    held = executed(trials, config_of(folder, "method=full")).memory["cuda:0"]
    assert near(held.kinds["weights"], 4 * WHOLE)
    assert near(held.kinds["optimizer"], 8 * WHOLE)


def test_steps_without_gradients_are_executed_too(trials: Trials, folder: Path) -> None:
    words = [
        "recipe=zeroth_order",
        f"model={folder}",
        "zeroth.task=sst2",
        "device=cuda",
        "data.max_length=128",
    ]
    held = executed(trials, load_request(None, words).config).memory["cuda:0"]
    assert near(held.kinds["weights"], 2 * WHOLE, 0.2)
    assert not held.kinds.get("optimizer")


def test_a_trial_that_fails_says_why_and_the_next_one_is_made(trials: Trials, folder: Path) -> None:
    config = config_of(folder)
    other = config.model_copy(update={"lora": config.lora.model_copy(update={"targets": ["no_such_layer"]})})
    plan = resolve_for(config, machine_with("H200"), know_model(config))
    answer = trials.make(Trial(config=other, plan=plan, gpus=accelerators("H200")))
    assert answer.executed is None
    assert "no_such_layer" in answer.failed
    assert made(trials, config).executed is not None


def test_the_process_looks_at_the_model_as_this_one_does(trials: Trials, folder: Path) -> None:
    config = config_of(folder)
    assert trials.know(config) == know_model(config)
    other = config.model_copy(update={"model": config.model.model_copy(update={"name": "/nowhere"})})
    with pytest.raises(RequestError, match="no such folder"):
        trials.know(other)
    with Trials() as own:
        own.begin()
        process: Any = own._process
        process.kill()
        assert own.know(config) == know_model(config)


def test_a_process_that_dies_is_told(trials: Trials, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(folder)
    plan = resolve_for(config, machine_with("H200"), know_model(config))
    trial = Trial(config=config, plan=plan, gpus=accelerators("H200"))
    with Trials() as own:
        own.begin()
        process: Any = own._process
        process.kill()
        assert "the process that executes steps ended" in own.make(trial).failed


def rewarded(folder: Path, *words: str) -> Config:
    given = ["recipe=grpo", f"model={folder}", "data.source=/nowhere.jsonl", "grpo.rewards=[length]"]
    given += [
        "grpo.num_generations=2",
        "grpo.max_completion_length=256",
        "data.max_length=384",
        "device=cuda",
    ]
    return load_request(
        None, [*given, "training.batch_size=2", "speed.compile=false", "speed.kernels=plain", *words]
    ).config


@pytest.mark.slow
def test_steps_that_learn_from_rewards_are_executed_with_what_they_generate(
    trials: Trials, folder: Path
) -> None:
    once = executed(trials, rewarded(folder))
    assert once.rows == "2 completions of 256 tokens to prompts of 128"
    held = once.memory["cuda:0"]
    # The input of every layer for all tokens of both rows, prompts and completions.
    assert held.kinds["activations"] > 4 * 2 * 384 * 256 * 2
    # Keys and values of all rows of a step lie there at once, before the first pass over any of them.
    words = (
        "training.gradient_accumulation_steps=48",
        "grpo.max_completion_length=512",
        "data.max_length=640",
    )
    each = 2 * 2 * 4 * 128 * 640
    """Bytes of a row's keys and values in bf16: four layers, 128 numbers each, 640 tokens."""
    often = executed(trials, rewarded(folder, *words)).memory["cuda:0"]
    assert near(often.kinds["cache"], 96 * each, 0.02)


def test_what_vllm_generates_is_not_executed(trials: Trials, folder: Path) -> None:
    config = rewarded(folder)
    config.grpo.use_vllm = True
    answer = made(trials, config)
    assert answer.executed is None
    assert "vLLM generates" in answer.failed


def test_what_is_under_way_ends_with_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In the place of Python: a process that has begun another, as the server does for each trial.
    program = tmp_path / "server"
    program.write_text(
        f"#!/bin/sh\nsleep 600 &\necho $! > {tmp_path}/begun\nmv {tmp_path}/begun {tmp_path}/fork\nwait\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    trials = Trials()
    trials.begin()
    fork = tmp_path / "fork"
    while not fork.exists():
        time.sleep(0.01)
    trials.end()
    state = Path("/proc") / fork.read_text().strip() / "stat"
    for _ in range(1000):
        # Who has ended is there until its new parent looks.
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.01)
    raise AssertionError("what it began is still there")


def test_a_built_in_model_is_made_before_the_gpus_are_virtual(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is known of it may be kept from before, and its folder gone."""
    from trimtab.models import load
    from trimtab.recipes import trial_step
    from trimtab.virtual import state

    class Begun(Exception):
        pass

    def make() -> Path:
        raise Begun(state.machine())

    config = config_of(folder)
    plan = resolve_for(config, machine_with("H200"), know_model(config))
    monkeypatch.setitem(load.BUILT_IN, "smollm2", make)
    config.model.name = "smollm2"
    with pytest.raises(Begun, match="None"):
        trial_step.execute(Trial(config=config, plan=plan, gpus=accelerators("H200")))
