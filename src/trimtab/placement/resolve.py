"""Decides, once: from what was asked and what is there to one plan, or to an error that names the way out.

Nothing here falls back silently. Every decision writes its reason into the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from trimtab.hardware import Accelerator, Hardware
from trimtab.placement.plan import (
    MemoryShare,
    PlacementPlan,
    PlacementRequest,
    Precision,
    Speed,
    Strategy,
)
from trimtab.placement.profile import ModelProfile, Workload
from trimtab.placement.sizing import GIB, PlacementError, Sizing
from trimtab.placement.speed import SpeedRequest, choose_speed, computed_so


def check_request(request: PlacementRequest, hardware: Hardware) -> None:
    """Everything that can be refused without knowing the model: cheap, and called before anything is loaded."""
    device, _ = _choose_device(request, hardware)
    _choose_precision(request, hardware, device)
    _check_processes(request, hardware, device)
    _check_model_parallel(request, hardware, device)
    _check_sharding(request, hardware, device)


def resolve(
    request: PlacementRequest,
    hardware: Hardware,
    profile: ModelProfile | None = None,
    work: Workload | None = None,
    *,
    full_tuning: bool = False,
    speed: SpeedRequest | None = None,
    alone: MemoryShare | None = None,
    refuses: bool = True,
) -> PlacementPlan:
    """The plan for this request on this hardware. Without a profile, a model is taken to fit on one device, and
    without a request for speed every step is computed plainly.

    `alone` is what the whole model needs on one GPU, where that was executed and needs no estimate. With `refuses` off
    no estimate is taken for a proof that the model does not fit: the plan is executed before it counts.
    """
    check_request(request, hardware)
    device, device_reason = _choose_device(request, hardware)
    precision, precision_reason = _choose_precision(request, hardware, device)
    work = work or Workload()
    # Gradients need fp32 weights; steps without gradients tune the weights in the format they compute in.
    weights: Precision = "fp32" if full_tuning and work.training else precision
    launched = hardware.launcher.name != "none"
    local = hardware.launcher.local_world_size if launched else request.processes or 1
    fast: Speed = Speed()
    whys: Mapping[str, str] = {}
    if speed is not None:
        # As on one device: where the model is to be split, it is looked at again.
        fast, whys = choose_speed(speed, hardware, device, precision, "single", training=work.training)
    first = computed_so(work, fast, one_product=not full_tuning)
    sizing = Sizing(profile, first, weights, precision, hardware, local, alone=alone, refuses=refuses)
    choice = _choose_strategy(request, hardware, device, sizing)
    if speed is not None and choice.strategy != "single":
        fast, whys = choose_speed(speed, hardware, device, precision, choice.strategy, training=work.training)
        one_product = not full_tuning and choice.strategy != "split"
        sizing = replace(sizing, work=computed_so(work, fast, one_product=one_product))
    if choice.strategy == "sharded" and not work.training:
        raise PlacementError.of(
            f"a sharded model ({choice.reason}) without gradients",
            "zeroth-order steps compute with whole weights in each process",
            "set processes=1 and model_parallel=true to split the model over the GPUs",
        )
    four_bit = profile.four_bit if profile else 0
    if four_bit:
        _check_four_bit(device, choice)
    scaler = precision == "fp16" and work.training
    reasons = {
        "device": device_reason,
        "precision": precision_reason,
        "scaler": "fp16 gradients underflow without one"
        if scaler
        else f"{precision} needs none"
        if work.training
        else "there are no gradients",
        "weights": _weights_reason(weights, precision, full_tuning) + _four_bit_reason(profile),
        "strategy": choice.reason,
        **whys,
    }
    looks = choice.strategy == "data_parallel" and profile is not None and profile.routed
    if choice.strategy == "data_parallel" and work.training:
        reasons["ddp"] = _ddp_reason(looks)
    device_map: Mapping[str, str] | None = None
    memory: Mapping[str, MemoryShare]
    if choice.strategy == "split":
        device_map, memory = sizing.split(device)
        rest = _rest(device_map, profile, device)
        reasons["device_map"] = f"layers in order, each GPU about equally full; {rest}"
    else:
        used = [device]
        if choice.processes > 1 and not launched and device.startswith("cuda"):
            used = [gpu.name for gpu in hardware.gpus[: choice.processes]]
        memory = sizing.shares(used, shards=choice.processes if choice.strategy == "sharded" else 1)
    notes = (hardware.launcher.stale_note(), sizing.tight_note(device))
    return PlacementPlan(
        device=device,
        precision=precision,
        scaler=scaler,
        weight_precision=weights,
        trainable_precision=weights if full_tuning else "fp32",
        strategy=choice.strategy,
        device_map=device_map,
        processes=choice.processes,
        unused_parameters=looks,
        launcher=hardware.launcher.name,
        memory=memory,
        speed=fast,
        reasons=reasons,
        notes=tuple(note for note in notes if note),
    )


def _ddp_reason(looks: bool) -> str:
    unused = (
        "find_unused_parameters on: no token may go to some of the experts that are trained"
        if looks
        else "find_unused_parameters off: every trained tensor takes part in every step"
    )
    return (
        f"{unused}; static_graph off: steps differ in their graphs, and nothing is checkpointed re-entrantly"
    )


def _choose_device(request: PlacementRequest, hardware: Hardware) -> tuple[str, str]:
    asked, gpus, launcher = request.device, hardware.gpus, hardware.launcher
    if asked == "cpu":
        return "cpu", "asked for"
    if asked == "mps" and hardware.mps is None:
        raise PlacementError.of(
            "device=mps: there is no Apple GPU that torch can use here",
            f"torch {hardware.torch_version} reports no MPS device",
            "set device=auto or device=cpu",
        )
    if asked == "mps":
        return "mps", "asked for"
    if asked.startswith("cuda:"):
        return _indexed_gpu(asked, hardware)
    if asked not in ("auto", "cuda"):
        raise PlacementError.of(
            f"device={asked}: not a device", "known are auto, cpu, cuda, cuda:N and mps", "use one of these"
        )
    if asked == "cuda" and not gpus:
        raise _no_cuda(asked, hardware)
    if gpus:
        why = "asked for" if asked == "cuda" else "a GPU is there"
        if not launcher.multi_process:
            return "cuda:0", f"{why}: {_describe(gpus[0])}"
        own = _gpu_of_rank(hardware)
        return own.name, f"{why}: {_describe(own)}; local rank {launcher.local_rank}"
    if hardware.mps is not None:
        return "mps", f"the Apple GPU is there: {hardware.mps.model}"
    return "cpu", f"no GPU is there; {hardware.cpu.model}, {hardware.cpu.cores} cores"


def _indexed_gpu(asked: str, hardware: Hardware) -> tuple[str, str]:
    launcher, gpu = hardware.launcher, hardware.get(asked)
    if not hardware.gpus:
        raise _no_cuda(asked, hardware)
    if gpu is None:
        raise PlacementError.of(
            f"device={asked}: there is no GPU with this index",
            f"visible here: {', '.join(g.name for g in hardware.gpus)}",
            "use one of these, or check CUDA_VISIBLE_DEVICES (an index counts from 0 within it)",
        )
    if launcher.multi_process:
        raise PlacementError.of(
            f"device={asked} under {launcher.name} with {launcher.world_size} processes",
            "every process would use the same GPU",
            "set device=cuda and let each process take its own GPU",
        )
    return asked, f"asked for: {_describe(gpu)}"


def _gpu_of_rank(hardware: Hardware) -> Accelerator:
    launcher, gpus = hardware.launcher, hardware.gpus
    if launcher.local_rank < len(gpus):
        return gpus[launcher.local_rank]
    if launcher.name in ("slurm", "mpi") and len(gpus) == 1:
        # With --gpus-per-task each process sees its own GPU alone, as cuda:0.
        return gpus[0]
    raise PlacementError.of(
        f"device=cuda: local rank {launcher.local_rank} has no GPU of its own",
        f"{launcher.name} started {launcher.local_world_size} processes here, and {len(gpus)} GPUs are visible",
        "start at most one process per GPU, make more GPUs visible, or set device=cpu",
    )


def _no_cuda(asked: str, hardware: Hardware) -> PlacementError:
    return PlacementError.of(
        f"device={asked}: there is no CUDA device here",
        "this torch is built without CUDA"
        if hardware.cuda_build is None
        else f"torch is built for CUDA {hardware.cuda_build}, but no GPU is visible to it",
        "set device=auto or device=cpu, or install a CUDA build of torch on a machine with a GPU",
    )


def _choose_precision(request: PlacementRequest, hardware: Hardware, device: str) -> tuple[Precision, str]:
    asked, kind, cpu = request.precision, device.split(":")[0], hardware.cpu
    # Layers and ranks must agree on the format, so every GPU that the run may use has a say.
    every = hardware.gpus if kind == "cuda" and ":" not in request.device else ()
    gpus = every or tuple(a for a in hardware.accelerators if a.name == device)
    lacking = next((gpu for gpu in gpus if not gpu.bf16), None)
    if asked == "fp32":
        return "fp32", "asked for"
    if asked == "fp16":
        if kind != "cuda":
            raise PlacementError.of(
                f"precision=fp16 on {device}",
                "fp16 training needs a gradient scaler and fp16 kernels, which only CUDA has",
                "set precision=fp32, or precision=bf16 where the hardware has it",
            )
        return "fp16", "asked for; gradients are scaled, trainable weights stay fp32"
    if asked == "bf16":
        if kind == "cpu" and not cpu.bf16:
            raise PlacementError.of(
                "precision=bf16 on cpu",
                f"{cpu.model} does not compute bf16 natively; it would run many times slower than fp32",
                "set precision=fp32 (or auto)",
            )
        if lacking is not None:
            raise PlacementError.of(
                f"precision=bf16 on {lacking.name}",
                f"{_named(lacking)} has no native bf16",
                "set precision=auto, or use only GPUs that have it (device=cuda:N, CUDA_VISIBLE_DEVICES)"
                if kind == "cuda"
                else "set precision=fp32",
            )
        return "bf16", "asked for; the hardware has it natively"
    if asked != "auto":
        raise PlacementError.of(
            f"precision={asked}: not a precision", "known are auto, fp32, bf16 and fp16", "use one of these"
        )
    if kind == "mps":
        return "fp32", "the safe choice on Apple GPUs; bf16 by request"
    if kind == "cpu":
        also = "this one also has native bf16, by request" if cpu.bf16 else "this one has no native bf16"
        return "fp32", f"the same numbers on every processor; {also}"
    if lacking is None:
        return "bf16", f"native on {_named(gpus[0])}"
    oldest = min(gpus, key=lambda gpu: float(gpu.capability or 0))
    if float(oldest.capability or 0) >= 7.0:
        return "fp16", f"{_named(lacking)} has fp16 tensor cores but no bf16"
    return "fp32", f"{_named(oldest)} has no fast 16-bit arithmetic"


def _check_processes(request: PlacementRequest, hardware: Hardware, device: str) -> None:
    launcher, wanted = hardware.launcher, request.processes
    if wanted is not None and wanted < 1:
        raise PlacementError.of(f"processes={wanted}", "a run has at least one process", "set processes=1")
    if launcher.name != "none" and wanted not in (None, launcher.world_size):
        raise PlacementError.of(
            f"processes={wanted}, but {launcher.name} started {launcher.world_size}",
            "under a launcher the launcher decides",
            "leave processes out",
        )
    count = _processes(request, hardware) or 1
    if count > 1 and (device == "mps" or ":" in request.device):
        how = f"processes={count}" if launcher.name == "none" else f"{count} processes ({launcher.name})"
        raise PlacementError.of(
            f"{how} with device={device}",
            "there is one device for all of them",
            "set processes=1 (and start without a launcher), or device=cpu or device=cuda",
        )
    if device.startswith("cuda") and launcher.name == "none" and count > len(hardware.gpus):
        raise PlacementError.of(
            f"processes={count} with {len(hardware.gpus)} GPUs",
            "each process takes one GPU",
            f"set processes={len(hardware.gpus)}, or device=cpu",
        )


def _check_model_parallel(request: PlacementRequest, hardware: Hardware, device: str) -> None:
    launcher, gpus = hardware.launcher, hardware.gpus
    if not request.model_parallel:
        return
    if launcher.multi_process:
        raise PlacementError.of(
            f"model_parallel=true under {launcher.name} with {launcher.world_size} processes",
            "a split model takes every GPU for one process; the other processes would use the same ones",
            f"start without {launcher.name}, or set model_parallel=false (and sharding=true if it does not fit)",
        )
    if not device.startswith("cuda") or ":" in request.device:
        raise PlacementError.of(
            f"model_parallel=true with device={device}",
            "a split model takes several GPUs, and this is one device",
            "set device=cuda on a machine with two GPUs, or model_parallel=false",
        )
    if len(gpus) < 2:
        raise PlacementError.of(
            f"model_parallel=true with {len(gpus)} GPU",
            "a split needs at least two GPUs in one process",
            "set model_parallel=false or null, or make two GPUs visible (CUDA_VISIBLE_DEVICES=0,1)",
        )
    if request.sharding or (request.processes or 1) > 1:
        raise PlacementError.of(
            "model_parallel=true together with "
            + ("sharding=true" if request.sharding else "several processes"),
            "a split model lives in one process; sharding spreads it over several",
            "choose one: model_parallel=true, or sharding=true with processes",
        )


def _check_sharding(request: PlacementRequest, hardware: Hardware, device: str) -> None:
    if not request.sharding:
        return
    if not device.startswith("cuda"):
        raise PlacementError.of(
            f"sharding=true with device={device}",
            "FSDP shards over CUDA GPUs only",
            "set sharding=false, or device=cuda on a machine with GPUs",
        )
    if (_processes(request, hardware) or len(hardware.gpus)) < 2:
        raise PlacementError.of(
            "sharding=true with one process",
            "weights are sharded over processes, one GPU each, and there is one",
            "set sharding=false, or processes to 2 or more on a machine with as many GPUs",
        )


def _processes(request: PlacementRequest, hardware: Hardware) -> int | None:
    """How many processes there are to be: the launcher's word, else what was asked; None leaves it open."""
    if hardware.launcher.name != "none":
        return hardware.launcher.world_size
    # A named GPU is one device, and a forbidden split keeps to one, unless more are asked for.
    one = ":" in request.device or (request.model_parallel is False and not request.sharding)
    return request.processes or (1 if one else None)


@dataclass(frozen=True)
class _Choice:
    strategy: Strategy
    processes: int
    reason: str


def _choose_strategy(request: PlacementRequest, hardware: Hardware, device: str, sizing: Sizing) -> _Choice:
    launcher, gpus = hardware.launcher, hardware.gpus
    count = _processes(request, hardware)
    by = f"{launcher.name} started" if launcher.name != "none" else "asked for:"
    if not device.startswith("cuda"):
        if count is not None and count > 1:
            return _Choice("data_parallel", count, f"{by} {count} processes, each takes its own rows")
        return _Choice("single", 1, "one device")
    if request.model_parallel:
        return _Choice("split", 1, f"asked for: one model over {len(gpus)} GPUs")
    if count is None and len(gpus) > 1:
        return _choose_over_all(request, hardware, device, sizing)
    if count is not None and count > 1:
        return _choose_for_several(request, hardware, device, sizing, count, by)
    if sizing.fits(device):
        alone = f"{by} one process, and the model fits on {device}" if len(gpus) > 1 else "one GPU is there"
        if len(gpus) > 1 and launcher.name == "none" and request.processes is None:
            alone = f"model_parallel=false forbids a split, and the model fits on {device}; processes asks for more"
        return _Choice("single", 1, "one GPU asked for" if ":" in request.device else alone)
    if len(gpus) > 1 and ":" not in request.device and request.model_parallel is None:
        return _Choice("split", 1, f"{by} one process; {sizing.misfit(device)}; split over {len(gpus)} GPUs")
    if sizing.refuses or sizing.alone is not None:
        raise sizing.too_large(device)
    return _Choice("single", 1, "one GPU is there")


def _choose_for_several(
    request: PlacementRequest, hardware: Hardware, device: str, sizing: Sizing, count: int, by: str
) -> _Choice:
    """A given number of processes, one GPU each."""
    launched = hardware.launcher.name != "none"
    fits = sizing.fits_when_empty() if launched else all(sizing.fits(g.name) for g in hardware.gpus[:count])
    if request.sharding:
        return _Choice("sharded", count, f"sharding asked for; {by} {count} processes")
    if fits:
        return _Choice("data_parallel", count, f"{by} {count} processes, each takes its own rows")
    if request.sharding is None:
        return _Choice("sharded", count, f"{by} {count} processes; {sizing.misfit(device)}")
    if sizing.refuses or sizing.alone is not None:
        raise sizing.too_large(device)
    return _Choice("data_parallel", count, f"{by} {count} processes, each takes its own rows")


def _choose_over_all(request: PlacementRequest, hardware: Hardware, device: str, sizing: Sizing) -> _Choice:
    """Several GPUs, and nobody has said how many processes."""
    gpus = hardware.gpus
    small = [gpu.name for gpu in gpus if not sizing.fits(gpu.name)]
    if request.sharding:
        return _Choice("sharded", len(gpus), f"sharding asked for, over {len(gpus)} GPUs")
    if not small:
        why = f"the model fits on one GPU, so each of {len(gpus)} takes its own rows"
        return _Choice("data_parallel", len(gpus), why)
    if device not in small:
        return _Choice("single", 1, f"the model fits on {device}, but not on {', '.join(small)}")
    return _Choice("split", 1, f"{sizing.misfit(device)}; split over {len(gpus)} GPUs")


def _weights_reason(weights: Precision, precision: Precision, full_tuning: bool) -> str:
    if full_tuning and weights != "fp32":
        return f"all weights are tuned in {weights}, as they are computed with: there are no gradients"
    if full_tuning and precision != "fp32":
        return f"all weights are trained, so they stay fp32; {precision} is used in the computation"
    if weights == "fp32":
        return "fp32 throughout"
    return f"frozen weights in {weights}, trainable ones in fp32"


def _check_four_bit(device: str, choice: _Choice) -> None:
    if device == "mps":
        raise PlacementError.of(
            "model.quantize on the Apple GPU",
            "four-bit weights have not been tried there",
            "remove model.quantize, or set device=cpu",
        )
    if choice.strategy == "sharded":
        raise PlacementError.of(
            f"model.quantize with a sharded model ({choice.reason})",
            "FSDP shards parameters of floating point, and packed weights are bytes",
            "set sharding=false where the four-bit model fits on each GPU, or split it over the GPUs of one process "
            "with processes=1 and model_parallel=true; or remove model.quantize",
        )


def _four_bit_reason(profile: ModelProfile | None) -> str:
    if profile is None or not profile.four_bit:
        return ""
    whole = profile.parameters - profile.trainable
    share = f"{profile.four_bit / 1e6:,.0f} of {whole / 1e6:,.0f} million frozen weights"
    rest = (
        ""
        if 2 * profile.four_bit > whole
        else "; the others are no linear layers (embeddings, joined experts)"
    )
    return f"; {share} are held in four bits (model.quantize), and unpacked for each product{rest}"


def _rest(device_map: Mapping[str, str], profile: ModelProfile | None, primary: str) -> str:
    """Where what is no layer lies."""
    layers = {part.name for part in profile.layers} if profile else set()
    apart = {name: on for name, on in device_map.items() if name not in layers and on != primary}
    if not apart:
        return f"all else on {primary}"
    moved = ", ".join(f"{name} on {on}" for name, on in apart.items())
    return f"{moved}, for which {primary} has no room; all else on {primary}"


def _named(gpu: Accelerator) -> str:
    return f"{gpu.model} (compute capability {gpu.capability})" if gpu.capability else gpu.model


def _describe(gpu: Accelerator) -> str:
    return f"{gpu.model}, {gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free"
