"""Settings in the environment that change a run behind its user's back. It reads them; it never sets one.

What is checked is what torch, Accelerate, transformers and NCCL read by themselves: a value left over from an
older job overrides a config without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from trimtab.hardware.findings import Level, Remark, shown_value
from trimtab.hardware.nvidia import NvidiaDriver
from trimtab.hardware.probe import Hardware

MANY_CORES = 4

_OFF = frozenset({"", "0", "no", "none", "false", "off", "n", "f"})

# What each switch does when it is on.
_OFFLINE = dict.fromkeys(
    ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"),
    "nothing is fetched from the hub; what is cached or local works",
)
_ACCELERATE_CPU = {"ACCELERATE_USE_CPU": "every Accelerate script trains on the CPU"}
_ACCELERATE = {
    "ACCELERATE_TORCH_DEVICE": "puts every Accelerate script on this device",
    "ACCELERATE_MIXED_PRECISION": "replaces fp32 by this precision in every Accelerate script",
    "ACCELERATE_USE_FSDP": "switches sharding on",
    "ACCELERATE_USE_DEEPSPEED": "switches DeepSpeed on",
    "ACCELERATE_USE_MEGATRON_LM": "switches Megatron-LM on",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "switches a parallel layout on",
    "ACCELERATE_DYNAMO_BACKEND": "compiles the model",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "changes gradient accumulation",
    "ACCELERATE_BYPASS_DEVICE_MAP": "lets a split model into a multi-process run",
}
_ACCELERATE_SLOW = {"ACCELERATE_DEBUG_MODE": "checks every exchange between processes; slow"}
_SLOWER_ON_GPU = {
    "CUDA_LAUNCH_BLOCKING": "makes every GPU operation wait for the one before; a debugging aid, and slow",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "turns off torch's memory cache; a debugging aid, and slow",
}
_MPS = {"PYTORCH_ENABLE_MPS_FALLBACK": "operations that the Apple GPU lacks run on the CPU without a word"}
_NCCL_NOTES = {
    "NCCL_P2P_DISABLE": "GPUs exchange data through main memory",
    "NCCL_IB_DISABLE": "InfiniBand is not used between machines",
    "NCCL_SHM_DISABLE": "processes of one machine exchange data through the network stack",
    "NCCL_BLOCKING_WAIT": "every exchange between GPUs is waited for",
    "TORCH_NCCL_BLOCKING_WAIT": "every exchange between GPUs is waited for",
}
_WITHOUT_EFFECT = {
    "TRANSFORMERS_CACHE": "transformers 5 does not read it; set HF_HOME",
    "WANDB_DISABLED": "transformers 5 does not read it; set report_to",
}


def check_environment(
    env: Mapping[str, str],
    hardware: Hardware,
    driver: NvidiaDriver,
    interfaces: Iterable[str] = (),
) -> Iterator[Remark]:
    """Everything set in `env` that would bite on this machine or is worth knowing."""
    yield from _visible_devices(env, hardware, driver)
    yield from _switched_on(env, _OFFLINE, "note", "unset {} to fetch models and data")
    yield from _threads(env, hardware)
    yield from _switched_on(env, _ACCELERATE_CPU, "bite" if hardware.accelerators else "note")
    yield from _switched_on(env, _ACCELERATE, "bite")
    yield from _switched_on(env, _ACCELERATE_SLOW, "note")
    yield from _accelerate_file(env)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        if name in env:
            change = f"set PYTORCH_ALLOC_CONF={_value(env, name)}"
            yield Remark("note", name, "the old name of PYTORCH_ALLOC_CONF", change)
    yield from _switched_on(env, _SLOWER_ON_GPU, "bite" if hardware.gpus else "note")
    yield from _nccl(env, hardware)
    yield from _interfaces(env, tuple(interfaces))
    if hardware.mps is not None:
        yield from _switched_on(env, _MPS, "note", "unset {} to see which ones they are")
    for name, why in _WITHOUT_EFFECT.items():
        if name in env:
            yield Remark("note", name, f"has no effect: {why}", f"unset {name}")


def _switched_on(
    env: Mapping[str, str], effects: Mapping[str, str], level: Level, change: str = "unset {}"
) -> Iterator[Remark]:
    for name, effect in effects.items():
        value = env.get(name, "").strip().lower()
        if value not in _OFF and not (name.endswith("_STEPS") and value == "1"):
            yield Remark(level, name, f"{_value(env, name)}: {effect}", change.format(name))


def _visible_devices(env: Mapping[str, str], hardware: Hardware, driver: NvidiaDriver) -> Iterator[Remark]:
    name = "CUDA_VISIBLE_DEVICES"
    if name not in env or not hardware.torch_version:
        return
    value, seen = _value(env, name), len(hardware.gpus)
    entries = [part.strip() for part in env[name].split(",")]
    named = sum(map(bool, entries))
    # It leaves nothing to see when it is empty, or its first entry is no device.
    if not entries[0] or entries[0].startswith("-") or entries[0].lower() in ("none", "nodevfiles"):
        if hardware.cuda_build is not None and driver.present:
            yield Remark("bite", name, f"{value!r} hides every GPU of this machine", f"unset {name}")
        else:
            yield Remark("note", name, f"{value!r}: no GPU is visible, and none would be without it")
    elif hardware.cuda_build is None:
        yield Remark(
            "bite",
            name,
            f"{value} asks for a GPU, but this torch is built without CUDA: it would train on the CPU",
            f"install a CUDA build of torch, or unset {name}",
        )
    elif seen < named:
        yield Remark(
            "bite",
            name,
            f"{value} names {named} GPU{'s' * (named > 1)}, and torch sees {seen}: what follows an entry that does "
            "not exist is dropped",
            f"set {name} to GPUs that are there (`nvidia-smi -L` counts them from 0)",
        )
    else:
        yield Remark("ok", name, f"{value}: {seen} visible")


def _threads(env: Mapping[str, str], hardware: Hardware) -> Iterator[Remark]:
    cores = hardware.cpu.cores
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if env.get(name, "").strip() == "1" and cores >= MANY_CORES:
            yield Remark(
                "note" if hardware.accelerators or hardware.launcher.multi_process else "bite",
                name,
                f"1: the CPU's work uses one of {cores} cores",
                f"unset {name}, or set it to {cores}",
            )


def _accelerate_file(env: Mapping[str, str]) -> Iterator[Remark]:
    """Where `accelerate launch` looks for its defaults."""
    cache = Path(env.get("XDG_CACHE_HOME") or "~/.cache")
    home = Path(env.get("HF_HOME") or cache / "huggingface")
    file = home.expanduser() / "accelerate" / "default_config.yaml"
    if not file.is_file():
        return
    wanted = ("distributed_type", "num_processes", "mixed_precision", "use_cpu")
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line.strip() for line in lines if line.partition(":")[0] in wanted]
    yield Remark(
        "note",
        "accelerate config",
        f"{file} changes every `accelerate launch` ({', '.join(said) or 'no known setting in it'})",
        "delete it if it is not meant; `trimtab train` does not read it",
    )


def _nccl(env: Mapping[str, str], hardware: Hardware) -> Iterator[Remark]:
    yield from _switched_on(env, _NCCL_NOTES, "note", "unset {} unless it is needed")
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        if env.get(name, "").strip() == "0":
            yield Remark(
                "bite" if len(hardware.gpus) > 1 or hardware.launcher.multi_process else "note",
                name,
                "0: when one process fails, the others wait for it for ever",
                f"unset {name}",
            )
    if env.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE"):
        yield Remark(
            "note", "NCCL_DEBUG", f"{_value(env, 'NCCL_DEBUG')}: NCCL writes a lot", "unset NCCL_DEBUG"
        )


def _interfaces(env: Mapping[str, str], there: tuple[str, ...]) -> Iterator[Remark]:
    """Network interfaces by name: one that does not exist makes every process wait, then fail."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = env.get(name, "").strip()
        # NCCL's `^eth` excludes; an exclusion cannot name something that is missing.
        if not value or value.startswith("^") or not there:
            continue
        exact = name.startswith("GLOO") or value.startswith("=")
        asked = [part.strip() for part in value.lstrip("=").split(",") if part.strip()]
        if not any(i == part if exact else i.startswith(part) for part in asked for i in there):
            yield Remark(
                "bite",
                name,
                f"{_value(env, name)}: no such network interface here ({', '.join(there)})",
                f"unset {name}, or set it to one of these",
            )


def _value(env: Mapping[str, str], name: str) -> str:
    return shown_value(name, env[name])
