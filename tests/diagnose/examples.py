"""For every entry of the table of known error texts: a text as it stands in a log."""

from __future__ import annotations

SAME = "RuntimeError: Expected all tensors to be on the same device, but "
EXAMPLES: dict[str, str] = {
    "embedding-index": SAME
    + "got index is on cpu, different from other tensors on cuda:0 (when checking argument in"
    " method wrapper_CUDA__index_select)",
    "embedding-index-old": "RuntimeError: Expected object of device type cuda but got device type cpu"
    " for argument #1"
    " 'self' in call to _th_index_select",
    "loss-class-weight": SAME
    + "found at least two devices, cuda:0 and cpu! (when checking argument for argument weight"
    " in method wrapper_CUDA_nll_loss_forward)",
    "loss-target": SAME
    + "found at least two devices, cuda:1 and cuda:0! (when checking argument for argument target in"
    " method wrapper_CUDA_nll_loss_forward)",
    "norm-statistics": SAME
    + "found at least two devices, cuda:0 and cpu! (when checking argument for argument weight in"
    " method wrapper_CUDA__native_layer_norm)",
    "linear-operand": SAME
    + "found at least two devices, cpu and cuda:0! (when checking argument for argument mat1 in"
    " method wrapper_CUDA_addmm)",
    "cat-of-devices": SAME
    + "got tensors is on cpu, different from other tensors on cuda:0 (when checking argument in"
    " method wrapper_CUDA_cat)",
    "gather-index": SAME
    + "got index is on cpu, different from other tensors on cuda:0 (when checking argument in"
    " method wrapper_CUDA_gather)",
    "index-on-other-device": "RuntimeError: indices should be either on cpu or on the same device as the"
    " indexed tensor"
    " (cpu)",
    "two-gpus": SAME + "found at least two devices, cuda:1 and cuda:0!",
    "cpu-and-gpu": SAME + "found at least two devices, cuda:0 and cpu!",
    "old-device-type": "RuntimeError: Expected object of backend CUDA but got backend CPU for argument"
    " #4 'mat1'",
    "input-and-weight-device": "RuntimeError: Input type (torch.cuda.FloatTensor) and weight type"
    " (torch.FloatTensor)"
    " should be the same",
    "rnn-hidden": "RuntimeError: Input and hidden tensors are not at the same device, found input tensor"
    " at cuda:0 and"
    " hidden tensor at cpu",
    "mps-placeholder": "RuntimeError: Placeholder storage has not been allocated on MPS device!",
    "numpy-of-gpu-tensor": "TypeError: can't convert cuda:0 device type tensor to numpy. Use"
    " Tensor.cpu() to copy the"
    " tensor to host memory first.",
    "old-type-of-gpu-tensor": "TypeError: expected TensorOptions(dtype=float, device=cpu, layout=Strided,"
    " requires_grad=false (default)) (got TensorOptions(dtype=float, device=cuda:0, layout=Strided,"
    " requires_grad=false (default)))",
    "generator-device": "RuntimeError: Expected a 'cuda' device type for generator but found 'cpu'",
    "pin-of-gpu-tensor": "RuntimeError: cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can"
    " be pinned",
    "worker-uses-gpu": "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with"
    " multiprocessing,"
    " you must use the 'spawn' start method",
    "foreach-state": "RuntimeError: Tensors of the same index must be on the same device and the same"
    " dtype except `step`"
    " tensors that can be CPU and float32/64 notwithstanding",
    "accelerate-optimizer-before-model": "ValueError: The model and the optimizer parameters are not on"
    " the same device,"
    " which probably means you created an optimizer around your model **before** putting on the device.",
    "loss-on-other-device": "ValueError: Calculated loss must be on the original device: cuda:0 but"
    " device in use is"
    " cuda:1",
    "generate-input-device": "UserWarning: You are calling .generate() with the `input_ids` being on a"
    " device type"
    " different than your model's device.",
    "meta-copy": "NotImplementedError: Cannot copy out of meta tensor; no data!",
    "device-map-distributed": "ValueError: You can't train a model that has been loaded in 8-bit"
    " precision with"
    " `device_map='auto'` in any distributed mode.",
    "quantised-other-device": "ValueError: You can't train a model that has been loaded in 8-bit or"
    " 4-bit precision on a"
    " different device than the one you're training on.",
    "move-of-offloaded-model": "RuntimeError: You can't move a model that has some modules offloaded to"
    " cpu or disk.",
    "to-of-quantised-model": "ValueError: `.to` is not supported for `4-bit` or `8-bit` bitsandbytes models.",
    "dispatched-on-cpu": "ValueError: Some modules are dispatched on the CPU or the disk. Make sure you"
    " have enough GPU RAM",
    "dataparallel-first-device": "RuntimeError: module must have its parameters and buffers on device cuda:0"
    " (device_ids[0]) but found one of them on device: cuda:1",
    "ddp-device-ids": "ValueError: DistributedDataParallel device_ids and output_device arguments only"
    " work with"
    " single-device/multiple-device GPU modules or CPU modules, but got device_ids [0]",
    "matmul-dtype": "RuntimeError: expected mat1 and mat2 to have the same dtype, but got: float !="
    " c10::BFloat16",
    "conv-input-dtype": "RuntimeError: Input type (torch.cuda.FloatTensor) and weight type"
    " (torch.cuda.HalfTensor) should"
    " be the same",
    "expected-long": "RuntimeError: expected scalar type Long but found Float",
    "expected-scalar": "RuntimeError: expected scalar type Half but found Float",
    "attention-dtype": "RuntimeError: Expected query, key, and value to have the same dtype, but got"
    " query.dtype: float",
    "flash-attention-dtype": "RuntimeError: FlashAttention only support fp16 and bf16 data type",
    "embedding-indices-dtype": "RuntimeError: Expected tensor for argument #1 'indices' to have one of"
    " the following"
    " scalar types: Long, Int; but got torch.cuda.BFloat16Tensor instead",
    "index-put-dtype": "RuntimeError: Index put requires the source and destination dtypes match, got"
    " Float for the"
    " destination and Half for the source.",
    "types-differ": "RuntimeError: index_add_(): self (Float) and source (BFloat16) must have the same scalar type",
    "scaler-complex": 'RuntimeError: "_amp_foreach_non_finite_check_and_unscale_cuda" not implemented for '
    "'ComplexFloat'",
    "half-on-cuda": "NotImplementedError: \"ctc_loss_cuda\" not implemented for 'Half'",
    "result-type": "RuntimeError: result type Float can't be cast to the desired output type Long",
    "half-overflow": "RuntimeError: value cannot be converted to type at::Half without overflow",
    "numpy-bfloat16": "TypeError: Got unsupported ScalarType BFloat16",
    "fsdp-uniform-dtype": "ValueError: Must flatten tensors with uniform dtype but got torch.bfloat16"
    " and torch.float32",
    "scaler-bf16": 'RuntimeError: "_amp_foreach_non_finite_check_and_unscale_cuda" not implemented for'
    " 'BFloat16'",
    "half-on-cpu": "RuntimeError: \"addmm_impl_cpu_\" not implemented for 'Half'",
    "op-not-for-dtype": "RuntimeError: \"erfinv_vml_cpu\" not implemented for 'Long'",
    "bf16-unsupported": "ValueError: Your setup doesn't support bf16/gpu. You need to assign use_cpu",
    "fp16-and-bf16": "ValueError: At most one of fp16 and bf16 can be True, but not both",
    "unsafe-autocast": "RuntimeError: torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are"
    " unsafe to autocast.",
    "autocast-without-cuda": "UserWarning: User provided device_type of 'cuda', but CUDA is not"
    " available. Disabling",
    "scaler-without-cuda": "UserWarning: torch.cuda.amp.GradScaler is enabled, but CUDA is not"
    " available.  Disabling.",
    "unscale-fp16": "ValueError: Attempting to unscale FP16 gradients.",
    "no-inf-checks": "AssertionError: No inf checks were recorded for this optimizer.",
    "unscale-twice": "RuntimeError: unscale_() has already been called on this optimizer since the last"
    " update().",
    "scaler-order": "AssertionError: Attempted step but _scale is None.  This may indicate your script"
    " did not use"
    " scaler.scale(loss or outputs) earlier in the iteration.",
    "no-grad-fn": "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
    "checkpoint-no-grad-input": "UserWarning: None of the inputs have requires_grad=True. Gradients will"
    " be None",
    "backward-twice": "RuntimeError: Trying to backward through the graph a second time (or directly"
    " access saved tensors",
    "inplace-modified": "RuntimeError: one of the variables needed for gradient computation has been"
    " modified by an"
    " inplace operation: [torch.FloatTensor [4, 4]] is at version 2",
    "leaf-inplace": "RuntimeError: a leaf Variable that requires grad is being used in an in-place"
    " operation.",
    "inference-tensor": "RuntimeError: Inference tensors cannot be saved for backward. Please do not use Tensors"
    " created in inference mode in computation tracked by autograd.",
    "rnn-dtype": "ValueError: RNN input dtype (torch.float64) does not match weight dtype (torch.float32). Convert"
    " input: input.to(torch.float32), or convert model: model.to(torch.float64)",
    "rnn-in-eval-mode": "RuntimeError: cudnn RNN backward can only be called in training mode",
    "numpy-of-grad": "RuntimeError: Can't call numpy() on Tensor that requires grad. Use"
    " tensor.detach().numpy() instead.",
    "non-scalar-backward": "RuntimeError: grad can be implicitly created only for scalar outputs",
    "gradient-count": "RuntimeError: function ClampBackward returned an incorrect number of gradients (expected 3,"
    " got 1)",
    "gradient-nan": "RuntimeError: Function 'SqrtBackward0' returned nan values in its 0th output.",
    "empty-parameter-list": "ValueError: optimizer got an empty parameter list",
    "non-leaf-optimizer": "ValueError: can't optimize a non-leaf Tensor",
    "unused-in-graph": "RuntimeError: One of the differentiated Tensors appears to not have been used in"
    " the graph.",
    "checkpoint-recompute": "torch.utils.checkpoint.CheckpointError: torch.utils.checkpoint: Recomputed"
    " values for the"
    " following tensors have different metadata than during the forward pass.",
    "no-trainable-parameters": "trainable params: 0 || all params: 6,738,415,616 || trainable%: 0.0",
    "loss-zero-grad-nan": "{'loss': 0.0, 'learning_rate': 1e-05, 'grad_norm': nan, 'epoch': 0.01}",
    "loss-nan": "{'loss': nan, 'learning_rate': 0.0002, 'epoch': 0.02}",
    "distribution-nan": "ValueError: Expected parameter logits (Tensor of shape (8, 4)) of distribution"
    " Categorical(logits: torch.Size([8, 4])) to satisfy the constraint IndependentConstraint(Real(), 1), but found"
    " invalid values: tensor([[nan, nan, nan, nan]])",
    "probability-nan": "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0",
    "all-labels-masked": "ZeroDivisionError: Unsloth: All labels in your dataset are -100. Training"
    " losses will be all 0.",
    "scheduler-order": "UserWarning: Detected call of `lr_scheduler.step()` before `optimizer.step()`.",
    "ddp-ready-twice-checkpoint": "RuntimeError: Expected to mark a variable ready only once. This error"
    " is caused by one"
    " of the following reasons: 1) Use of a module parameter outside the `forward` function.",
    "gather-list": "ValueError: Argument ``gather_list`` must NOT be specified on non-destination ranks.",
    "ddp-static-graph": "RuntimeError: Your training graph has changed in this iteration, e.g., one"
    " parameter is unused in first iteration, but then got used in the second iteration. this is not"
    " compatible with static_graph set to True.",
    "ddp-unused": "RuntimeError: Expected to have finished reduction in the prior iteration before"
    " starting a new one.",
    "ddp-no-gradient": "RuntimeError: DistributedDataParallel is not needed when a module doesn't have"
    " any parameters"
    " that require a gradient.",
    "ddp-models-differ": "RuntimeError: DDP expects same model across all ranks, but Rank 0 has 196"
    " params, while rank 1"
    " has inconsistent 198 params.",
    "collective-mismatch": "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is"
    " running collective:"
    " CollectiveFingerPrint(OpType=ALLREDUCE)",
    "nccl-timeout": "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=55,"
    " OpType=ALLREDUCE,"
    " NumelIn=1, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.",
    "gloo-timeout": "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed"
    " out waiting"
    " 6000ms for recv operation to complete",
    "peer-gone": "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed"
    " by peer"
    " [127.0.0.1]:40321",
    "stale-store": "torch.distributed.DistStoreError: Timed out after 301 seconds waiting for clients."
    " 1/2 clients joined.",
    "store-connect": "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms"
    " while trying to"
    " connect to (10.0.0.1, 29500).",
    "rendezvous-variables": "ValueError: Error initializing torch.distributed using env:// rendezvous:"
    " environment"
    " variable RANK expected, but not set",
    "rank-variable-missing": "KeyError: 'LOCAL_RANK'",
    "no-process-group": "ValueError: Default process group has not been initialized, please make sure to call"
    " init_process_group.",
    "process-group-twice": "ValueError: trying to initialize the default process group twice!",
    "port-in-use": "RuntimeError: The server socket has failed to listen on any local network address."
    " The server socket"
    " has failed to bind to [::]:29500 (errno: 98 - Address already in use).",
    "duplicate-gpu": "ncclResult: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 65000",
    "nccl-not-built": "RuntimeError: Distributed package doesn't have NCCL built in",
    "no-backend-for-device": "RuntimeError: No backend type associated with device type cpu",
    "nccl-system": "ncclSystemError: System call (e.g. socket, malloc) or external library call failed"
    " or device error.",
    "nccl-invalid-usage": "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
    "wrapper-attribute": "AttributeError: 'DistributedDataParallel' object has no attribute 'generate'",
    "dataparallel-unsupported": "ValueError: GRPOTrainer does not support nn.DataParallel.",
    "fsdp-needs-launcher": "ValueError: Using fsdp only works in distributed training.",
    "dtensor-mixed-lists": "RuntimeError: aten._foreach_add_.List got mixed torch.Tensor and DTensor, need to convert",
    "dtensor-mixed": "RuntimeError: aten.mm.default: got mixed torch.Tensor and DTensor, need to convert all",
    "accelerator-already": "ValueError: AcceleratorState has already been initialized and cannot be"
    " changed, restart your"
    " runtime completely and pass `mixed_precision='bf16'`",
    "strategy-conflict": "training_strategy: single_gpu\nuse_model_parallel: True",
    "replica-wrapper": "RuntimeError: Caught RuntimeError in replica 0 on device 0.",
    "child-failed": "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
    "oom-fragmented": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"
    " a total capacity"
    " of 23.65 GiB of which 1.20 GiB is free. Of the allocated memory 14.21 GiB is allocated by PyTorch,"
    " and 7.80 GiB is"
    " reserved by PyTorch but unallocated.",
    "oom-cuda": "RuntimeError: CUDA out of memory. Tried to allocate 1.50 GiB (GPU 0; 15.78 GiB total"
    " capacity)",
    "oom-mps": "RuntimeError: MPS backend out of memory (MPS allocated: 17.1 GB, other allocations: 1.0 GB)",
    "oom-cublas": "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "oom-host": "RuntimeError: [enforce fail at alloc_cpu.cpp:114] . DefaultCPUAllocator: can't allocate"
    " memory: you tried"
    " to allocate 9663676416 bytes.",
    "no-cuda-build": "AssertionError: Torch not compiled with CUDA enabled",
    "no-kernel-image": "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    "invalid-ordinal": "RuntimeError: CUDA error: invalid device ordinal",
    "assert-embedding": "../aten/src/ATen/native/cuda/Indexing.cu:1292: indexSelectLargeIndex: block:"
    " [42,0,0], thread:"
    " [64,0,0] Assertion `srcIndex < srcSelectDimSize` failed.",
    "assert-labels": "../aten/src/ATen/native/cuda/Loss.cu:240: nll_loss_forward_reduce_cuda_kernel_2d:"
    " block: [0,0,0],"
    " thread: [3,0,0] Assertion `t >= 0 && t < n_classes` failed.",
    "device-assert": "RuntimeError: CUDA error: device-side assert triggered",
    "embedding-range": "IndexError: index out of range in self",
    "target-range": "IndexError: Target 5 is out of bounds.",
    "illegal-access": "RuntimeError: CUDA error: an illegal memory access was encountered",
    "no-driver": "RuntimeError: Found no NVIDIA driver on your system.",
    "mps-operator": "NotImplementedError: The operator 'aten::_linalg_solve_ex.result' is not currently"
    " implemented for"
    " the MPS device.",
    "mps-float64": "TypeError: Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't"
    " support float64.",
    "operator-for-backend": "NotImplementedError: Could not run 'torchvision::nms' with arguments from"
    " the 'CUDA' backend.",
    "flash-attention-gpu": "RuntimeError: FlashAttention only supports Ampere GPUs or newer.",
    "flash-attention-missing": "ImportError: FlashAttention2 has been toggled on, but it cannot be used"
    " due to the"
    " following error: the package flash_attn seems to be not installed.",
    "device-string": "RuntimeError: Expected one of cpu, cuda, ipu, xpu, mkldnn, opengl, mps, meta, hpu,"
    " mtia device type"
    " at start of device string: gpu",
    "load-cuda-checkpoint": "RuntimeError: Attempting to deserialize object on a CUDA device but"
    " torch.cuda.is_available() is False.",
    "load-cuda-index": "RuntimeError: Attempting to deserialize object on CUDA device 2 but"
    " torch.cuda.device_count() is 1.",
    "cuda-library": "ImportError: libcudart.so.11.0: cannot open shared object file: No such file or"
    " directory",
    "key-of-column": "KeyError: 'labels'",
    "key-in-data": '  File "/home/me/data.py", line 12, in __getitem__\n    return'
    " row[\"spk_id\"]\nKeyError: 'spk_id'",
    "no-loss": "ValueError: The model did not return a loss from the inputs, only the following keys:"
    " logits,past_key_values.",
    "loss-none": "AttributeError: 'NoneType' object has no attribute 'backward'",
    "columns-dropped": "ValueError: No columns in the dataset match the model's forward method"
    " signature: (input_ids)",
    "unable-to-tensor": "ValueError: Unable to create tensor, you should probably activate truncation"
    " and/or padding with"
    " 'padding=True' 'truncation=True'",
    "ragged": "RuntimeError: stack expects each tensor to be equal size, but got [12] at entry 0 and [9]"
    " at entry 1",
    "collate-type": "TypeError: default_collate: batch must contain tensors, numpy arrays, numbers,"
    " dicts or lists; found"
    " <class 'NoneType'>",
    "to-on-non-tensor": "AttributeError: 'list' object has no attribute 'to'",
    "to-of-list": "TypeError: to() received an invalid combination of arguments - got (list), but"
    " expected one of:",
    "model-output-field": "TypeError: CausalLMOutputWithPast.__init__() got an unexpected keyword"
    " argument 'new_input_ids'",
    "model-output-fixed": "Exception: You cannot use ``update`` on a CausalLMOutputWithPast instance.",
    "views": "ValueError: SHIRG-Fovea expects 2 views, got 5 views in shape torch.Size([32, 5, 3, 384, 384])",
    "worker-killed": "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed.",
    "shared-memory": "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Bus error. It is"
    " possible that"
    " dataloader's workers are out of shared memory.",
    "open-files": "OSError: [Errno 24] Too many open files",
    "main-guard": "RuntimeError: An attempt has been made to start a new process before the current"
    " process has finished"
    " its bootstrapping phase.",
    "pickle-local": "AttributeError: Can't pickle local object 'main.<locals>.<lambda>'",
    "empty-dataset": "ValueError: num_samples should be a positive integer value, but got num_samples=0",
    "removed-argument": "TypeError: TrainingArguments.__init__() got an unexpected keyword argument"
    " 'no_cuda'",
    "compute-loss-argument": "TypeError: MyTrainer.compute_loss() got an unexpected keyword argument"
    " 'num_items_in_batch'",
    "forward-argument": "TypeError: LlamaForCausalLM.forward() got an unexpected keyword argument"
    " 'token_type_ids'",
    "no-pad-token": "ValueError: Asking to pad but the tokenizer does not have a padding token.",
    "no-chat-template": "ValueError: Cannot use chat template functions because tokenizer.chat_template"
    " is not set",
    "batch-size-of-target": "ValueError: Expected input batch_size (8) to match target batch_size (4).",
    "shapes": "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x4 and 3x2)",
    "assigned-parameter": "TypeError: cannot assign 'torch.cuda.FloatTensor' as parameter 'weight'"
    " (torch.nn.Parameter or None expected)",
    "copied-with-graph": "RuntimeError: Only Tensors created explicitly by the user (graph leaves) support the"
    " deepcopy protocol at the moment.",
    "whole-numbers-trained": "RuntimeError: Only Tensors of floating point and complex dtype can require gradients",
    "target-modules": "ValueError: Target modules {'q_proj', 'v_proj'} not found in the base model.",
    "module-prefix": "RuntimeError: Error(s) in loading state_dict for Net: Missing key(s) in"
    ' state_dict: "fc.weight".'
    ' Unexpected key(s) in state_dict: "module.fc.weight".',
    "state-dict-keys": "RuntimeError: Error(s) in loading state_dict for Net: Missing key(s) in"
    ' state_dict: "fc.bias".',
    "size-mismatch": "size mismatch for classifier.weight: copying a param with shape torch.Size([2,"
    " 768]) from"
    " checkpoint, the shape in current model is torch.Size([3, 768]).",
    "weights-only": "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded",
    "shared-tensors": "RuntimeError: Some tensors share memory, this will lead to duplicate memory on disk",
    "optimizer-groups": "ValueError: loaded state dict contains a parameter group that doesn't match the"
    " size of"
    " optimizer's group",
    "eval-dataset": "ValueError: You have set `args.eval_strategy` to steps but you didn't pass an"
    " `eval_dataset`",
    "best-model-strategy": "ValueError: --load_best_model_at_end requires the save and eval strategy to"
    " match",
    "grpo-group": "ValueError: The global train batch size (3 x 1) must be evenly divisible by the"
    " number of generations"
    " per prompt (8).",
    "worker-wrapper": "KeyboardInterrupt: Caught KeyboardInterrupt in DataLoader worker process 0.",
    "scaler-update-alone": "AssertionError: No inf checks were recorded prior to update.",
    "sparse-gradient": "RuntimeError: Adam does not support sparse gradients, please consider"
    " SparseAdam instead",
    "list-for-tensor": "TypeError: embedding(): argument 'indices' (position 2) must be Tensor, not list",
    "old-expected-on-gpu": "RuntimeError: Tensor for argument #2 'mat1' is on CPU, but expected it to"
    " be on GPU (while checking arguments for addmm)",
    "old-current-device": "RuntimeError: Input, output and indices must be on the current device",
    "collective-of-devices": "RuntimeError: All input tensors must be on the same device. Received cpu"
    " and cuda:0",
    "invalid-gradient-device": "RuntimeError: Function MulBackward0 returned an invalid gradient at index"
    " 0 - expected type torch.cuda.FloatTensor but got torch.FloatTensor",
    "invalid-gradient-shape": "RuntimeError: Function AddmmBackward0 returned an invalid gradient at"
    " index 1 - got [3, 4] but expected shape compatible with [4, 3]",
    "invalid-device-id": "AssertionError: Invalid device id",
    "gpu-busy": "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable",
    "gpu-hardware": "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "driver-initialisation": "RuntimeError: CUDA driver initialization failed, you might not have a CUDA"
    " gpu.",
    "cublas-failed": "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling"
    " `cublasSgemm( handle, opa, opb, m, n, k)`",
    "cat-shapes": "RuntimeError: Sizes of tensors must match except in dimension 1. Expected"
    " size 4 but got size 3 for tensor number 1 in the list.",
    "conv-channels": "RuntimeError: Given groups=1, weight of size [64, 3, 7, 7], expected"
    " input[8, 1, 224, 224] to have 3 channels, but got 1 channels instead",
    "moved-leaf": "RuntimeError: leaf variable has been moved into the graph interior",
    "peft-target-missing": "ValueError: Please specify `target_modules` in `peft_config`",
    "quantised-without-adapters": "ValueError: You cannot perform fine-tuning on purely quantized models."
    " Please attach trainable adapters on top",
    "deepspeed-client-optimizer": "deepspeed.runtime.zero.utils.ZeRORuntimeException: You are using"
    " ZeRO-Offload with a client provided optimizer (<class 'torch.optim.adamw.AdamW'>)",
    "loss-scale-minimum": "Exception: Current loss scale already at minimum - cannot decrease scale"
    " anymore. Exiting run.",
    "zero-no-sync": "AssertionError: no sync context manager is incompatible with"
    " gradientpartitioning logic of ZeRo stage 3",
    "accelerator-argument": "TypeError: Accelerator.__init__() got an unexpected keyword argument"
    " 'dispatch_batches'",
    "adamw-from-transformers": "ImportError: cannot import name 'AdamW' from 'transformers'"
    " (/venv/transformers/__init__.py)",
    "triton-missing": "torch._inductor.exc.TritonMissing: Cannot find a working triton installation.",
    "tensor-as-bool": "RuntimeError: Boolean value of Tensor with more than one value is ambiguous",
    "gated-repository": "OSError: You are trying to access a gated repo.",
    "hub-unreachable": "ConnectionError: Couldn't reach 'squad' on the Hub (LocalEntryNotFoundError)",
    "safetensors-header": "safetensors_rust.SafetensorError: Error while deserializing header:"
    " HeaderTooLarge",
    "arrow-mixed": "pyarrow.lib.ArrowInvalid: cannot mix list and non-list, non-null values",
    "dataset-generation": "datasets.exceptions.DatasetGenerationError: An error occurred while"
    " generating the dataset",
}
