"""Shapes only: what keeps its values, what has none, what is answered when one is asked for, and the memory."""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file, save_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from trimtab import hollow
from trimtab.virtual import faults, host_values
from trimtab.virtual.context import virtual_gpus
from trimtab.virtual.state import Machine, NotSimulated
from trimtab.virtual.unknown import forget, is_unknown


@pytest.fixture
def machine() -> Iterator[Machine]:
    with virtual_gpus(2, shapes=True) as made:
        yield made


def told(machine: Machine) -> set[tuple[str, str]]:
    """How and by what values were asked for so far."""
    return {(asked.how, asked.op) for asked in machine.asked}


def big() -> torch.Tensor:
    return torch.randn(512, 1024, device="cuda")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attention(self.norm(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2)
        return x + self.mlp(x)


def test_numbers_are_counted_in_as_many_bins_as_are_asked_for(machine: Machine) -> None:
    chosen = big().topk(4, dim=-1).indices
    assert torch.bincount(chosen.reshape(-1), minlength=1024).shape == (1024,)
    assert ("shape", "aten::bincount") in told(machine)
    with pytest.raises(NotSimulated, match="bincount"):
        torch.bincount(chosen.reshape(-1))


def train(*, shapes: bool, optimizer: Any, checkpointing: bool, scaler: bool) -> tuple[int, int]:
    """Two steps of a small transformer in mixed precision; peak and what is left, in bytes."""
    torch.manual_seed(0)
    with virtual_gpus(1, shapes=shapes) as machine:
        embed, head = nn.Embedding(1000, 256).cuda(), nn.Linear(256, 1000).cuda()
        blocks = nn.ModuleList(Block(256) for _ in range(2)).to("cuda")
        trained = [*embed.parameters(), *blocks.parameters(), *head.parameters()]
        steps = optimizer(trained)
        scale = torch.amp.GradScaler("cuda", enabled=scaler)
        for _ in range(2):
            ids = torch.randint(0, 1000, (4, 72)).cuda()
            with torch.autocast("cuda", torch.float16 if scaler else torch.bfloat16):
                x = embed(ids)
                for block in blocks:
                    x = checkpoint(block, x, use_reentrant=False) if checkpointing else block(x)
                loss = nn.functional.cross_entropy(head(x).flatten(0, 1), ids.flatten())
            scale.scale(loss).backward()
            scale.unscale_(steps)
            nn.utils.clip_grad_norm_(trained, 1.0)
            scale.step(steps)
            scale.update()
            steps.zero_grad()
        assert loss.shape == ()
        device = machine.devices[0]
        return device.peak, device.allocated


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda trained: torch.optim.AdamW(trained, lr=1e-3),
    "foreach": lambda trained: torch.optim.AdamW(trained, lr=1e-3, foreach=True),
    "fused": lambda trained: torch.optim.AdamW(trained, lr=1e-3, fused=True),
    "sgd": lambda trained: torch.optim.SGD(trained, lr=1e-3, momentum=0.9),
}
# Every optimizer, and every pair of the two switches; the scaler tells the fused one itself what it found.
QUICK = {("adamw", False, False), ("foreach", True, False), ("fused", False, True), ("sgd", True, True)}


@pytest.mark.parametrize(
    ("optimizer", "checkpointing", "scaler"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in product(OPTIMIZERS, (False, True), (False, True))
    ],
)
def test_memory_is_that_of_a_run_with_values(optimizer: str, checkpointing: bool, scaler: bool) -> None:
    options = {"optimizer": OPTIMIZERS[optimizer], "checkpointing": checkpointing, "scaler": scaler}
    assert train(shapes=True, **options) == train(shapes=False, **options)


def test_big_floats_have_a_shape_and_whole_numbers_values(machine: Machine) -> None:
    ids = torch.arange(2048, device="cuda").view(2, 1024)
    assert not is_unknown(ids)
    assert int(ids.sum()) == 2047 * 1024
    x = big()
    assert is_unknown(x)
    assert x.device == torch.device("cuda:0")
    assert machine.devices[0].allocated == 512 * 1024 * 4 + 2048 * 8
    assert not is_unknown(torch.ones(8, device="cuda") * 2)
    assert is_unknown(x.mean())
    assert is_unknown(x.argmax(dim=-1))
    assert not machine.asked


def test_a_known_mask_selects_as_many_rows_as_it_does(machine: Machine) -> None:
    mask = torch.arange(512, device="cuda") % 3 == 0
    rows = big()[mask]
    assert rows.shape == (171, 1024)
    assert is_unknown(rows)
    target = big()
    target[mask] = rows
    assert target.masked_select(mask[:, None].expand(512, 1024)).shape == (171 * 1024,)
    assert not machine.asked


def test_a_mask_made_like_an_unknown_weight_has_values(machine: Machine) -> None:
    weight = big().requires_grad_()
    for like in (weight, big().to("cpu")):
        mask = like.new_zeros(512, dtype=torch.bool)
        mask[:200] = True
        made = like.new_zeros(512, 3)
        made[mask] = torch.ones(200, 3, device=like.device, requires_grad=True)
        made.sum().backward()
        assert int(mask.sum()) == 200
        assert made.sum().item() == 600
    assert torch.full_like(weight[0, :4], 2.0).tolist() == [2.0] * 4
    assert is_unknown(torch.zeros_like(weight))
    assert is_unknown(weight.new_ones(512, 512))
    assert not machine.asked


def test_an_unknown_mask_is_told_and_selects_all(machine: Machine) -> None:
    x = big()
    assert x[x > 0].shape == (512 * 1024,)
    assert torch.nonzero(x).shape == (512 * 1024, 2)
    assert {how for how, _ in told(machine)} == {"shape"}


def test_a_number_that_is_asked_for_shows_as_unknown_and_is_told_with_its_line(machine: Machine) -> None:
    loss = big().mean()
    line = sys._getframe().f_lineno + 1
    number = loss.item()
    assert f"{number} {number / 3:.4f} {round(2 * number, 3)} {loss:.2f}" == "? ? ? ?"
    (first, *_) = machine.asked
    assert (first.how, first.op) == ("value", "Tensor.item")
    assert first.frame is not None
    assert (Path(first.frame.file).name, first.frame.line) == ("test_shapes.py", line)
    assert math.isfinite(number)
    assert ("decision", "Tensor.item") not in told(machine)
    assert number < 1e9
    assert ("decision", "Tensor.item") in told(machine)


def test_a_file_of_unknown_numbers_is_written_without_a_decision(machine: Machine) -> None:
    """json asks of each number whether it is NaN or infinite; so does a Trainer's state when it is saved."""
    losses = torch.stack([big().mean(), big().mean()]).tolist()
    number = big().mean().item()
    assert json.dumps({"losses": losses, "loss": number}, indent=2).count("\n") == 6
    assert number == number
    assert -math.inf < number < math.inf
    assert "decision" not in {how for how, _ in told(machine)}
    assert isinstance(number > losses[0], bool)
    assert "decision" in {how for how, _ in told(machine)}


def test_arrays_and_lists_of_unknown_numbers_show_as_unknown(machine: Machine) -> None:
    losses = torch.stack([big().mean(), big().mean()])
    array = losses.cpu().numpy()
    assert str(array) == "?"
    assert str(array.mean().item()) == "?"
    assert str(losses.tolist()) == "[?, ?]"
    assert "?" in repr(losses)


def test_the_usual_questions_get_the_usual_answers(machine: Machine) -> None:
    x = big()
    assert torch.isfinite(x).all()
    assert not torch.isnan(x).any()
    assert torch.stack([torch.isfinite(x).all(), torch.isfinite(x.sum())]).all()
    assert int(torch.isnan(x).sum()) == 0
    # Numbers are taken to be finite: nothing that follows from it is left open.
    assert {how for how, _ in told(machine)} == {"value"}
    assert not (x.mean() > 2.0)
    assert ("decision", "Tensor.__bool__") in told(machine)


def test_numbers_that_are_drawn_again_until_they_lie_within_bounds_are_drawn_once(machine: Machine) -> None:
    nn.init.trunc_normal_(torch.empty(2048, 1024, device="cuda"), std=0.02, a=-0.06, b=0.06)
    assert not machine.asked


def test_a_count_of_equal_labels_is_shown_and_a_decision_by_it_is_told(machine: Machine) -> None:
    labels = torch.zeros(512, dtype=torch.long, device="cuda")
    right = 0
    right += (big().view(512, -1).argmax(1) == labels).sum().item()
    assert f"{100 * right / 512:.1f} {right + 0.5}" == "? ?"
    assert {how for how, _ in told(machine)} == {"value"}
    assert right >= 0
    assert ("decision", "Tensor.item") in told(machine)


def test_a_known_mask_joined_with_an_unknown_test_keeps_what_it_says(machine: Machine) -> None:
    going_on = torch.ones(4, dtype=torch.bool, device="cuda")
    scores = torch.where(torch.zeros(4, dtype=torch.bool, device="cuda"), big().view(4, -1).mean(1), -1.0e9)
    assert (going_on & (big().view(4, -1).mean(1) > scores)).any()


def test_what_is_written_from_unknown_values_is_unknown(machine: Machine) -> None:
    small = torch.zeros(4, device="cuda")
    view = small[1:]
    small[0] = big().mean()
    assert is_unknown(small)
    assert is_unknown(view)
    assert is_unknown(small + 1)


def test_weights_on_the_host_take_no_memory_and_move_as_they_should(machine: Machine) -> None:
    layer = nn.Linear(1 << 16, 1 << 16)  # 16 GiB
    assert layer.weight.device == torch.device("cpu")
    assert layer.weight.data_ptr() == layer.weight.untyped_storage().data_ptr() != layer.bias.data_ptr()
    assert not layer.weight.is_cuda
    assert isinstance(layer.weight, nn.Parameter)
    assert machine.devices[0].allocated == 0
    home = layer.weight
    layer.to("cuda:1")
    assert layer.weight is home
    assert layer.weight.device == torch.device("cuda:1")
    assert machine.devices[1].allocated == (1 << 34) + (1 << 18)
    layer.to("cpu")
    assert layer.weight.device == torch.device("cpu")
    assert layer.weight.cpu() is layer.weight
    assert machine.devices[1].allocated == 0


def test_a_shape_on_the_host_does_not_mix_with_one_on_a_gpu(machine: Machine) -> None:
    layer = nn.Linear(2048, 2048)
    with pytest.raises(faults.DeviceMismatch, match="cpu"):
        layer(torch.randn(2, 2048, device="cuda"))
    mean = big().mean().cpu()
    assert (big() * mean).device == torch.device("cuda:0")  # a 0-dim CPU tensor mixes with any device
    assert layer(torch.randn(2, 2048)).shape == (2, 2048)


def test_ids_and_labels_that_are_known_are_checked(machine: Machine) -> None:
    table = nn.Embedding(1000, 256).cuda()
    assert table(torch.tensor([0, 999], device="cuda")).shape == (2, 256)
    with pytest.raises(RuntimeError, match="device-side assert"):
        table(torch.tensor([0, 1000], device="cuda"))
    logits = torch.randn(2, 100_000, device="cuda")
    loss = nn.functional.cross_entropy(logits, torch.tensor([-100, 99_999], device="cuda"))
    assert is_unknown(loss)
    with pytest.raises(RuntimeError, match="device-side assert"):
        nn.functional.cross_entropy(logits, torch.tensor([0, 100_000], device="cuda"))


def test_more_than_the_gpu_has_is_out_of_memory() -> None:
    with (
        virtual_gpus(1, memory="1GiB", shapes=True),
        pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 1024"),
    ):
        torch.empty(1 << 28, device="cuda").add(torch.empty(1 << 28, device="cuda"))


def test_tied_weights_share_an_address_and_others_do_not(machine: Machine) -> None:
    one, other = nn.Linear(512, 512).cuda(), nn.Linear(512, 512).cuda()
    tied = nn.Linear(512, 512).cuda()
    tied.weight = one.weight
    assert one.weight.data_ptr() == tied.weight.data_ptr() != other.weight.data_ptr()
    assert one.weight.untyped_storage().data_ptr() != other.weight.untyped_storage().data_ptr()
    before = machine.devices[0].allocated
    twin = copy.deepcopy(one)
    assert twin.weight.data_ptr() != one.weight.data_ptr()
    assert machine.devices[0].allocated == before + 512 * 512 * 4 + 512 * 4


def test_saving_leaves_a_hole_for_what_nobody_has(machine: Machine, tmp_path: Path) -> None:
    asked_to: list[str | None] = []
    machine.hollow_to = asked_to.append
    big, small = nn.Linear(4096, 4096).cuda(1), nn.Linear(4, 4).cuda()
    forget(small.weight)
    path = tmp_path / "weights.pt"
    torch.save({"big": big.state_dict(), "small": small.state_dict(), "tied": big.weight.detach()}, path)
    assert asked_to == [str(path)]
    assert path.stat().st_size > 4096 * 4096 * 4
    assert path.stat().st_blocks * 512 < 1 << 20
    assert hollow.is_hollow(path)
    for where, device in ((None, "cuda:1"), ("cpu", "cpu"), ("cuda:0", "cuda:0")):
        state = torch.load(path, map_location=where)
        weight = state["big"]["weight"]
        assert (weight.device, weight.shape, weight.dtype) == (
            torch.device(device),
            (4096, 4096),
            torch.float32,
        )
        assert is_unknown(weight)
        assert is_unknown(state["small"]["weight"])
        assert torch.equal(state["small"]["bias"].cpu(), small.bias.detach().cpu())
        assert state["tied"].data_ptr() == weight.data_ptr()
    big.load_state_dict(state["big"])
    assert not machine.asked


def test_what_shares_a_storage_is_allocated_once_when_it_is_loaded(machine: Machine, tmp_path: Path) -> None:
    machine.hollow_to = lambda path: None
    weight = big()
    torch.save([weight, weight[:2]], tmp_path / "both.pt")
    before = machine.devices[0].allocated
    loaded = torch.load(tmp_path / "both.pt")
    assert machine.devices[0].allocated == before + weight.numel() * 4
    assert loaded[1].shape == (2, 1024)


@pytest.mark.parametrize("how", ["memory", "stream"])
def test_streams_of_shapes_are_read_again_as_shapes(machine: Machine, tmp_path: Path, how: str) -> None:
    machine.hollow_to = lambda path: None
    with io.BytesIO() if how == "memory" else (tmp_path / "stream").open("w+b") as stream:
        torch.save([big(), torch.arange(3)], stream)
        stream.seek(0)
        loaded = torch.load(stream)
    assert is_unknown(loaded[0])
    assert loaded[1].tolist() == [0, 1, 2]
    assert not machine.asked


def test_what_is_written_into_memory_takes_none_of_it(machine: Machine, tmp_path: Path) -> None:
    """As Lightning saves: into a BytesIO, whose bytes become the file."""
    weight = torch.empty(1 << 15, 1 << 14, device="cuda")  # 2 GiB
    stream = io.BytesIO()
    torch.save({"weight": weight, "step": torch.tensor(7)}, stream)
    assert len(stream.getvalue()) < 10_000
    (tmp_path / "kept.ckpt").write_bytes(stream.getvalue())
    for place in ("cpu", "cuda"):
        loaded = torch.load(tmp_path / "kept.ckpt", map_location=place)
        assert (loaded["weight"].shape, loaded["weight"].device.type) == (weight.shape, place)
        assert is_unknown(loaded["weight"])
        assert loaded["step"].item() == 7


def test_a_file_of_the_users_stays_whole_where_nothing_is_kept_apart(
    machine: Machine, tmp_path: Path
) -> None:
    (tmp_path / "mine.pt").write_text("mine")
    with pytest.raises(NotSimulated, match="no values are to be written"):
        torch.save(big(), tmp_path / "mine.pt")
    assert (tmp_path / "mine.pt").read_text() == "mine"
    torch.save(torch.arange(3, device="cuda"), tmp_path / "known.pt")
    assert torch.load(tmp_path / "known.pt").tolist() == [0, 1, 2]


def test_no_format_writes_noughts_over_a_file_of_the_users(machine: Machine, tmp_path: Path) -> None:
    mine = tmp_path / "mine.bin"
    mine.write_text("mine")
    net = nn.Linear(512, 512, device="cuda")
    for write in (
        lambda: save_file(net.state_dict(), mine),
        lambda: save_file({"weight": net.weight.detach().cpu()}, mine),
        lambda: save_model(net, str(mine)),
        lambda: mine.write_bytes(save({"weight": net.weight})),
        lambda: torch.save(net.state_dict(), mine, _use_new_zipfile_serialization=False),
    ):
        with pytest.raises(NotSimulated, match="no values are to be written"):
            write()
    assert mine.read_text() == "mine"
    save_file({"known": torch.arange(3, device="cuda").cpu()}, tmp_path / "known.safetensors")
    assert load_file(tmp_path / "known.safetensors")["known"].tolist() == [0, 1, 2]
    torch.save(torch.arange(3, device="cuda"), mine, _use_new_zipfile_serialization=False)
    assert torch.load(mine).tolist() == [0, 1, 2]


def test_plain_pickles_of_shapes_are_stand_ins_and_told(machine: Machine) -> None:
    assert pickle.loads(pickle.dumps(big())).shape == (512, 1024)
    assert machine.asked


def test_a_score_that_is_kept_with_the_weights_is_as_unknown_when_it_is_read_back(
    machine: Machine, tmp_path: Path
) -> None:
    score = big().mean().item()
    torch.save({"score": score, "others": [score + 1.0]}, tmp_path / "kept.pt")
    kept = torch.load(tmp_path / "kept.pt", weights_only=True)
    assert f"{kept['score']:.3f} {kept['others'][0]}" == "? ?"
    assert not any(asked.how == "decision" for asked in machine.asked)
    assert (kept["score"] > 100.0) in (True, False)
    assert any(asked.how == "decision" for asked in machine.asked)


def test_a_number_that_was_never_computed_is_a_number_where_nothing_is_unknown(machine: Machine) -> None:
    written = pickle.dumps(big().mean().item())
    with virtual_gpus(1):
        assert type(pickle.loads(written)) is float


def test_a_machine_with_values_inside_one_without_has_values(machine: Machine) -> None:
    with virtual_gpus(1):
        assert torch.ones(1 << 20, device="cuda").sum().item() == 1 << 20
    assert is_unknown(torch.ones(1 << 20, device="cuda"))


def test_whether_scaled_gradients_overflow_is_no_decision_of_the_program(machine: Machine) -> None:
    """The scaler takes the step, and what it read is told."""
    model = nn.Linear(512, 512, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(torch.randn(4, 512, device="cuda")).pow(2).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.state
    assert {how for how, _ in told(machine)} == {"value"}


def test_sparse_gradients_keep_their_places_and_their_memory(machine: Machine) -> None:
    table = nn.Embedding(4096, 64, sparse=True, device="cuda")
    optimizer = torch.optim.SparseAdam(table.parameters())
    rows = torch.tensor([3, 3, 7, 9], device="cuda").repeat(100)
    before = torch.cuda.memory_allocated()
    table(rows).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    assert (
        torch.cuda.memory_allocated() - before
        == 400 * 8 + 400 * 64 * 4 + 512 - (400 * 8 + 400 * 64 * 4) % 512
    )
    assert table.weight.grad.coalesce()._indices().shape == (1, 3)
    optimizer.step()
    assert is_unknown(table.weight)
    adjacency = torch.eye(512, device="cuda").to_sparse()
    assert torch.sparse.mm(adjacency, big()).shape == (512, 1024)


def test_memory_of_the_host_that_is_written_from_shapes_keeps_what_it_holds(machine: Machine) -> None:
    kept = torch.zeros(512, 1024)
    kept.copy_(big())
    assert float(kept.sum()) == 0.0
    assert ("copy", "aten::copy_") in told(machine)


@pytest.mark.parametrize("pinned", [False, True])
def test_activations_kept_on_the_host_come_back(machine: Machine, pinned: bool) -> None:
    layer, x = nn.Sequential(nn.Linear(1024, 1024), nn.LayerNorm(1024)).cuda(), big()
    layer(x).sum().backward()
    torch.cuda.reset_peak_memory_stats()
    plain = torch.cuda.memory_allocated()
    with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
        out = layer(x).sum()
    assert torch.cuda.memory_allocated() - plain < 4096
    out.backward()


def test_an_operation_without_a_rule_for_shapes_is_tried_on_stand_ins(machine: Machine) -> None:
    logits = torch.randn(400, 8, 64, device="cuda", requires_grad=True)
    targets = torch.randint(1, 64, (8, 50), device="cuda")
    lengths = torch.full((8,), 400), torch.full((8,), 50)
    nn.functional.ctc_loss(logits.log_softmax(-1), targets, *lengths).backward()
    assert logits.grad is not None
    assert is_unknown(logits.grad)


def test_counts_of_unknown_numbers_come_to_what_was_counted(machine: Machine) -> None:
    """By them routers split rows among experts: what stands for them has to fit the rows."""
    chosen = (torch.randn(4096, 64, device="cuda") @ torch.randn(64, 8, device="cuda")).topk(2).indices
    rows = torch.arange(8192, device="cuda")
    counts = torch.bincount(chosen.view(-1), minlength=7)
    for split in (counts.tolist(), counts.cpu().tolist(), [int(count) for count in counts]):
        assert [part.numel() for part in rows.split(split)] == split
    assert counts.cumsum(0)[-1].item() == 8192
    drawn = torch.histc(chosen.view(-1).float(), bins=8, min=0, max=7)
    assert drawn.int().tolist() == [1024] * 8
    assert torch.repeat_interleave(rows[:7], counts).shape == (8192,)
    assert any(asked.how == "shape" for asked in machine.asked)


def test_different_values_among_unknown_ones_are_as_many_as_can_be(machine: Machine) -> None:
    chosen = (torch.randn(4096, 64, device="cuda") @ torch.randn(64, 8, device="cuda")).topk(2).indices
    assert chosen.unique().shape == (8192,)
    values, places, counts = torch.unique(chosen, return_inverse=True, return_counts=True)
    assert (values.shape, places.shape, counts.shape) == ((8192,), (4096, 2), (8192,))
    assert torch.unique(chosen, dim=0).shape == (4096, 2)
    assert torch.unique_consecutive(chosen, return_counts=True)[1].shape == (8192,)
    assert {asked.how for asked in machine.asked} == {"shape"}


def test_what_is_computed_from_a_count_agrees_with_it(machine: Machine) -> None:
    """As a loop that takes as many of its guesses as were right, and one more: it has to come to its end."""
    guesses = (torch.randn(1, 20, 64, device="cuda") @ torch.randn(64, 8192, device="cuda")).argmax(-1)
    said = (torch.randn(1, 21, 64, device="cuda") @ torch.randn(64, 8192, device="cuda")).argmax(-1)
    right = ((~(guesses == said[:, :-1])).cumsum(-1) < 1).sum()
    assert said[:, : right + 1].shape[1] == int(right) + 1
    mask = big().view(2, 8, -1).mean(-1) > 0
    assert mask.sum(1).tolist() == [int(mask.sum()) // 2] * 2
    assert torch.arange(int(mask.sum()), device="cuda").shape == mask.nonzero()[:, 0].shape


def test_where_a_library_ends_its_sentences_decides_nothing() -> None:
    """TRL cuts completions behind the first end of each: by shapes there is none, so that all of them is kept."""
    code = "def cut(ids, ends):\n    return ids[ends.any(dim=1)]\n"
    for file, how in (("trl/trainer/grpo_trainer.py", "value"), ("program.py", "shape")):
        found: dict[str, Any] = {}
        exec(compile(code, f"/packages/{file}", "exec"), found)
        with virtual_gpus(1, shapes=True) as machine:
            scores = torch.empty(64, 4096, device="cuda")
            assert found["cut"](scores, scores > 0).shape == (64, 4096)
            assert {asked.how for asked in machine.asked} == {how}


def test_numbers_of_the_host_answer_for_their_copies(machine: Machine) -> None:
    """As Idefics3 looks for pictures that are padding, before it computes with any."""
    pictures = torch.randn(2, 3, 3, 100, 100)
    pictures[1, 2] = 0
    there = pictures.to("cuda")
    flat = there.to(torch.bfloat16).view(6, 3, 100, 100)
    shown = (flat == 0.0).sum(dim=(-1, -2, -3)) != flat[0].numel()
    assert shown.tolist() == [True] * 5 + [False]
    assert flat[shown].shape == (5, 3, 100, 100)
    assert there[1, 2].any().item() is False
    assert is_unknown(there * 1.0)
    assert not machine.asked
    there.mul_(2.0)
    assert is_unknown(there == 0.0), "it was written to"
    again = pictures.cuda()
    pictures[0] = 0
    assert is_unknown(again == 0.0), "the host's were written to since"
    turned = torch.zeros(4, 8, 64, 64).cuda().to(memory_format=torch.channels_last)
    assert is_unknown(turned == 0.0)
    assert (turned * 2).shape == turned.shape


def test_of_the_hosts_numbers_only_the_latest_are_kept(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_values, "MOST", 300_000)
    first, second, third = (torch.zeros(100, 1000).cuda() for _ in range(3))
    assert not is_unknown(first == 0)
    fourth = torch.zeros(100, 1000).cuda()
    assert [is_unknown(one == 0) for one in (first, second, third, fourth)] == [True, False, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_experts_multiply_in_every_precision_that_cuda_takes(machine: Machine, dtype: torch.dtype) -> None:
    """Torch's own rule for shapes refuses all but bfloat16, and tells other strides than CUDA's kernel."""
    tokens = torch.randn(512, 512, device="cuda", dtype=dtype, requires_grad=True)
    weights = torch.randn(4, 300, 512, device="cuda", dtype=dtype, requires_grad=True)
    ends = torch.tensor([128, 200, 400, 512], dtype=torch.int32, device="cuda")
    made = nn.functional.grouped_mm(tokens, weights.transpose(1, 2), offs=ends)
    assert is_unknown(made)
    assert made.shape == (512, 300)
    assert made.stride() == (-(-300 * dtype.itemsize // 16) * 16 // dtype.itemsize, 1)
    nn.functional.grouped_mm(tokens, weights[:, :256].transpose(1, 2), offs=ends).pow(2).sum().backward()
    assert tokens.grad is not None
    assert tokens.grad.shape == tokens.shape
    assert weights.grad is not None
    assert weights.grad.shape == weights.shape


@pytest.mark.parametrize(
    ("tokens", "weights", "ends"),
    [
        ((512, 510), (4, 510, 512), "int32"),
        ((512, 512), (4, 508, 512), "int32"),
        ((512, 512), (3, 512, 512), "int32"),
        ((512, 512), (4, 512, 512), "int64"),
        ((512, 512), (4, 512, 512), None),
    ],
)
def test_experts_that_do_not_fit_are_refused_in_the_kernels_words(
    machine: Machine, tokens: tuple[int, ...], weights: tuple[int, ...], ends: str | None
) -> None:
    def told(device: str) -> str:
        a, b = torch.randn(tokens, device=device), torch.randn(weights, device=device)
        offs = torch.tensor([128, 200, 400, 512], dtype=getattr(torch, ends), device=device) if ends else None
        with pytest.raises(RuntimeError) as raised:
            nn.functional.grouped_mm(a, b, offs=offs)
        return str(raised.value).splitlines()[0]

    with virtual_gpus(0):
        by_kernel = told("cpu")
    assert told("cuda") == by_kernel


@pytest.mark.parametrize("way", ["split", "split_with_sizes", "chunk", "unbind", "tensor_split"])
@pytest.mark.parametrize("how", ["whole numbers", "as floats", "written to"])
def test_parts_of_a_tensor_are_its_memory(machine: Machine, way: str, how: str) -> None:
    """Also of one that has values, though it is large: whole numbers, seen as others or not."""
    made = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
    if how == "as floats":
        made = made.view(torch.float32)
    if how == "written to":
        made = torch.zeros(1 << 15, device="cuda")
        made.copy_(big().flatten()[: 1 << 15])
        assert is_unknown(made)
    whole, before = made.view(2, -1), torch.cuda.memory_allocated()
    parts = {
        "split": lambda: whole.split(1),
        "split_with_sizes": lambda: whole.split([1, 1]),
        "chunk": lambda: whole.chunk(2),
        "unbind": lambda: whole.unbind(),
        "tensor_split": lambda: whole.tensor_split(2),
    }[way]()
    assert len(parts) == 2
    assert torch.cuda.memory_allocated() == before
    assert {part.untyped_storage().data_ptr() for part in parts} == {made.untyped_storage().data_ptr()}
    assert all(is_unknown(part) == is_unknown(made) for part in parts)
    if how == "whole numbers":
        parts[1].fill_(7)
        assert made[-1].item() == 7
        assert made[0].item() == 0


def test_an_average_on_the_host_of_large_and_small_weights(machine: Machine) -> None:
    """The average's small parameters have values, those of the trained model have none any more."""
    model = nn.Sequential(nn.Linear(1024, 1024), nn.LayerNorm(1024)).to("cuda")
    swa = torch.optim.swa_utils
    average = swa.AveragedModel(model, device="cpu", multi_avg_fn=swa.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(3):
        model(torch.randn(64, 1024, device="cuda")).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    assert {parameter.device.type for parameter in average.parameters()} == {"cpu"}
    assert int(average.n_averaged) == 3


def test_lists_on_two_devices_are_refused_as_ever(machine: Machine) -> None:
    here, there = torch.randn(512, 1024), torch.randn(512, 1024, device="cuda")
    group = torch.utils._foreach_utils._group_tensors_by_device_and_dtype
    (found,) = group([[here, torch.ones(2)], [torch.ones(512, 1024), torch.ones(2)]], True).values()
    assert found[1] == [0, 1]
    with pytest.raises(RuntimeError, match="must be on the same device"):
        group([[here], [there]])
