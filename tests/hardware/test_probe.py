"""What is in this machine, without torch where torch is not needed."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from trimtab.hardware import Accelerator, Cpu, Hardware, probe, probe_cpu
from trimtab.hardware.cgroup import MemoryLimit, memory_limit
from trimtab.hardware.nvml import driver_memory
from trimtab.hardware.probe import _torch_build

PROBE_TWICE = """
import dataclasses, json, sys
from trimtab.hardware import probe
fast = probe()
loaded = "torch" in sys.modules
import torch
slow = probe()
print(json.dumps([loaded, dataclasses.asdict(fast), dataclasses.asdict(slow)]))
"""


def cpu_build() -> bool:
    version, cuda, other = _torch_build()
    return bool(version) and cuda is None and not other and sys.platform == "linux"


@pytest.mark.skipif(not cpu_build(), reason="this torch has an accelerator to ask about, so it is imported")
def test_the_fast_path_needs_no_torch_and_says_the_same() -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    answer = subprocess.run(
        [sys.executable, "-c", PROBE_TWICE], capture_output=True, text=True, check=True, env=env, timeout=120
    )
    loaded, fast, slow = json.loads(answer.stdout)
    assert not loaded
    # Free memory is a reading of its moment; everything else is the machine's.
    assert fast["cpu"].pop("free_bytes") > 0
    assert slow["cpu"].pop("free_bytes") > 0
    assert fast == slow


def test_the_version_file_tells_what_torch_tells() -> None:
    import torch

    version, cuda, other = _torch_build()
    assert version == torch.__version__
    assert cuda == torch.version.cuda
    assert other == bool(torch.version.hip or torch.version.xpu)


def test_importing_the_room_imports_no_torch() -> None:
    code = "import sys, trimtab.hardware, trimtab.hardware.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_cpu() -> None:
    cpu = probe_cpu()
    assert 1 <= cpu.cores <= (os.cpu_count() or 1)
    assert 0 < cpu.free_bytes <= cpu.total_bytes <= psutil.virtual_memory().total
    assert cpu.model


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity on this system")
def test_cores_are_those_this_process_may_use() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from trimtab.hardware import probe_cpu; print(probe_cpu().cores)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert answer.stdout.strip() == "1"


def test_lookup() -> None:
    cpu = Cpu(model="test", cores=2, total_bytes=8, free_bytes=4, bf16=False)
    gpu = Accelerator(name="cuda:1", model="NVIDIA H200", total_bytes=9, free_bytes=9, bf16=True)
    mps = Accelerator(name="mps", model="Apple arm64", total_bytes=9, free_bytes=9, bf16=True)
    hardware = Hardware(cpu=cpu, accelerators=(gpu, mps))
    assert hardware.gpus == (gpu,)
    assert hardware.mps is mps
    assert hardware.get("cuda:1") is gpu
    assert hardware.get("cuda:0") is None


def test_a_known_cpu_is_not_measured_again() -> None:
    cpu = Cpu(model="given", cores=2, total_bytes=8, free_bytes=4, bf16=False)
    assert probe(cpu=cpu).cpu is cpu


def cgroup(tmp_path: Path, lines: str, files: dict[str, str]) -> MemoryLimit | None:
    own = tmp_path / "own"
    own.write_text(lines, encoding="utf-8")
    for name, text in files.items():
        file = tmp_path / "root" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n", encoding="utf-8")
    return memory_limit(tmp_path / "root", own)


def test_container_limit(tmp_path: Path) -> None:
    # Of 600 used, 200 are cached files that go when memory is needed.
    files = {"memory.max": "1000", "memory.current": "600", "memory.stat": "anon 400\ninactive_file 200"}
    assert cgroup(tmp_path, "0::/\n", files) == MemoryLimit(1000, 600)


def test_the_tightest_group_counts(tmp_path: Path) -> None:
    files = {
        "job/memory.max": "1000",
        "job/memory.current": "900",
        "job/step/memory.max": "max",
        "job/step/task/memory.max": "500",
        "job/step/task/memory.current": "100",
    }
    assert cgroup(tmp_path, "0::/job/step/task\n", files) == MemoryLimit(500, 100)


def test_version_one_of_control_groups(tmp_path: Path) -> None:
    files = {
        "memory/slurm/memory.limit_in_bytes": "2000",
        "memory/slurm/memory.usage_in_bytes": "500",
        "memory/slurm/memory.stat": "cache 5\ntotal_inactive_file 100",
        "memory/memory.limit_in_bytes": "9223372036854771712",
    }
    assert cgroup(tmp_path, "5:cpu:/slurm\n4:memory:/slurm\n", files) == MemoryLimit(2000, 1600)


def test_a_path_of_the_host_is_not_there_in_a_container(tmp_path: Path) -> None:
    files = {"memory/memory.limit_in_bytes": "2000", "memory/memory.usage_in_bytes": "500"}
    assert cgroup(tmp_path, "4:memory:/docker/0d00f5\n", files) == MemoryLimit(2000, 1500)


def test_no_limit(tmp_path: Path) -> None:
    assert cgroup(tmp_path, "0::/\n", {"memory.max": "max"}) is None
    assert memory_limit(tmp_path / "nowhere", tmp_path / "nothing") is None


def test_an_unknown_gpu_has_no_driver_memory() -> None:
    assert driver_memory("GPU-00000000-0000-0000-0000-000000000000") is None


FREE_WITHOUT_CONTEXT = """
import dataclasses, json
from trimtab.hardware import probe
from trimtab.hardware.nvml import driver_memory
import torch
found = probe().gpus[0]
again = probe().gpus[0]
free, total = torch.cuda.mem_get_info(0)
print(json.dumps([found.free_bytes, again.free_bytes, free, total, dataclasses.asdict(found)]))
"""


@pytest.mark.gpu(needs="a driver that tells what contexts take")
def test_looking_at_a_gpu_takes_none_of_its_memory() -> None:
    if not probe().gpus:
        pytest.skip("no CUDA device here")
    answer = subprocess.run(
        [sys.executable, "-c", FREE_WITHOUT_CONTEXT], capture_output=True, text=True, check=True, timeout=120
    )
    first, second, after_context, total, gpu = json.loads(answer.stdout)
    assert gpu["total_bytes"] == total
    assert abs(first - second) < 100 * 2**20
    # Asking torch opens a context: several hundred MiB that the probe left alone.
    assert second - after_context > 100 * 2**20


def test_records_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        probe_cpu().cores = 3  # type: ignore[misc]
