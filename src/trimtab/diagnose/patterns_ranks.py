"""Known error texts about several processes: DDP, collectives, launchers."""

from __future__ import annotations

from trimtab.diagnose.pattern import Pattern

RANK_PATTERNS: tuple[Pattern, ...] = (
    Pattern(
        "ddp-ready-twice: ddp-ready-twice-checkpoint",
        r"Expected to mark a variable ready only once",
        "DDP saw a parameter's gradient twice: re-entrant gradient checkpointing together with"
        " find_unused_parameters=True, a module run twice in one step, or requires_grad changed after"
        " wrapping",
        'gradient_checkpointing_kwargs={{"use_reentrant": False}} and find_unused_parameters=False;'
        " freeze and unfreeze before wrapping in DDP, never after",
    ),
    Pattern(
        "ddp-unused: ddp-unused",
        r"Expected to have finished reduction in the prior iteration before starting a new one",
        "some trainable parameters took no part in the loss, and DDP waits for their gradients: a branch "
        "that forward does not run, or outputs in an object that DDP cannot look into",
        "freeze or remove what is unused (p.requires_grad_(False) before DDP), use every output in the loss, "
        "or pass find_unused_parameters=True; TORCH_DISTRIBUTED_DEBUG=DETAIL prints the names",
    ),
    Pattern(
        "no-gradient: ddp-no-gradient",
        r"DistributedDataParallel is not needed when a module doesn't have any parameters that require a"
        r" gradient",
        "everything is frozen, so DDP has nothing to average",
        "add the adapters (or unfreeze) before wrapping; leave a frozen reference model unwrapped",
    ),
    Pattern(
        "ranks-disagree: ddp-models-differ",
        r"DDP expects same model across all ranks, but Rank \d+ has|params\[\d+\] in this process with sizes "
        r".{0,80} appears not to match",
        "the ranks built different models: another config, vocabulary, adapter or a freeze that depends"
        " on the rank",
        "build the model from the same settings on every rank, before anything that depends on rank or data",
    ),
    Pattern(
        "ranks-disagree: collective-mismatch",
        r"Detected mismatch between collectives on ranks|Detected mismatched collectives",
        "the ranks do not call the same collective with the same shape: a branch depends on rank or on"
        " the data",
        "call the same collectives in the same order on every rank; put only printing and saving under"
        " `if rank == 0`",
    ),
    Pattern(
        "ranks-disagree: nccl-timeout",
        r"Watchdog caught collective operation timeout:?(?: WorkNCCL\((?P<work>[^)]*)\))?(?: ran for \d+ "
        r"milliseconds before timing out)?",
        "one rank waited for a collective that another never joined: unequal numbers of batches, a branch on "
        "rank or data, evaluation or saving on rank 0 only, or a rank that crashed before (look for the first"
        " error)",
        "give every rank the same number of steps (drop_last=True, DistributedSampler, or `with "
        "ddp.join():`) and the same branches; a longer time-out only postpones it",
        consequence=True,
    ),
    Pattern(
        "ranks-disagree: gloo-timeout",
        r"Timed out waiting \d+ ?ms for (?:recv|send) operation|Timed out waiting for recv operation|"
        r"Application timeout caused pair closure",
        "a rank waited for a partner that had left the loop or stands in another collective",
        "give every rank the same number of steps (drop_last=True or `with ddp.join():`) and the same"
        " collectives",
        consequence=True,
    ),
    Pattern(
        "ranks-disagree: peer-gone",
        r"Connection closed by peer|(?:recvBytes|sendBytes|recvValue) failed|Connection reset by "
        r"peer.{0,80}?(?:gloo|nccl)|(?:gloo|nccl).{0,120}?Connection reset by peer",
        "another rank died; this one only noticed",
        "look for the first error in the log, on the rank that ended first",
        consequence=True,
    ),
    Pattern(
        "stale-launcher: stale-store",
        r"(?:DistStoreError: )?Timed out after \d+ seconds waiting for clients\."
        r" (?P<there>\d+)/(?P<all>\d+) clients joined",
        "{all} processes were announced and {there} came: WORLD_SIZE and RANK are left over from an earlier "
        "launch, or the other processes did not start",
        "unset WORLD_SIZE RANK LOCAL_RANK MASTER_ADDR MASTER_PORT for a single process, or start all with"
        " torchrun --nproc_per_node; trust these variables only where TORCHELASTIC_RUN_ID is set",
    ),
    Pattern(
        "stale-launcher: store-connect",
        r"(?:DistNetworkError|The client socket has (?:failed|timed out)|Failed to connect to \S+:\d+|"
        r"connect\(\) timed out).{0,160}?(?:server|host|\d{4,5}|TCPStore)",
        "no process listens at MASTER_ADDR:MASTER_PORT: a stale address, another interface, or rank 0 is"
        " gone",
        "start with torchrun (it sets the address), or set MASTER_ADDR to rank 0's reachable address",
    ),
    Pattern(
        "stale-launcher: rendezvous-variables",
        r"Error initializing torch\.distributed using env:// rendezvous: environment variable"
        r" (?P<var>\w+) expected, but not set",
        "the script expects a launcher and was started with plain python: {var} is not set",
        "torchrun --standalone --nproc_per_node=N train.py",
    ),
    Pattern(
        "stale-launcher: rank-variable-missing",
        r"KeyError: ['\"](?P<var>LOCAL_RANK|RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|LOCAL_WORLD_SIZE|SLURM_\w+)['\"]",
        "{var} is set by a launcher, and this process was started without one",
        'torchrun --standalone --nproc_per_node=N train.py, or int(os.environ.get("{var}", 0))',
    ),
    Pattern(
        "stale-launcher: no-process-group",
        r"Default process group has not been initialized",
        "a distributed call runs before init_process_group, or in a run that is not distributed at all",
        "torch.distributed.init_process_group() first (under torchrun), or guard with"
        " `if torch.distributed.is_initialized()`",
    ),
    Pattern(
        "stale-launcher: process-group-twice",
        r"trying to initialize the default process group twice",
        "the script and a library (accelerate, Trainer, deepspeed) both initialise the process group",
        "let one do it: drop your init_process_group call, or guard it with `if not dist.is_initialized()`",
    ),
    Pattern(
        "stale-launcher: port-in-use",
        r"EADDRINUSE|(?:errno: ?98\b.{0,60})?(?:The server socket has failed to "
        r"(?:listen|bind).{0,200}?)?Address already in use|地址已(?:在|被)使用",
        "another job (or one that did not end) holds MASTER_PORT",
        "torchrun --standalone (takes a free port) or another --master_port; end the old process",
    ),
    Pattern(
        "placement-conflict: duplicate-gpu",
        r"Duplicate GPU detected\s*: rank \d+ and rank \d+ both on CUDA device",
        "two ranks use the same GPU: the device was not chosen by LOCAL_RANK, or more processes than"
        " GPUs were started",
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) at the start, and nproc_per_node <= number'
        " of GPUs",
    ),
    Pattern(
        "backend-unsupported: nccl-not-built",
        r"Distributed package doesn't have NCCL built in",
        "this torch has no NCCL (CPU, macOS or Windows build)",
        'init_process_group("gloo")',
    ),
    Pattern(
        "backend-unsupported: no-backend-for-device",
        r"No backend type associated with device type (?P<device>\w+)",
        "a collective got a {device} tensor, and the process group has no backend for it (nccl takes"
        " CUDA tensors only)",
        'init_process_group("cpu:gloo,cuda:nccl"), or move the tensor to the GPU first',
    ),
    Pattern(
        "ranks-disagree: nccl-system",
        r"ncclSystemError|ncclUnhandledCudaError|ncclInternalError|unhandled (?:system|cuda) error,?"
        r" .{0,20}NCCL|NCCL error in:",
        "NCCL failed below torch: network interface, shared memory (small /dev/shm in a container), or a GPU "
        "error on one rank",
        "run with NCCL_DEBUG=INFO; in a container raise --shm-size; set NCCL_SOCKET_IFNAME to the right "
        "interface; look for an earlier error on another rank",
        consequence=True,
    ),
    Pattern(
        "ranks-disagree: nccl-invalid-usage",
        r"ncclInvalidUsage|ncclInvalidArgument",
        "NCCL was called in a way that it forbids: two ranks on one GPU, or tensors that differ between"
        " ranks",
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) at the start; the same shapes and dtypes'
        " on every rank",
    ),
    Pattern(
        "ddp-bypassed: wrapper-attribute",
        r"'(?:DistributedDataParallel|DataParallel)' object has no attribute '(?P<name>\w+)'",
        "DDP wraps the model; its own attributes are under .module",
        "model.module.{name} for what does not train; for the training loss call the wrapped model itself, "
        "or gradients are not averaged",
    ),
    Pattern(
        "placement-conflict: dataparallel-unsupported",
        r"does not support (?:nn\.)?DataParallel",
        "several GPUs are visible to one process, so the Trainer would use DataParallel, which this"
        " trainer does not",
        "start with torchrun / accelerate launch, or show one GPU: CUDA_VISIBLE_DEVICES=0",
    ),
    Pattern(
        "stale-launcher: fsdp-needs-launcher",
        r"Using fsdp only works in distributed training",
        "fsdp is set, but the script was started as one plain process",
        "torchrun --nproc_per_node=N train.py",
    ),
    Pattern(
        "placement-conflict: dtensor-mixed",
        r"got mixed torch\.Tensor and DTensor",
        "part of the model is sharded (DTensor), and a plain tensor meets it",
        "shard the whole module (fully_shard on the parent), or distribute_tensor the plain one",
    ),
    Pattern(
        "placement-conflict: accelerator-already",
        r"AcceleratorState has already been initialized and cannot be changed",
        "an Accelerator with other settings exists already (often TrainingArguments makes one)",
        "make one Accelerator, before anything else, with all its settings",
    ),
    Pattern(
        "placement-conflict: strategy-conflict",
        r"(?:training_)?strategy\s*[:=]"
        r" ['\"]?single_(?:gpu|process|device)\b.{0,80}?(?:use_)?model_parallel\s*[:=] ['\"]?True",
        "the user asked for model parallelism, and the program decided for a single GPU: tensors of a split "
        "model will meet on different GPUs",
        "decide once: model_parallel=True splits the model (one process, two GPUs or more) and everything "
        "else reads that decision; otherwise fail with a clear error",
    ),
    Pattern(
        "placement-conflict: replica-wrapper",
        r"Caught \w+ in replica (?P<replica>\d+) on device (?P<device>\d+)",
        "the error happened inside nn.DataParallel, which copies the model to every visible GPU; the message "
        "below it is the fault itself",
        "see the original message; with one process prefer one GPU (CUDA_VISIBLE_DEVICES=0) or torchrun"
        " with DDP",
        consequence=True,
    ),
    Pattern(
        "other-error: child-failed",
        r"torch\.distributed\.elastic\.multiprocessing\.errors\.ChildFailedError|ChildFailedError:",
        "torchrun reports that a rank failed; the reason stands further up, in that rank's own traceback",
        "read the first traceback of the rank named as root cause (torchrun --tee 3 --log-dir logs keeps"
        " one log per rank)",
        consequence=True,
    ),
)
