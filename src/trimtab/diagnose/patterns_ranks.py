"""Known error texts about several processes: DDP, collectives, launchers."""

from __future__ import annotations

from trimtab.diagnose.pattern import read_table

RANK_PATTERNS = read_table(
    r"""
ddp-ready-twice: ddp-ready-twice-checkpoint
  text Expected to mark a variable ready only once
  why  DDP saw a parameter's gradient twice: re-entrant gradient checkpointing together with
       find_unused_parameters=True, a module run twice in one step, or requires_grad changed after wrapping
  fix  gradient_checkpointing_kwargs={{"use_reentrant": False}} and find_unused_parameters=False; freeze and
       unfreeze before wrapping in DDP, never after
ddp-unused: ddp-unused
  text Expected to have finished reduction in the prior iteration before starting a new one
  why  some trainable parameters took no part in the loss, and DDP waits for their gradients: a branch that
       forward does not run, or outputs in an object that DDP cannot look into
  fix  freeze or remove what is unused (p.requires_grad_(False) before DDP), use every output in the loss, or
       pass find_unused_parameters=True; TORCH_DISTRIBUTED_DEBUG=DETAIL prints the names
ddp-unused: ddp-static-graph
  text Your training graph has changed in this iteration.{0,160}?static_graph
  why  static_graph=True promises DDP that every step uses the same parameters, and the steps differ
  fix  find_unused_parameters=True in place of static_graph=True
no-gradient: ddp-no-gradient
  text DistributedDataParallel is not needed when a module doesn't have any parameters? that requires? a gradient
  why  everything is frozen, so DDP has nothing to average
  fix  add the adapters (or unfreeze) before wrapping; leave a frozen reference model unwrapped
ranks-disagree: ddp-models-differ
  text DDP expects same model across all ranks, but Rank \d+ has|params\[\d+\] in this process with sizes
       .{0,80} appears not to match
  why  the ranks built different models: another config, vocabulary, adapter or a freeze that depends on the
       rank
  fix  build the model from the same settings on every rank, before anything that depends on rank or data
ranks-disagree: collective-mismatch
  text Detected mismatch between collectives on ranks|Detected mismatched collectives
  why  the ranks do not call the same collective with the same shape: a branch depends on rank or on the data
  fix  call the same collectives in the same order on every rank; put only printing and saving under `if rank ==
       0`
ranks-disagree: gather-list
  text Argument `*(?P<name>gather_list|scatter_list)`* must (?:NOT )?be specified on (?:non-)?\w+ ranks?
  why  only the rank that collects (or hands out) gives the list of all parts; the others give None
  fix  {name} only on that rank, None on the others
ranks-disagree: nccl-timeout (a consequence)
  text Watchdog caught collective operation timeout:?(?: WorkNCCL\((?P<work>[^)]*)\))?(?: ran for \d+
       milliseconds before timing out)?
  why  one rank waited for a collective that another never joined: unequal numbers of batches, a branch on rank
       or data, evaluation or saving on rank 0 only, or a rank that crashed before (look for the first error)
  fix  give every rank the same number of steps (drop_last=True, DistributedSampler, or `with ddp.join():`) and
       the same branches; a longer time-out only postpones it
ranks-disagree: gloo-timeout (a consequence)
  text Timed out waiting \d+ ?ms for (?:recv|send) operation|Timed out waiting for recv operation|Application
       timeout caused pair closure
  why  a rank waited for a partner that had left the loop or stands in another collective
  fix  give every rank the same number of steps (drop_last=True or `with ddp.join():`) and the same collectives
ranks-disagree: peer-gone (a consequence)
  text Connection closed by peer|(?:recvBytes|sendBytes|recvValue) failed|Connection reset by
       peer.{0,80}?(?:gloo|nccl)|(?:gloo|nccl).{0,120}?Connection reset by peer
  why  another rank died; this one only noticed
  fix  look for the first error in the log, on the rank that ended first
stale-launcher: stale-store
  text (?:DistStoreError: )?Timed out after \d+ seconds waiting for clients\. (?P<there>\d+)/(?P<all>\d+)
       clients joined
  why  {all} processes were announced and {there} came: WORLD_SIZE and RANK are left over from an earlier
       launch, or the other processes did not start
  fix  unset WORLD_SIZE RANK LOCAL_RANK MASTER_ADDR MASTER_PORT for a single process, or start all with torchrun
       --nproc_per_node; trust these variables only where TORCHELASTIC_RUN_ID is set
stale-launcher: store-connect
  text (?:DistNetworkError|The client socket has (?:failed|timed out)|Failed to connect to \S+:\d+|connect\(\)
       timed out).{0,160}?(?:server|host|\d{4,5}|TCPStore)
  why  no process listens at MASTER_ADDR:MASTER_PORT: a stale address, another interface, or rank 0 is gone
  fix  start with torchrun (it sets the address), or set MASTER_ADDR to rank 0's reachable address
stale-launcher: rendezvous-variables
  text Error initializing torch\.distributed using env:// rendezvous: environment variable (?P<var>\w+)
       expected, but not set
  why  the script expects a launcher and was started with plain python: {var} is not set
  fix  torchrun --standalone --nproc_per_node=N train.py
stale-launcher: rank-variable-missing
  text KeyError:
       ['\"](?P<var>LOCAL_RANK|RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|LOCAL_WORLD_SIZE|SLURM_\w+)['\"]
  why  {var} is set by a launcher, and this process was started without one
  fix  torchrun --standalone --nproc_per_node=N train.py, or int(os.environ.get("{var}", 0))
stale-launcher: no-process-group
  text Default process group has not been initialized
  why  a distributed call runs before init_process_group, or in a run that is not distributed at all
  fix  torch.distributed.init_process_group() first (under torchrun), or guard with `if
       torch.distributed.is_initialized()`
stale-launcher: process-group-twice
  text trying to initialize the default process group twice
  why  the script and a library (accelerate, Trainer, deepspeed) both initialise the process group
  fix  let one do it: drop your init_process_group call, or guard it with `if not dist.is_initialized()`
stale-launcher: port-in-use
  text EADDRINUSE|(?:errno: ?98\b.{0,60})?(?:The server socket has failed to (?:listen|bind).{0,200}?)?Address
       already in use|地址已(?:在|被)使用
  why  another job (or one that did not end) holds MASTER_PORT
  fix  torchrun --standalone (takes a free port) or another --master_port; end the old process
placement-conflict: duplicate-gpu
  text Duplicate GPU detected\s*: rank \d+ and rank \d+ both on CUDA device
  why  two ranks use the same GPU: the device was not chosen by LOCAL_RANK, or more processes than GPUs were
       started
  fix  torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) at the start, and nproc_per_node <= number of GPUs
backend-unsupported: nccl-not-built
  text Distributed package doesn't have NCCL built in
  why  this torch has no NCCL (CPU, macOS or Windows build)
  fix  init_process_group("gloo")
backend-unsupported: no-backend-for-device
  text No backend type associated with device type (?P<device>\w+)
  why  a collective got a {device} tensor, and the process group has no backend for it (nccl takes CUDA tensors
       only)
  fix  init_process_group("cpu:gloo,cuda:nccl"), or move the tensor to the GPU first
ranks-disagree: nccl-system (a consequence)
  text ncclSystemError|ncclUnhandledCudaError|ncclInternalError|unhandled (?:system|cuda) error,?
       .{0,20}NCCL|NCCL error in:
  why  NCCL failed below torch: network interface, shared memory (small /dev/shm in a container), or a GPU error
       on one rank
  fix  run with NCCL_DEBUG=INFO; in a container raise --shm-size; set NCCL_SOCKET_IFNAME to the right interface;
       look for an earlier error on another rank
ranks-disagree: nccl-invalid-usage
  text ncclInvalidUsage|ncclInvalidArgument
  why  NCCL was called in a way that it forbids: two ranks on one GPU, or tensors that differ between ranks
  fix  torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) at the start; the same shapes and dtypes on every
       rank
ddp-bypassed: wrapper-attribute
  text '(?:DistributedDataParallel|DataParallel)' object has no attribute '(?P<name>\w+)'
  why  DDP wraps the model; its own attributes are under .module
  fix  model.module.{name} for what does not train; for the training loss call the wrapped model itself, or
       gradients are not averaged
placement-conflict: dataparallel-unsupported
  text does not support (?:nn\.)?DataParallel
  why  several GPUs are visible to one process, so the Trainer would use DataParallel, which this trainer does
       not
  fix  start with torchrun / accelerate launch, or show one GPU: CUDA_VISIBLE_DEVICES=0
stale-launcher: fsdp-needs-launcher
  text Using fsdp only works in distributed training
  why  fsdp is set, but the script was started as one plain process
  fix  torchrun --nproc_per_node=N train.py
placement-conflict: dtensor-mixed-lists
  text aten\._(?:foreach|fused)_\w+\.\w+:? got mixed torch\.Tensor and DTensor
  why  an optimizer or clipping takes all parameters in one list, and some of them (norms, biases that no plan names)
       are plain tensors beside DTensors
  fix  make them DTensors too (SequenceParallel() for the norms in the plan, or distribute_tensor(p, mesh,
       [Replicate()])), or give the plain ones an optimizer group of their own, or foreach=False
placement-conflict: dtensor-mixed
  text got mixed torch\.Tensor and DTensor
  why  part of the model is sharded (DTensor), and a plain tensor meets it
  fix  shard the whole module (fully_shard on the parent), or distribute_tensor the plain one
placement-conflict: accelerator-already
  text AcceleratorState has already been initialized and cannot be changed
  why  an Accelerator with other settings exists already (often TrainingArguments makes one)
  fix  make one Accelerator, before anything else, with all its settings
placement-conflict: strategy-conflict
  text (?:training_)?strategy\s*[:=] ['\"]?single_(?:gpu|process|device)\b.{0,80}?(?:use_)?model_parallel\s*[:=]
       ['\"]?True
  why  the user asked for model parallelism, and the program decided for a single GPU: tensors of a split model
       will meet on different GPUs
  fix  decide once: model_parallel=True splits the model (one process, two GPUs or more) and everything else
       reads that decision; otherwise fail with a clear error
placement-conflict: replica-wrapper (a consequence)
  text Caught \w+ in replica (?P<replica>\d+) on device (?P<device>\d+)
  why  the error happened inside nn.DataParallel, which copies the model to every visible GPU; the message below
       it is the fault itself
  fix  see the original message; with one process prefer one GPU (CUDA_VISIBLE_DEVICES=0) or torchrun with DDP
other-error: child-failed (a consequence)
  text torch\.distributed\.elastic\.multiprocessing\.errors\.ChildFailedError|ChildFailedError:
  why  torchrun reports that a rank failed; the reason stands further up, in that rank's own traceback
  fix  read the first traceback of the rank named as root cause (torchrun --tee 3 --log-dir logs keeps one log
       per rank)
"""
)
