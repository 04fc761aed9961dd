"""After the first backward: which adapted modules got gradients, and what lacks one, by name and with its reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from tiny_models import batch, skeleton
from trimtab.config.schema import LoraSettings
from trimtab.models.adapters import add_lora
from trimtab.placement import (
    PlacementFault,
    PlacementGuard,
    PlacementPlan,
    profile_model,
    trainer_options,
    verify,
    verify_gradients,
)
from trimtab.placement.apply import checkpoint_plainly
from trimtab.placement.arrival import PICTURES, look
from trimtab.placement.gradients import adapter_flows
from trimtab.placement.witness import Witness

PLAN = PlacementPlan(device="cpu", precision="fp32", scaler=False, weight_precision="fp32", strategy="single")
FAMILIES = ["llava_onevision", "qwen2_5_vl", "idefics3"]
EVERYWHERE = ["vision", "connector", "all-linear"]
TOWER = {
    "llava_onevision": "model.vision_tower",
    "qwen2_5_vl": "model.visual",
    "idefics3": "model.vision_model",
}
CONNECTOR = {"llava_onevision": "model.multi_modal_projector", "idefics3": "model.connector"}


def adapted(model_type: str, targets: list[str] = EVERYWHERE) -> Any:
    torch.manual_seed(0)
    return add_lora(skeleton(model_type, "cpu"), LoraSettings(r=2, targets=targets))


def words(model_type: str) -> dict[str, Any]:
    """A batch of nothing but text."""
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    return text | (
        {"mm_token_type_ids": torch.zeros_like(ids).int()} if model_type.startswith("qwen") else {}
    )


def train(
    model: Any,
    batches: list[dict[str, Any]],
    folder: Path,
    *callbacks: TrainerCallback,
    **changes: Any,
) -> tuple[PlacementGuard, list[str]]:
    """A real Trainer, with the guard, over these batches in this order."""
    said: list[str] = []
    guard = PlacementGuard(PLAN, said.append)
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 1,
        "max_steps": len(batches),
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "gradient_checkpointing": True,
        "remove_unused_columns": False,
        "train_sampling_strategy": "sequential",
        **trainer_options(PLAN),
    }
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**(settings | changes)),
        train_dataset=[{"batch": one} for one in batches],  # type: ignore[arg-type]
        data_collator=lambda rows: rows[0]["batch"],
        callbacks=[guard, *callbacks],
    )
    trainer.train()
    return guard, said


def fault_of(model: Any, model_type: str, folder: Path, *callbacks: TrainerCallback, **changes: Any) -> str:
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    with pytest.raises(PlacementFault) as error:
        train(model, [batch(model_type)] * 2, folder, *callbacks, **changes)
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items()), "no step was made"
    return str(error.value)


class Norms(TrainerCallback):
    """Keeps the gradient of every adapter's tensor, step by step, by its own means."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_pre_optimizer_step(self, *_: Any, **kwargs: Any) -> None:
        named = kwargs["model"].named_parameters()
        self.steps.append({n: float(p.grad.abs().max()) for n, p in named if p.requires_grad})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_adapted_module_gets_a_gradient(model_type: str, tmp_path: Path) -> None:
    model, norms = adapted(model_type), Norms()
    guard, said = train(model, [batch(model_type)] * 3, tmp_path, norms)
    first, second = norms.steps[0], norms.steps[1]
    assert all(value > 0 for name, value in first.items() if "lora_B" in name)
    assert not any(value for name, value in first.items() if "lora_A" in name), "B is zero, by design"
    assert all(value > 0 for value in second.values())

    connector = {"llava_onevision": 2, "qwen2_5_vl": 2, "idefics3": 1}[model_type]
    tower = {"qwen2_5_vl": 15}.get(model_type, 18)
    table = [line.split(", gradient norm")[0].split() for line in guard.table]
    assert [" ".join(line) for line in table if line[0] == "vision"] == [
        f"vision tower layers 0-2 {tower} of {tower} adapted modules"
    ]
    assert f"connector {connector} of {connector} adapted modules" in [" ".join(line) for line in table]
    assert "language model layers 0-3 28 of 28 adapted modules" in [" ".join(line) for line in table]
    assert len(table) == 3
    assert all(f"  {line}" in said for line in guard.table)
    modules = tower + connector + 28
    assert said[-1] == (
        f"✓ gradients later: {modules} low-rank factors (lora_A, while lora_B is zero) arrived, step 2"
    )
    hooks = [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    assert not any("witness" in str(h) for h in hooks), "nothing is left on the model"


def test_norms_in_the_table_are_those_of_the_gradients() -> None:
    model = adapted("idefics3")
    model(**batch("idefics3")).loss.backward()
    bare = model.get_base_model()
    for flow in adapter_flows(model):
        gradient = bare.get_parameter(flow.name).grad
        assert gradient is not None
        assert flow.norm == pytest.approx(float(gradient.norm()), rel=1e-5)
        assert flow.idle == ("lora_A" in flow.name)


def test_gradients_so_small_that_their_squares_vanish_are_none_that_are_zero() -> None:
    model = adapted("idefics3")
    model(**batch("idefics3")).loss.backward()
    for name, parameter in model.named_parameters():
        if "lora_B" in name and parameter.grad is not None:
            parameter.grad.fill_(1e-30)
    assert all(flow.norm for flow in adapter_flows(model) if not flow.idle)


def test_a_learning_rate_that_starts_at_zero_is_waited_for(tmp_path: Path) -> None:
    """Warm-up makes a first step of length zero: lora_B stays zero, and lora_A's gradient with it."""
    _, said = train(
        adapted("idefics3"),
        [batch("idefics3")] * 4,
        tmp_path,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2,
    )
    assert said[-1].endswith("arrived, step 3")


# ---- faulty models


def without_gradients(tower: nn.Module) -> None:
    """As LLaVA's CLIP tower has it: @torch.no_grad() around the forward."""
    tower.forward = torch.no_grad()(tower.forward)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_tower_under_no_grad(model_type: str, tmp_path: Path) -> None:
    model, name = adapted(model_type), TOWER[model_type]
    without_gradients(model.get_base_model().get_submodule(name))
    said = fault_of(model, model_type, tmp_path)
    assert f"it ran under torch.no_grad(), switched off in the forward of {name} (" in said
    assert f"{name}." in said.split("trainable tensors got none: ")[1].split(",")[0]


class Detached(nn.Module):
    """A connector behind a cut."""

    def __init__(self, inner: nn.Module, copies: bool) -> None:
        super().__init__()
        self.inner, self.copies = inner, copies

    def forward(self, features: Any, *args: Any, **kwargs: Any) -> Any:
        cut = features.detach()
        return self.inner(cut.clone() if self.copies else cut, *args, **kwargs)


@pytest.mark.parametrize("copies", [False, True], ids=["a view", "a copy"])
@pytest.mark.parametrize("model_type", ["llava_onevision", "idefics3"])
def test_a_detached_connector_input(model_type: str, copies: bool, tmp_path: Path) -> None:
    model, name = adapted(model_type), CONNECTOR[model_type]
    bare = model.get_base_model()
    connector = bare.get_submodule(name)
    outer, _, last = name.rpartition(".")
    setattr(bare.get_submodule(outer), last, Detached(connector, copies))
    said = fault_of(model, model_type, tmp_path)
    assert TOWER[model_type] in said.split("trainable tensors got none: ")[1].split(",")[0]
    assert f"{name}.inner" in said
    assert "detached" in said
    assert f"{name}.inner.linear" not in said.splitlines()[1], "the connector itself learns"
    if not copies:
        assert f"detached between {TOWER[model_type]}" in said


@pytest.mark.parametrize("model_type", FAMILIES)
def test_re_entrant_checkpointing_in_the_tower(model_type: str, tmp_path: Path) -> None:
    model = adapted(model_type)
    bare = model.get_base_model()
    bare.get_submodule(TOWER[model_type]).gradient_checkpointing_enable({"use_reentrant": True})
    # What transformers puts on every embedding hides the fault; a model of one's own has no such thing.
    for tower in (m for m in bare.modules() if hasattr(m, "_require_grads_hooks")):
        tower.disable_input_require_grads()
    said = fault_of(model, model_type, tmp_path, gradient_checkpointing=False)
    assert "re-entrant checkpointing (modeling_layers.py:" in said
    assert "use_reentrant=False" in said
    assert TOWER[model_type] in said.split("trainable tensors got none: ")[1].split(",")[0]


class OwnCheckpoints(nn.Module):
    """A tower's layers with a checkpoint of their own, whatever the trainer says."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(lambda h: self.inner(h, *args, **kwargs), hidden, use_reentrant=True)


def test_a_model_that_checkpoints_re_entrantly_by_itself(tmp_path: Path) -> None:
    model = adapted("idefics3")
    layers = model.get_base_model().model.vision_model.encoder.layers
    layers[0] = OwnCheckpoints(layers[0])
    said = fault_of(model, "idefics3", tmp_path, gradient_checkpointing=False)
    assert "re-entrant checkpointing (test_gradient_table.py:" in said
    assert "12 of " in said, "two factors of six modules in one layer"


def test_what_a_model_switched_on_by_itself_is_set_right(tmp_path: Path) -> None:
    model = adapted("idefics3")
    bare = model.get_base_model()
    bare.model.vision_model.gradient_checkpointing_enable({"use_reentrant": True})
    changed = checkpoint_plainly(model)
    assert len([name for name in changed if ".vision_model.encoder.layers." in name]) == 3
    assert not checkpoint_plainly(model)
    for tower in (m for m in bare.modules() if hasattr(m, "_require_grads_hooks")):
        tower.disable_input_require_grads()
    guard, _ = train(model, [batch("idefics3")], tmp_path, gradient_checkpointing=False)
    assert "18 of 18 adapted modules" in guard.table[0]


def test_a_tower_whose_last_layer_is_not_used(tmp_path: Path) -> None:
    """LLaVA takes its features from the layer before the last: the role leaves that out, a range may ask for it."""
    torch.manual_seed(0)
    model = skeleton("llava_onevision", "cpu", vision_feature_layer=-2)
    tuned = add_lora(model, LoraSettings(r=2, targets=["vision:0-2"]))
    said = fault_of(tuned, "llava_onevision", tmp_path)
    assert "12 of 36 trainable tensors got none" in said
    assert (
        "the layers of model.vision_tower.encoder.layers behind 1: the model takes its features from there"
        in said
    )
    assert "lora.targets ROLE:0-1" in said
    model = skeleton("llava_onevision", "cpu", vision_feature_layer=-2)
    tuned = add_lora(model, LoraSettings(r=2, targets=["vision"]))
    guard, _ = train(tuned, [batch("llava_onevision")], tmp_path)
    assert len(guard.table) == 1
    assert guard.table[0].startswith("vision tower  layers 0-1  12 of 12 adapted modules")


class Branch(nn.Module):
    """A layer with a second way through it, which nothing takes."""

    def __init__(self) -> None:
        super().__init__()
        self.extra_proj = nn.Linear(32, 32)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_an_unused_adapted_branch(model_type: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = skeleton(model_type, "cpu")
    model.model.second_view = Branch()
    tuned = add_lora(model, LoraSettings(r=2, targets=["vision", "extra_proj", "attention"]))
    said = fault_of(tuned, model_type, tmp_path)
    assert "2 of " in said
    assert (
        "model.second_view.extra_proj: model.second_view never ran in this step: an unused branch or view"
        in said
    )


def test_an_output_that_is_dropped(tmp_path: Path) -> None:
    """The branch runs, and nobody takes what it gives."""

    class Dropped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.branch = inner, Branch()

        def forward(self, features: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.branch.extra_proj(features.new_ones(1, 32))
            return self.inner(features, *args, **kwargs)

    model = skeleton("llava_onevision", "cpu")
    model.model.multi_modal_projector = Dropped(model.model.multi_modal_projector)
    tuned = add_lora(model, LoraSettings(r=2, targets=["extra_proj", "attention"]))
    said = fault_of(tuned, "llava_onevision", tmp_path)
    assert "no gradient comes back to model.multi_modal_projector.branch.extra_proj" in said
    assert "in the forward of model.multi_modal_projector its output is" in said


def test_a_factor_of_zero_behind_a_module(tmp_path: Path) -> None:
    model = adapted("idefics3")
    connector = model.get_base_model().model.connector
    connector.register_forward_hook(lambda module, inputs, output: output * 0.0)
    said = fault_of(model, "idefics3", tmp_path)
    assert "adapted modules is exactly zero: model.vision_model.encoder.layers.0" in said
    assert "look for a factor of 0 or a mask behind it" in said


@pytest.mark.parametrize("model_type", FAMILIES)
def test_adapters_that_are_frozen_after_they_were_added(model_type: str, tmp_path: Path) -> None:
    model, name = adapted(model_type), TOWER[model_type]
    model.get_base_model().get_submodule(name).requires_grad_(False)
    said = fault_of(model, model_type, tmp_path)
    assert "were frozen after their adapters were added (requires_grad is False)" in said
    assert f"{name}." in said
    with pytest.raises(PlacementFault, match="adapted modules were frozen after their adapters were added"):
        verify(model, PLAN)


def test_an_adapter_that_was_trained_may_be_frozen(tmp_path: Path) -> None:
    """Training goes on in the language model; the tower's adapters stay as they are."""
    model = adapted("idefics3")
    for name, parameter in model.named_parameters():
        if "vision_model" in name and "lora_B" in name:
            nn.init.normal_(parameter)
        if "vision_model" in name:
            parameter.requires_grad_(False)
    guard, _ = train(model, [batch("idefics3")], tmp_path)
    assert "0 of 18 adapted modules" in guard.table[0]


@pytest.mark.parametrize("frozen", [True, False])
def test_requires_grad_that_changes_after_wrapping(frozen: bool, tmp_path: Path) -> None:
    class Flip(TrainerCallback):
        def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
            layer = kwargs["model"].get_base_model().model.vision_model.encoder.layers[2].self_attn.v_proj
            (layer.lora_B if frozen else layer.base_layer).requires_grad_(not frozen)

    said = fault_of(adapted("idefics3"), "idefics3", tmp_path, Flip())
    what = "lora_B.default.weight is now frozen" if frozen else "base_layer.weight is now trained"
    assert f"encoder.layers.2.self_attn.v_proj.{what}" in said
    assert "after training began" in said


# ---- what is no fault


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_batch_without_pictures_is_no_fault(model_type: str, tmp_path: Path) -> None:
    text, picture = words(model_type), batch(model_type)
    guard, said = train(adapted(model_type), [text, text, picture, picture, picture], tmp_path)
    arrive = next(check.detail for check in guard.checks if check.name == "gradients arrive")
    assert arrive.endswith(f"modules wait for {PICTURES}")
    assert said[-1].startswith("✓ gradients later: ")
    assert said[-1].endswith("arrived, step 4"), "lora_B in the third step, lora_A in the fourth"


def test_pictures_that_come_later_and_find_a_cut(tmp_path: Path) -> None:
    model = adapted("idefics3")
    without_gradients(model.get_base_model().get_submodule(TOWER["idefics3"]))
    with pytest.raises(
        PlacementFault, match=r"it ran under torch\.no_grad\(\), switched off in the forward of"
    ):
        train(model, [words("idefics3"), batch("idefics3")], tmp_path)


def test_a_run_without_any_picture_is_told_at_its_end(tmp_path: Path) -> None:
    guard, said = train(adapted("idefics3"), [words("idefics3")] * 2, tmp_path)
    assert guard.checks[-1].ok is None
    assert said[-1].startswith("! gradients later: after 2 steps not seen yet: ")
    assert PICTURES in said[-1]


def test_a_tower_that_takes_part_without_a_picture(tmp_path: Path) -> None:
    """What keeps ranks in step gives the tower a gradient of zeros in a batch of text."""
    model = adapted("idefics3")
    bare, spare = model.get_base_model(), batch("idefics3")["pixel_values"]
    real = bare.forward

    def with_part(*args: Any, **kwargs: Any) -> Any:
        out = real(*args, **kwargs)
        if "pixel_values" not in kwargs:
            part = bare.model.get_image_features(spare).pooler_output[0].sum() * 0.0
            out["loss"] = out["loss"] + part
        return out

    bare.forward = with_part
    _, said = train(model, [words("idefics3"), batch("idefics3"), batch("idefics3")], tmp_path)
    assert any(f"wait for {PICTURES}" in line for line in said)
    assert said[-1].endswith("arrived, step 3")


def test_a_loss_that_pulls_at_nothing_is_waited_for(tmp_path: Path) -> None:
    """As in reinforcement learning, where all rewards of the first step are equal."""

    class NoPull(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            return loss * 0.0 if self.state.global_step == 0 else loss

    said: list[str] = []
    settings = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        remove_unused_columns=False,
    )
    NoPull(
        model=adapted("idefics3"),
        args=settings,
        train_dataset=[{"batch": batch("idefics3")}] * 8,  # type: ignore[arg-type]
        data_collator=lambda rows: rows[0]["batch"],
        callbacks=[PlacementGuard(PLAN, said.append)],
    ).train()
    first = next(line for line in said if "gradients arrive" in line)
    assert first.startswith("! gradients arrive"), "zero gradients are no proof"
    assert "every one is exactly zero" in first
    assert "wait for a step whose loss has a gradient at all" in first
    assert said[-1].endswith("arrived, step 3")


class Experts(nn.Module):
    """Two experts in a list, as remote code has them; which of them runs is told from outside."""

    chosen = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.experts[self.chosen](hidden)


def test_an_expert_that_no_token_went_to_is_waited_for(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=1, vocab_size=64))
    for layer in model.model.layers:
        layer.mlp = Experts(16)

    class Route(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            Experts.chosen = state.global_step % 2

    tuned = add_lora(model, LoraSettings(r=2, targets=["attention", "experts"]))
    assert profile_model(tuned).routed, "so that DDP looks for what a step leaves out"
    row = {"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([[1, 2, 3]])}
    _, said = train(tuned, [row] * 2, tmp_path, Route())
    assert any("2 modules wait for a token for each expert" in line for line in said)


# ---- without a guard


def test_a_loop_of_ones_own_gets_the_reason_from_a_witness() -> None:
    model = adapted("idefics3")
    bare = model.get_base_model()
    without_gradients(bare.get_submodule(TOWER["idefics3"]))
    witness = Witness(bare)
    model.train()
    model(**batch("idefics3")).loss.backward()
    with pytest.raises(PlacementFault, match=r"it ran under torch\.no_grad\(\)"):
        verify_gradients(model, witness=witness)
    with pytest.raises(PlacementFault, match="a detached input, an unused branch, re-entrant checkpointing"):
        verify_gradients(model)
    witness.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in bare.modules())


def test_evaluation_before_the_first_step_is_not_taken_for_training() -> None:
    model = adapted("idefics3")
    witness = Witness(model.get_base_model())
    with torch.no_grad():
        model.eval()(**batch("idefics3"))
        model.train()(**batch("idefics3"))
    assert not witness.seen
    model(**batch("idefics3")).loss.backward()
    found = look(model, witness=witness)
    assert not found.waiting
    assert found.idle == 18 + 1 + 28


class TwoResults(torch.autograd.Function):
    """Hands on nothing for a result that no gradient came to, as compiled layers do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        return None if first is None else first * 2


class Beside(nn.Module):
    """Two adapted layers, of which the loss needs the first."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.left = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return TwoResults.apply(self.used(x) + self.left(x))  # type: ignore[no-untyped-call]


def test_a_result_that_no_gradient_comes_to_is_not_taken_for_answered() -> None:
    model = nn.Sequential(Beside()).train()
    witness = Witness(model)
    used, left = model(torch.ones(2, 4))
    used.sum().backward(retain_graph=True)
    assert witness.seen["0"].answered
    again = nn.Sequential(Beside()).train()
    other = Witness(again)
    again(torch.ones(2, 4))
    assert not other.seen["0"].answered
    left.sum().backward()  # nothing at all comes back: no hook may fail on it


def test_the_pass_is_the_same_with_a_witness() -> None:
    def gradients(watch: Callable[[Any], Any]) -> list[torch.Tensor]:
        model = adapted("qwen2_5_vl")
        watch(model.get_base_model())
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()(**batch("qwen2_5_vl")).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain, watched = gradients(lambda model: None), gradients(Witness)
    assert len(plain) == len(watched)
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))
