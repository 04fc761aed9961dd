"""What is said of ranks that part: the line is told from the source, and the fix is code that stands in its place."""

from __future__ import annotations

import ast
from pathlib import Path
from textwrap import dedent

import pytest

from trimtab.diagnose import (
    answers,
    branches,
    loops_left,
    mends_collectives,
    mends_drift,
    mends_ranks,
    mends_results,
    mends_rows,
    parted,
    rewrite,
    source,
)
from trimtab.diagnose.finding import Edit

NOTHING_KNOWN = answers.sides((0, []), (1, []))


def _written(tmp_path: Path, code: str) -> tuple[str, dict[str, int]]:
    """A program, and its lines that are marked `# word`."""
    path = tmp_path / "program.py"
    path.write_text("import torch\nimport torch.distributed as dist\n" + dedent(code))
    lines = path.read_text().splitlines()
    return str(path), {line.rpartition("# ")[2]: n for n, line in enumerate(lines, 1) if "# " in line}


def _after(file: str, edits: list[Edit]) -> str:
    return rewrite.applied(Path(file).read_text(), edits)


ALONE: dict[str, tuple[str, str]] = {
    "a counter that each rank's own loss drives": (
        """
        def fit(model, loader, device):
            wait, best = 0, 1.0
            for epoch in range(9):
                score = validate(model)
                if score < best:
                    best, wait = score, 0
                else:
                    wait += 1
                if wait >= 3:  # cause
                    break
                model(loader).backward()  # stands
        """,
        "flag = torch.tensor(float(wait >= 3), device=device)\n"
        "        dist.all_reduce(flag, op=dist.ReduceOp.MAX)\n"
        "        if flag.item():",
    ),
    "a loop that goes on until the rank's own rows are used up": (
        """
        def fit(model, device):
            seen = 0
            while seen < 100:  # cause
                seen += rollout(model)
                model(seen).backward()  # stands
        """,
        "while True:  # cause\n"
        "        flag = torch.tensor(float(seen < 100), device=device)\n"
        "        dist.all_reduce(flag, op=dist.ReduceOp.MIN)\n"
        "        if not flag.item():\n"
        "            break\n",
    ),
    "rows that are not shared out evenly": (
        """
        def fit(model, rows, rank, world):
            mine = rows[rank::world]  # cause
            for row in mine:
                model(row).backward()  # stands
        """,
        "mine = rows[rank:len(rows) // world * world:world]",
    ),
    "rows that are sliced where the loop begins, by a rank of another name": (
        """
        r, w = dist.get_rank(), dist.get_world_size()
        for row in rows[r::w]:  # cause
            model(row).backward()  # stands
        """,
        "for row in rows[r:len(rows) // w * w:w]:",
    ),
    "rows that are taken in turn": (
        """
        me = dist.get_rank()
        for i, row in enumerate(rows):
            if i % dist.get_world_size() != me:  # cause
                continue
            model(row).backward()  # stands
        """,
        "if i % dist.get_world_size() != me or i >= len(rows) // dist.get_world_size() * dist.get_world_size():",
    ),
    "a batch of which nothing is left": (
        """
        loader = torch.utils.data.DataLoader(torch.utils.data.Subset(rows, range(rank * 8, rank * 8 + 8)))
        for n, batch in enumerate(loader):
            if batch is None:  # cause
                continue
            model(batch.cuda()).backward()  # stands
        """,
        "dist.all_reduce(flag, op=dist.ReduceOp.MAX)",
    ),
    "an error that is swallowed": (
        """
        def fit(model, rows):
            for row in rows:
                try:
                    model(row).backward()  # stands
                except RuntimeError:  # cause
                    continue
        """,
        "except RuntimeError:  # cause\n            raise",
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_loop_that_one_rank_leaves(tmp_path: Path, name: str) -> None:
    code, fixed = ALONE[name]
    file, marks = _written(tmp_path, code)
    said = loops_left.way_out([(file, marks["stands"])], 1, NOTHING_KNOWN)
    assert said is not None
    assert said.cause.line == marks["cause"]
    assert fixed in _after(file, said.edits)


def test_turns_of_which_each_rank_makes_its_own_are_as_many_for_all(tmp_path: Path) -> None:
    file, marks = _written(
        tmp_path,
        """
        for n in range(total - 1):
            if n % world == rank:  # cause
                model(rows[n]).backward()  # stands
        dist.barrier()  # other
        """,
    )
    said = branches.guard([(file, marks["stands"])], [(file, marks["other"])], NOTHING_KNOWN)
    assert said is not None
    assert said.cause.line == marks["cause"]
    assert "if n % world == rank and n < (total - 1) // world * world:" in _after(file, said.edits)


@pytest.mark.parametrize(
    "test", ["i % every != 0", "i % world != chosen", "i // world != rank", "i % world > rank"]
)
def test_what_is_no_turn_of_a_rank(tmp_path: Path, test: str) -> None:
    file, marks = _written(
        tmp_path,
        f"""
        chosen = pick()
        for i, row in enumerate(rows):
            if {test}:  # asks
                continue
        """,
    )
    node = source.statement(file, marks["asks"])
    assert isinstance(node, ast.If)
    assert mends_ranks.as_many_turns(file, node) is None


def test_a_limit_that_all_ranks_have_is_no_decision_of_one(tmp_path: Path) -> None:
    file, marks = _written(
        tmp_path,
        """
        args = parser.parse_args()
        for step, batch in enumerate(loader):
            if step >= args.max_steps or total > 5:
                break
            loss = model(batch)
            total = gather(loss)
            dist.all_reduce(total)
            loss.backward()  # stands
        """,
    )
    assert loops_left.way_out([(file, marks["stands"])], 1, NOTHING_KNOWN) is None


@pytest.mark.parametrize(
    "loop",
    [
        "for n, batch in enumerate(loader):\n    if n % 4:",
        "for n, batch in zip(range(9), loader):\n    if n > 7:",
        "for p in model.parameters():\n    if p.grad is None:",
        "for name in ['a', 'b']:\n    if name == skipped:",
    ],
)
def test_what_a_loop_counts_or_goes_through_everywhere_is_no_decision_of_one(
    tmp_path: Path, loop: str
) -> None:
    file, marks = _written(tmp_path, f"{loop}\n        continue\n    model(1).backward()  # stands\n")
    assert loops_left.way_out([(file, marks["stands"])], 1, NOTHING_KNOWN) is None


def test_what_stands_last_under_a_condition_on_the_rank_is_put_behind_it(tmp_path: Path) -> None:
    file, marks = _written(
        tmp_path,
        """
        def name(rank):
            told = [None]
            if rank == 0:  # cause
                told = ["run"]
                dist.broadcast_object_list(told, src=0)  # stands
            return told  # other
        """,
    )
    said = branches.guard([(file, marks["stands"])], [(file, marks["other"])], NOTHING_KNOWN)
    assert said is not None
    assert said.cause.line == marks["cause"]
    assert '\n        told = ["run"]\n    dist.broadcast_object_list(told, src=0)  # stands\n' in _after(
        file, said.edits
    )


def test_the_function_that_one_rank_has_left(tmp_path: Path) -> None:
    file, marks = _written(
        tmp_path,
        """
        import os

        def cached(path):
            if os.path.exists(path):  # cause
                return torch.load(path)
            dist.barrier()  # stands
            return torch.load(path)

        def main():
            rows = cached("rows.pt")  # asks
            train(rows)  # other
        """,
    )
    way = [(file, marks["stands"]), (file, marks["asks"])]
    said = branches.left_function(way, [(file, marks["other"])], 1)
    assert said is not None
    assert said.cause.line == marks["cause"]
    assert "ReduceOp.MIN" in said.fix


def test_a_step_that_one_rank_leaves_for_its_own_loss_is_left_by_all(tmp_path: Path) -> None:
    file, marks = _written(
        tmp_path,
        """
        class Trainer:
            def step(self, x, y):
                loss = self.model(x.to(self.device), y)
                if not torch.isfinite(loss):  # cause
                    return None
                loss.backward()  # stands

        def main(trainer, rows):
            for x, y in rows:
                trainer.step(x, y)  # asks
            dist.barrier()  # other
        """,
    )
    way = [(file, marks["stands"]), (file, marks["asks"])]
    said = branches.left_function(way, [(file, marks["other"])], 1)
    assert said is not None
    assert said.cause.line == marks["cause"]
    after = _after(file, said.edits)
    assert "flag = torch.tensor(float(not torch.isfinite(loss)), device=self.device)\n" in after
    assert "dist.all_reduce(flag, op=dist.ReduceOp.MAX)\n        if flag.item():  # cause\n" in after


def test_a_model_is_wrapped_again_after_it_was_unfrozen(tmp_path: Path) -> None:
    file, marks = _written(
        tmp_path,
        """
        def main(model, device):
            ddp = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device])  # wrap
            for step in range(4):
                if step == 2:
                    model.body.requires_grad_(True)  # unfrozen
        """,
    )
    fix = mends_drift.wrap_again(source.place(file, marks["unfrozen"]), source.place(file, marks["wrap"]))
    assert fix.edits[0].text == (
        "            ddp = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device])\n"
    )


def test_what_is_gathered_is_padded_before_the_list_is_made(tmp_path: Path) -> None:
    file, marks = _written(
        tmp_path,
        """
        def gather(ids):
            parts = [torch.empty_like(ids) for _ in range(2)]
            dist.all_gather(parts, ids)  # stands
        """,
    )
    fix = mends_collectives.padded(source.place(file, marks["stands"]), [4, 9], [4, 7])
    assert fix is not None
    lines = _after(file, fix.edits).splitlines()
    assert lines[4].strip() == "longest = torch.tensor(ids.size(1), device=ids.device)"
    assert lines[6].strip() == "ids = torch.nn.functional.pad(ids, (0, longest.item() - ids.size(1)))"


def test_what_accelerate_gathers_is_padded_by_it(tmp_path: Path) -> None:
    file, marks = _written(
        tmp_path,
        """
        def answers(accelerator, ids, plain):
            found = accelerator.gather_for_metrics(ids).tolist()  # stands
            return found + plain.gather(ids)  # other
        """,
    )
    fix = mends_collectives.padded_by_accelerate(source.place(file, marks["stands"]), [4, 9], [4, 7])
    assert fix is not None
    lines = _after(file, fix.edits).splitlines()
    assert lines[marks["stands"] - 1].strip() == "ids = accelerator.pad_across_processes(ids, dim=1)"
    assert mends_collectives.padded_by_accelerate(source.place(file, marks["stands"]), [4, 9], [3, 7]) is None
    assert mends_collectives.padded_by_accelerate(source.place(file, marks["other"]), [4, 9], [4, 7]) is None


def test_weights_that_a_file_replaced_by_its_own_type(tmp_path: Path) -> None:
    file, marks = _written(
        tmp_path,
        """
        def load(model, path):
            model.load_state_dict(torch.load(path), assign=True)  # cause
        """,
    )
    fix = mends_collectives.of_type(source.place(file, marks["cause"]), "bfloat16")
    assert fix.text.startswith("`assign=True` puts the file's tensors")
    assert "torch.bfloat16" in fix.text


@pytest.mark.parametrize(
    ("condition", "call", "named"),
    [
        ("self.trainer.is_global_zero", 'self.log("f1", f1, sync_dist=True)', True),
        ("self.global_rank == 0", 'self.log_dict({"f1": f1}, sync_dist=True)', True),
        ("self.trainer.is_global_zero", 'self.log("f1", f1, rank_zero_only=True)', False),
        ("self.trainer.current_epoch > 3", 'self.log("f1", f1, sync_dist=True)', False),
    ],
)
def test_what_some_ranks_log_for_all(tmp_path: Path, condition: str, call: str, named: bool) -> None:
    file, marks = _written(
        tmp_path,
        f"""
        def on_validation_epoch_end(self):
            f1 = self.f1.compute()
            if {condition}:  # cause
                {call}
        """,
    )
    said = branches.logged_by_some(file)
    assert (said is not None) is named
    if said is not None:
        assert said.cause is not None
        assert said.cause.line == marks["cause"]
        assert call.replace('"', "'") in said.fix


def test_the_seed_of_a_sampler_without_the_rank(tmp_path: Path) -> None:
    file, marks = _written(
        tmp_path,
        """
        def loaders(rows, cfg, rank):
            seed = cfg.seed + rank  # cause
            return DistributedSampler(rows, seed=seed)  # made
        """,
    )
    fix = mends_rows.one_seed(source.place(file, marks["made"]))
    assert fix.place is not None
    assert fix.place.line == marks["cause"]
    assert [edit.text for edit in fix.edits] == ["cfg.seed"]


def test_a_rate_that_a_function_of_ones_own_sets_is_not_averaged_blindly(tmp_path: Path) -> None:
    file, marks = _written(
        tmp_path,
        """
        def main(opt, device):
            set_lr(opt, 3)  # own
            plateau.step(loss)  # told
        """,
    )
    assert mends_drift.same_rate(source.place(file, marks["own"])).edits == []
    (shared, told) = mends_drift.same_rate(source.place(file, marks["told"])).edits
    assert shared.text.strip().startswith(
        "figure = torch.as_tensor(loss, dtype=torch.float32, device=device)"
    )
    assert told.text == "figure.item() / dist.get_world_size()"


def test_a_condition_on_the_rank_keeps_what_else_it_asks(tmp_path: Path) -> None:
    file, marks = _written(
        tmp_path,
        """
        def main(step, rank, net):
            if step == 3 and rank == 0:  # cause
                load(net)  # stands
        """,
    )
    said = branches.only_here([(file, marks["stands"])])
    assert said is not None
    assert [edit.text for edit in said.edits] == ["step == 3"]


def test_a_rank_that_returns_before_the_others(tmp_path: Path) -> None:
    file, marks = _written(
        tmp_path,
        """
        class Saver:
            def __init__(self, rank, every):
                self.rank, self.every = rank, every

            def __call__(self, step):
                if step % self.every:
                    return
                if self.rank != 0:  # cause
                    return
                dist.barrier()  # stands

        def main(save):
            for step in range(4):
                train()  # other
                save(step)  # asks
        """,
    )
    way = [(file, marks["stands"]), (file, marks["asks"])]
    said = branches.left_function(way, [(file, marks["other"])], 1)
    assert said is not None
    assert said.cause.line == marks["cause"]


def _known(file: str, line: int, rank: int, **values: object) -> tuple[int, list[object]]:
    """What a rank wrote down of the function around a line."""
    return rank, [{"at": answers.scope_key(file, line), "known": values}]


def test_the_condition_that_two_ranks_answer_differently_is_the_cause(tmp_path: Path) -> None:
    file, marks = _written(
        tmp_path,
        """
        def log(step, loss, board, verbose):
            if verbose:
                if board is not None:  # cause
                    value = loss.detach().clone()
                    dist.all_reduce(value)  # stands
                    board.add(value.item())
            dist.barrier()  # other
        """,
    )
    line = marks["stands"]
    here = _known(file, line, 0, board={"kind": "Board"}, verbose=True)
    there = _known(file, line, 1, board=None, verbose=True)
    said = parted.by_values([(file, line)], [(file, marks["other"])], answers.sides(here, there))
    assert said is not None
    assert said.cause.line == marks["cause"]
    assert "`board` is a Board on rank 0 and None on rank 1" in said.cause.why
    after = _after(file, said.edits)
    assert "        value = loss.detach().clone()\n        dist.all_reduce(value)" in after
    assert "        if board is not None:  # cause\n            board.add(value.item())" in after


def test_a_loop_is_longer_where_a_list_is_filled_on_one_rank(tmp_path: Path) -> None:
    file, marks = _written(
        tmp_path,
        """
        def fit(rank):
            hooks = [1]
            if rank == 0:  # cause
                hooks.append(2)
            for hook in hooks:
                dist.all_reduce(hook)  # stands
            dist.barrier()  # other
        """,
    )
    line = marks["stands"]
    sizes = [_known(file, line, rank, hooks={"kind": "list", "len": 2 - rank}) for rank in (0, 1)]
    said = parted.by_values([(file, line)], [(file, marks["other"])], answers.sides(*sizes))
    assert said is not None
    assert said.cause.line == marks["cause"]
    assert "\n    hooks.append(2)\n    for" in _after(file, said.edits)


def test_counters_that_have_gone_on_and_values_of_another_moment_prove_nothing(tmp_path: Path) -> None:
    file, marks = _written(
        tmp_path,
        """
        def fit(patience):
            for step in range(9):
                if step % 2 == 0:
                    dist.all_reduce(step)  # stands
                if patience > 3:
                    break
        """,
    )
    line = marks["stands"]
    (step, patience) = [n for n in source.walk(file) if n.__class__.__name__ == "If"]
    both = [_known(file, line, rank, step=rank, patience=4 - rank) for rank in (0, 1)]
    assert answers.sides(*both).parted(file, step) is None
    assert answers.sides(*both).parted(file, patience) is True
    assert answers.sides(*both, at_once=False).parted(file, patience) is None


KEPT: dict[str, tuple[str, str]] = {
    "what is printed is computed by all": (
        """
        def score():
            dist.barrier()

        def main(rank, step):
            if step == 2 and rank == 0:  # cause
                print(score())  # stands
            dist.barrier()  # other
        """,
        "    if step == 2:\n        result = score()\n        if rank == 0:\n            print(result)",
    ),
    "the first rank comes to the barrier of the others": (
        """
        def rows(rank):
            if rank != 0:  # cause
                dist.barrier()  # stands
            path = prepare()
            return torch.load(path)  # other
        """,
        "    path = prepare()\n    if rank == 0:\n        dist.barrier()  # stands\n    return",
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_one_rank_does_stays_with_it(tmp_path: Path, name: str) -> None:
    code, fixed = KEPT[name]
    file, marks = _written(tmp_path, code)
    said = branches.guard([(file, marks["stands"])], [(file, marks["other"])], NOTHING_KNOWN)
    assert said is not None
    assert said.cause.line == marks["cause"]
    assert fixed in _after(file, said.edits)


def test_a_return_of_all_but_one_before_they_meet(tmp_path: Path) -> None:
    file, marks = _written(
        tmp_path,
        """
        def save(rank, state):
            if rank != 0:  # cause
                return
            torch.save(state, "last.pt")
            dist.barrier()  # stands

        def main(rank):
            save(rank, {})  # asks
            train()  # other
        """,
    )
    way = [(file, marks["stands"]), (file, marks["asks"])]
    said = branches.left_function(way, [(file, marks["other"])], 1)
    assert said is not None
    assert '\n    if rank == 0:\n        torch.save(state, "last.pt")\n    dist.barrier()' in _after(
        file, said.edits
    )


def test_results_that_would_come_to_nothing(tmp_path: Path) -> None:
    file, marks = _written(
        tmp_path,
        """
        def evaluate(hits, seen, total, part, world):
            dist.all_reduce(torch.tensor([hits, seen]))  # lost
            parts = [torch.zeros(2)] * world
            dist.all_gather(parts, part)  # several
            total += part.sum()  # adds
            dist.all_reduce(total)  # again
        """,
    )
    at = {name: source.place(file, line) for name, line in marks.items()}
    calls = {name: next(iter(source.call_on(file, line))) for name, line in marks.items()}
    lost = mends_results.kept(at["lost"], calls["lost"], calls["lost"].args[0])
    assert "    dist.all_reduce(reduced)\n    hits, seen = reduced.tolist()\n" in _after(file, lost.edits)
    several = mends_results.several(at["several"], calls["several"])
    assert "parts = [torch.zeros(2) for _ in range(world)]" in _after(file, several.edits)
    once = mends_results.summed_once(at["again"], calls["again"], at["adds"])
    assert "    dist.all_reduce(part)\n    total += part\n" in _after(file, once.edits)
    assert "# again" not in _after(file, once.edits)
