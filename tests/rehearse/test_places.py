"""Questions that the rehearsal asks a program's source."""

from __future__ import annotations

from pathlib import Path

from trimtab.diagnose import flow, rewrite, source
from trimtab.diagnose.rules_values import moved_into
from trimtab.rehearse.standstill import finding, last_stack, standing


def program(tmp_path: Path, text: str) -> str:
    path = tmp_path / "program.py"
    path.write_text(text)
    return str(path)


def test_the_way_out_of_a_loop_is_the_condition_that_leaves_it(tmp_path: Path) -> None:
    file = program(tmp_path, "for step in range(9):\n    train()\n    if done:\n        break\n")
    found = flow.way_out(source.place(file, 2))
    assert found is not None
    assert found.line == 3


def test_a_count_that_depends_on_the_rank_is_the_way_out(tmp_path: Path) -> None:
    file = program(tmp_path, "rows = data[rank::2]\nfor row in rows:\n    train(row)\n")
    found = flow.way_out(source.place(file, 3))
    assert found is not None
    assert found.line == 1


def test_the_condition_on_which_a_layer_is_used(tmp_path: Path) -> None:
    text = "class Net:\n    def forward(self, x, k):\n        if k:\n            x = self.a(x)\n"
    file = program(tmp_path, text + "        return self.b(x)\n")
    found = flow.choice_of(file, 2, "a")
    assert found is not None
    assert found.line == 3
    assert flow.choice_of(file, 2, "b") is None


def test_each_name_of_a_tuple_has_its_own_value(tmp_path: Path) -> None:
    file = program(tmp_path, "net, meter = Net().to(device), Meter(3)\n")
    made = source.last_assignment(file, 2, "meter")
    assert made is not None
    value = source.value_for(made, "meter")
    assert value is not None
    assert not source.has_move(value)


def test_data_is_followed_back_to_the_line_that_moved_it(tmp_path: Path) -> None:
    text = "x = torch.ones(3).to(device)\ndata = TensorDataset(x)\nfor b in DataLoader(data):\n    f(b)\n"
    assert moved_into(program(tmp_path, text), 3) == 1


def test_the_choice_of_a_device_is_no_model_that_was_moved(tmp_path: Path) -> None:
    text = 'device = torch.device("cuda")\nmodel = Net().to(device)\nddp = DDP(model.to(device))\n'
    assert source.device_choice(program(tmp_path, text), 3) == 1


def test_of_several_stacks_the_last_counts(tmp_path: Path) -> None:
    path = tmp_path / "stands-1"
    stack = 'Current thread 0x1 (most recent call first):\n  File "a.py", line {} in f\n'
    path.write_text(stack.format(1) + stack.format(2))
    assert last_stack(path) == [("a.py", 2, "f")]


def test_ranks_that_stand_still_are_parted_by_the_guard_round_a_call_of_all(tmp_path: Path) -> None:
    text = "def save(model, rank):\n    if rank == 0:\n        state = model.weight.full_tensor()\n"
    file = program(tmp_path, text + "        torch.save(state, path)\nsave(model, rank)\ndist.barrier()\n")
    torch = "/lib/site-packages/torch"
    gathers = [
        ("/lib/site-packages/trimtab/virtual/dispatch.py", 121, "work"),
        (f"{torch}/_ops.py", 882, "redispatch"),
        (f"{torch}/distributed/_functional_collectives.py", 142, "wait_tensor"),
        (f"{torch}/distributed/tensor/_api.py", 774, "full_tensor"),
        (file, 3, "save"),
        (file, 5, "<module>"),
    ]
    waits = [
        (f"{torch}/distributed/distributed_c10d.py", 5356, "barrier"),
        (f"{torch}/distributed/c10d_logger.py", 83, "wrapper"),
        (file, 6, "<module>"),
    ]
    stands = [stand for n, stack in enumerate((gathers, waits)) if (stand := standing(n, stack)) is not None]
    assert [stand.name for stand in stands] == ["full_tensor", "barrier"]
    found = finding(stands)
    assert found.cause is not None
    assert found.cause.line == 2
    after = rewrite.applied(Path(file).read_text(), found.edits)
    assert "    state = model.weight.full_tensor()\n    if rank == 0:\n        torch.save(" in after
    # One that computes waits for nobody.
    assert standing(0, [*gathers[:2], *gathers[4:]]) is None
    # A send and its receive stand under branches on the rank by right.
    sends = [(f"{torch}/distributed/distributed_c10d.py", 2800, "recv"), *gathers[4:]]
    paired = [stand for n, stack in enumerate((sends, waits)) if (stand := standing(n, stack)) is not None]
    assert finding(paired).edits == []
