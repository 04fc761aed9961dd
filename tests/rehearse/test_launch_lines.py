"""The lines with which trainings are started, read as their launchers would."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trimtab.errors import RequestError
from trimtab.rehearse import rank_variables
from trimtab.rehearse.target import Target, parse_target

Read = Callable[..., Target]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    Path("run.sh").write_text("python train.py\n")
    Path("job").write_text("#!/usr/bin/env bash\npython train.py\n")

    def line(text: str, gpus: int | None = None) -> Target:
        return parse_target(text.split(), scratch=tmp_path, gpus=gpus)

    return line


@pytest.mark.parametrize(
    ("line", "arguments", "ranks", "nodes"),
    [
        ("torchrun --nproc-per-node 2 train.py --lr 1", "train.py --lr 1", 2, 1),
        ("torchrun --nproc-per-node=gpu train.py", "train.py", 0, 1),
        ("python -m torch.distributed.run --nnodes 2 --nproc_per_node 2 train.py", "train.py", 2, 2),
        ("deepspeed train.py --deepspeed c.json", "train.py --deepspeed c.json", 0, 1),
        ("deepspeed --num_gpus=4 --num_nodes 2 train.py", "train.py", 4, 2),
        ("deepspeed --include localhost:1,3 --master_port 29501 --module pkg.train", "-m pkg.train", 2, 1),
        ("srun -n4 -N 2 --gres=gpu:2 --unbuffered python -u train.py", "train.py", 2, 2),
        ("srun --ntasks-per-node 8 --nodes=2 python train.py", "train.py", 8, 2),
        ("mpirun -np 2 -x PATH --mca btl tcp --oversubscribe python train.py", "train.py", 2, 1),
        ("mpiexec -n 4 -ppn 2 python3.11 -m pkg.train -v", "-m pkg.train -v", 2, 2),
        ("srun torchrun --nproc_per_node 2 train.py", "train.py", 2, 1),
    ],
)
def test_launchers(read: Read, line: str, arguments: str, ranks: int, nodes: int) -> None:
    target = read(line)
    assert (" ".join(target.arguments), target.ranks, target.nodes, target.launched) == (
        arguments,
        ranks,
        nodes,
        True,
    )


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("python train.py -m x", "train.py -m x"),
        ("python3 -u -W ignore -X dev -m pkg.train", "-m pkg.train"),
        ("uv run train.py", "train.py"),
        ("poetry run python train.py", "train.py"),
        ("nohup env A=1 python train.py", "train.py"),
        ("bash run.sh --lr 1", "--command bash run.sh --lr 1"),
        ("bash -x run.sh", "--command bash -x run.sh"),
        ("./run.sh", "--command bash ./run.sh"),
        ("job a", "--command bash job a"),
    ],
)
def test_lines_of_one_process(read: Read, line: str, arguments: str) -> None:
    target = read(line)
    assert (" ".join(target.arguments), target.launched) == (arguments, False)


def test_options_of_python_go_to_the_interpreter(read: Read) -> None:
    assert read("python -uB -W ignore -X dev train.py").interpreter == ("-uB", "-W", "ignore", "-X", "dev")


def test_variables_before_the_line(read: Read) -> None:
    target = read("CUDA_VISIBLE_DEVICES=1,3 LR=1e-4 torchrun --nproc-per-node gpu train.py NAME=x")
    assert target.environment == {"CUDA_VISIBLE_DEVICES": "1,3", "LR": "1e-4"}
    assert target.visible_gpus() == [1, 3]
    assert target.arguments == ("train.py", "NAME=x")
    assert read("CUDA_VISIBLE_DEVICES=GPU-8f3a,GPU-91bc python train.py").visible_gpus() == [0, 1]
    assert read("CUDA_VISIBLE_DEVICES= python train.py").visible_gpus() == []
    assert read("train.py").visible_gpus() is None


def test_what_deepspeed_says_on_the_command_line(read: Read) -> None:
    assert read("deepspeed train.py --lr 1").for_rank(1) == ("train.py", "--local_rank=1", "--lr", "1")
    assert read("deepspeed --no_local_rank train.py").for_rank(1) == ("train.py",)
    assert read("deepspeed --module pkg.train").for_rank(0) == ("-m", "pkg.train", "--local_rank=0")


def test_what_the_older_form_of_torchrun_says_on_the_command_line(read: Read) -> None:
    line = "python -m torch.distributed.launch --nproc_per_node=2"
    assert read(f"{line} train.py --lr 1").for_rank(1) == ("train.py", "--local-rank=1", "--lr", "1")
    assert read(f"{line} --use_env train.py --lr 1").for_rank(1) == ("train.py", "--lr", "1")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("python -c pass", "put the code into a file"),
        ("python -I train.py", "leave it out"),
        ("python -u", "there is no script in it"),
        ("uv run --with torch train.py", "uv run trimtab rehearse"),
        ("mpirun train.py", "write -np N"),
        ("srun -n 3 -N 2 python train.py", "choose a number"),
        ("srun -n many python train.py", "give a number"),
        ("srun -n 2 torchrun train.py", "rehearse the inner line"),
        ("srun --begin now python train.py", "now: no such file"),
        ("deepspeed --exclude node1:0 train.py", "--num_gpus N"),
        ("torchrun missing.py", "missing.py: no such file"),
        ("bash missing.sh", "missing.sh: no such file"),
        ("accelerate config", "only `accelerate launch`"),
        ("cat train.py", "not a launcher that is known"),
    ],
)
def test_what_is_refused_says_what_to_write(read: Read, line: str, said: str) -> None:
    with pytest.raises(RequestError) as refused:
        read(line)
    assert said in str(refused.value)


def test_each_launcher_tells_the_rank_in_its_own_words() -> None:
    from trimtab.hardware.launcher import detect_launcher
    from trimtab.rehearse.one_rank import variables

    given = variables(3, 2, 4, 29400, "x")
    for launcher, name in (("torchrun", "torchrun"), ("srun", "slurm"), ("mpirun", "mpi")):
        found = detect_launcher(rank_variables.of(launcher, given))  # type: ignore[arg-type]
        assert (found.name, found.rank, found.world_size) == (name, 3, 4)
        assert (found.local_rank, found.local_world_size) == (1, 2)


FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 2
use_cpu: false
debug: false
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
"""


def test_accelerate_says_itself_what_it_would_start(read: Read) -> None:
    Path("fsdp.yaml").write_text(FSDP)
    target = read("accelerate launch --config_file fsdp.yaml train.py --lr 1")
    assert (target.arguments, target.ranks, target.launched) == (("train.py", "--lr", "1"), 2, True)
    assert target.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert target.environment["FSDP_VERSION"] == "2"
    assert target.environment["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"


IN_A_SHELL = """
set -e
export NAME=$(python -c 'print("it" + "self")')
srun -n $(nvidia-smi -L | wc -l) python note.py
python script.py $NAME
sbatch next.sh || echo refused
"""


def test_a_shell_script_runs_and_its_python_joins(ask: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(IN_A_SHELL)
    (tmp_path / "note.py").write_text("import os\nprint('rank', os.environ['SLURM_PROCID'])\n")
    (tmp_path / "script.py").write_text(
        "import sys, torch\nassert sys.argv[1] == 'itself'\ntorch.ones(2, device='cuda') + torch.ones(2)\n"
    )
    report = ask("bash", "run.sh", ranks=None, timeout=120, settings={"gpus": 2})
    assert [(one["kind"], one["where"]["line"]) for one in report["findings"]] == [("device-mismatch", 3)]
    assert sorted(report["stdout"].splitlines()) == ["rank 0", "rank 1", "refused"]
    (tmp_path / "run.sh").write_text("exit 3")
    report = ask("bash", "run.sh", ranks=None, timeout=120, settings={"gpus": 2})
    assert (report["verdict"], report["notes"]) == (
        "unproven",
        ["bash ended with status 3: see what it says above"],
    )


def test_an_option_of_ours_after_the_script(ask: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    report = ask("script.py", "--max-steps=3", ranks=None, timeout=120, settings={"gpus": 2})
    assert any("--max-steps stood after the script" in note for note in report["notes"])
    report = ask("script.py", "--lr", "1", ranks=None, timeout=120, settings={"gpus": 2})
    assert report["notes"] == []


def test_gpus_that_the_line_shows(ask: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import json, os, torch\nprint(json.dumps([torch.cuda.device_count(), os.environ['CUDA_VISIBLE_DEVICES']]))"
    )
    report = ask("CUDA_VISIBLE_DEVICES=1,2", "script.py", ranks=None, timeout=120, settings={})
    assert json.loads(report["stdout"]) == [2, "1,2"]


def test_a_wrong_config_is_refused_before_anything_starts(read: Read) -> None:
    Path("c.yaml").write_text("modle: x\n")
    with pytest.raises(RequestError, match="did you mean model") as refused:
        read("c.yaml")
    assert refused.value.exit_code == 2
    Path("c.yaml").write_text("model: builtin:causal-lm\n")
    with pytest.raises(RequestError, match="no_such"):
        read("c.yaml training.no_such=1")


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("torchrun --nproc_per_node 4 train.py", 4),
        ("NGPU=3\ntorchrun --nproc-per-node=$NGPU train.py", 3),
        ("export N='2'\naccelerate launch --num_processes ${N} train.py", 2),
        ("CUDA_VISIBLE_DEVICES=0,5 python train.py", 6),
        ("python train.py", 1),
        ("torchrun --nproc_per_node $1 train.py", 1),
    ],
)
def test_a_shell_script_has_the_gpus_that_its_launchers_count_on(
    read: Read, tmp_path: Path, text: str, gpus: int
) -> None:
    script = tmp_path / "start.sh"
    script.write_text(text)
    assert read(f"bash {script}").gpus == gpus
