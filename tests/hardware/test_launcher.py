"""Who started this process: each launcher by the variables it really sets."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from trimtab.errors import RequestError
from trimtab.hardware import Launcher, detect_launcher

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29400",
}
SRUN = {
    "SLURM_JOB_ID": "1731344",
    "SLURM_JOB_NAME": "train",
    "SLURM_JOB_NODELIST": "gpu[003-006]",
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    # The login node, where srun was typed: not where rank 0 is.
    "SLURM_LAUNCH_NODE_IPADDR": "172.18.140.10",
}
SBATCH_SHELL = {
    "SLURM_JOB_ID": "1731344",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
PYTORCHJOB = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
}


def ranks(launcher: Launcher) -> tuple[int, int, int, int]:
    return launcher.rank, launcher.world_size, launcher.local_rank, launcher.local_world_size


def test_nothing_set() -> None:
    launcher = detect_launcher({"PATH": "/bin"})
    assert launcher == Launcher(name="none")
    assert launcher.stale_note() is None
    assert not launcher.multi_process


def test_torchrun_says_it_all_itself() -> None:
    launcher = detect_launcher(TORCHRUN)
    assert (launcher.name, ranks(launcher), launcher.exports) == ("torchrun", (3, 4, 1, 2), ())


def test_torchrun_inside_slurm_is_torchrun() -> None:
    assert detect_launcher(SRUN | TORCHRUN).name == "torchrun"


def test_torchrun_with_one_process() -> None:
    launcher = detect_launcher(TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    assert (launcher.name, launcher.multi_process, launcher.stale) == ("torchrun", False, ())


def test_variables_without_a_launcher_are_stale() -> None:
    left_over = {name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"}
    launcher = detect_launcher(left_over)
    assert (launcher.name, ranks(launcher)) == ("none", (0, 1, 0, 1))
    assert launcher.stale == (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    note = launcher.stale_note()
    assert note is not None
    assert "WORLD_SIZE" in note
    assert "TRIMTAB_LAUNCHER=env" in note
    assert "\n" not in note


def test_stale_nonsense_is_ignored_too() -> None:
    assert detect_launcher({"RANK": "abc"}).stale == ("RANK",)


def test_accelerate_launch_with_one_process_sets_no_rank() -> None:
    env = {"ACCELERATE_USE_CPU": "False", "ACCELERATE_MIXED_PRECISION": "no", "OMP_NUM_THREADS": "1"}
    assert detect_launcher(env) == Launcher(name="none")


def test_accelerate_launch_on_the_cpu_leaves_an_address_behind() -> None:
    env = {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    launcher = detect_launcher(env)
    assert (launcher.name, launcher.stale) == ("none", ("MASTER_ADDR", "MASTER_PORT"))


def test_srun() -> None:
    launcher = detect_launcher(SRUN)
    assert (launcher.name, ranks(launcher)) == ("slurm", (5, 8, 1, 4))
    exports = dict(launcher.exports)
    assert exports["MASTER_ADDR"] == "gpu003"
    assert 20000 <= int(exports["MASTER_PORT"]) < 32768
    assert {name: exports[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")} == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
    }


def test_every_task_of_a_step_meets_at_one_place_and_two_steps_do_not() -> None:
    here = dict(detect_launcher(SRUN).exports)
    there = dict(detect_launcher(SRUN | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}).exports)
    other_step = dict(detect_launcher(SRUN | {"SLURM_STEP_ID": "1"}).exports)
    assert (here["MASTER_ADDR"], here["MASTER_PORT"]) == (there["MASTER_ADDR"], there["MASTER_PORT"])
    assert here["MASTER_PORT"] != other_step["MASTER_PORT"]


def test_srun_on_one_node_needs_no_name() -> None:
    one = SRUN | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "8"}
    assert dict(detect_launcher(one).exports)["MASTER_ADDR"] == "127.0.0.1"


def test_srun_obeys_an_address_that_is_set() -> None:
    exports = dict(detect_launcher(SRUN | {"MASTER_ADDR": "ib-gpu003", "MASTER_PORT": "1234"}).exports)
    assert (exports["MASTER_ADDR"], exports["MASTER_PORT"]) == ("ib-gpu003", "1234")


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("gpu[003-006,009],big1", "gpu003"),
        ("node7", "node7"),
        ("a1,b2", "a1"),
        ("r[1-2]n[05-08]", "r1n05"),
        ("gpu[12],x", "gpu12"),
    ],
)
def test_first_host_of_a_node_list(nodelist: str, first: str) -> None:
    exports = dict(detect_launcher(SRUN | {"SLURM_STEP_NODELIST": nodelist}).exports)
    assert exports["MASTER_ADDR"] == first


@pytest.mark.parametrize(
    ("tasks", "node", "count"), [("4(x2),3", "1", 4), ("4(x2),3", "2", 3), ("5", "0", 5)]
)
def test_tasks_on_this_node(tasks: str, node: str, count: int) -> None:
    env = SRUN | {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node}
    assert detect_launcher(env).local_world_size == count


def test_a_batch_script_is_not_srun() -> None:
    assert detect_launcher(SBATCH_SHELL) == Launcher(name="none")


def test_an_interactive_shell_is_not_srun() -> None:
    # salloc's shell is a step of its own, with a number from the top of the range.
    assert detect_launcher(SRUN | {"SLURM_STEP_ID": "4294967290"}).name == "none"
    # `srun -n 8 --pty bash`: eight tasks, of which one is a shell.
    assert detect_launcher(SRUN | {"SLURM_PTY_PORT": "39933", "SLURM_JOB_NAME": "bash"}).name == "none"
    # `srun -n 8 --pty python train.py` is a launch.
    assert detect_launcher(SRUN | {"SLURM_PTY_PORT": "39933", "SLURM_JOB_NAME": "python"}).name == "slurm"


def test_srun_with_one_task_is_no_launch() -> None:
    assert detect_launcher(SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}).name == "none"


@pytest.mark.parametrize(
    "env",
    [
        OPEN_MPI,
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        {
            "MV2_COMM_WORLD_RANK": "1",
            "MV2_COMM_WORLD_SIZE": "2",
            "MV2_COMM_WORLD_LOCAL_RANK": "1",
            "MV2_COMM_WORLD_LOCAL_SIZE": "2",
        },
    ],
)
def test_mpi(env: dict[str, str]) -> None:
    launcher = detect_launcher(env)
    assert (launcher.name, ranks(launcher)) == ("mpi", (1, 2, 1, 2))
    assert dict(launcher.exports)["MASTER_ADDR"] == "127.0.0.1"
    assert dict(launcher.exports)["RANK"] == "1"


def test_mpi_over_machines_needs_an_address() -> None:
    spread = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    with pytest.raises(RequestError, match="MASTER_ADDR"):
        detect_launcher(spread)
    assert dict(detect_launcher(spread | {"MASTER_ADDR": "node1"}).exports)["MASTER_ADDR"] == "node1"


def test_kubernetes() -> None:
    launcher = detect_launcher(PYTORCHJOB)
    assert (launcher.name, ranks(launcher)) == ("kubernetes", (1, 2, 0, 1))
    # One process per pod: the job sets everything but the local rank.
    assert launcher.exports == (("LOCAL_RANK", "0"),)


def test_kubernetes_pod_for_several_processes_wants_torchrun() -> None:
    with pytest.raises(RequestError, match="torchrun"):
        detect_launcher(PYTORCHJOB | {"WORLD_SIZE": "8", "PET_NPROC_PER_NODE": "4"})
    assert detect_launcher(PYTORCHJOB | {"PET_NPROC_PER_NODE": "auto"}).name == "kubernetes"


def test_a_pod_without_a_job_is_no_launch() -> None:
    assert detect_launcher({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}).name == "none"


def test_env_obeys_what_would_be_stale() -> None:
    env = {name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"}
    launcher = detect_launcher(env | {"TRIMTAB_LAUNCHER": "env"})
    assert (launcher.name, ranks(launcher), launcher.stale) == ("env", (3, 4, 1, 2), ())


def test_env_without_the_variables_is_refused() -> None:
    with pytest.raises(RequestError, match="RANK is not set"):
        detect_launcher({"TRIMTAB_LAUNCHER": "env"})


def test_unknown_launcher_is_refused() -> None:
    with pytest.raises(RequestError, match="TRIMTAB_LAUNCHER=slurm"):
        detect_launcher({"TRIMTAB_LAUNCHER": "slurm"})


@pytest.mark.parametrize(
    ("env", "named"),
    [
        (TORCHRUN | {"RANK": "abc"}, "RANK=abc"),
        (TORCHRUN | {"RANK": "-1"}, "RANK=-1"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        (TORCHRUN | {"WORLD_SIZE": "2.0"}, "WORLD_SIZE=2.0"),
        (TORCHRUN | {"LOCAL_RANK": "x"}, "LOCAL_RANK=x"),
        (TORCHRUN | {"RANK": "4"}, "RANK=4 with WORLD_SIZE=4"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2 with LOCAL_WORLD_SIZE=2"),
        (SRUN | {"SLURM_PROCID": "one"}, "SLURM_PROCID=one"),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS=many"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4x2"}, "SLURM_STEP_TASKS_PER_NODE=4x2"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "two"}, "OMPI_COMM_WORLD_SIZE=two"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": ""}, "OMPI_COMM_WORLD_RANK is not set"),
        (PYTORCHJOB | {"RANK": "r1"}, "RANK=r1"),
    ],
)
def test_malformed_values_name_the_variable(env: dict[str, str], named: str) -> None:
    with pytest.raises(RequestError) as caught:
        detect_launcher(env)
    assert named in str(caught.value)
    assert "change:" in str(caught.value)


REPORT = """
import json
from trimtab.hardware import detect_launcher
found = detect_launcher()
print("FOUND" + json.dumps([found.name, found.rank, found.world_size, found.local_rank, found.stale]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["torch.distributed.run", "--standalone", "--nproc-per-node=2"],
        [
            *("accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--mixed_precision=no"),
            "--main_process_port=0",  # any free one; by itself it takes 29500 and fails where that is taken
        ],
    ],
    ids=["torchrun", "accelerate"],
)
def test_real_launchers(tmp_path: object, command: list[str]) -> None:
    script = f"{tmp_path}/report.py"
    with open(script, "w", encoding="utf-8") as file:
        file.write(REPORT)
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "MASTER_"))
    }
    answer = subprocess.run(
        [sys.executable, "-m", *command, script],
        capture_output=True,
        text=True,
        env=env,
        timeout=120,
        check=False,
    )
    found = sorted(
        json.loads(line.split("FOUND", 1)[1]) for line in answer.stdout.splitlines() if "FOUND" in line
    )
    assert found == [["torchrun", 0, 2, 0, []], ["torchrun", 1, 2, 1, []]], answer.stderr
