"""Known error texts about precision, gradients, loss scaling and the graph."""

from __future__ import annotations

from trimtab.diagnose.pattern import Pattern

PRECISION_PATTERNS: tuple[Pattern, ...] = (
    Pattern(
        "dtype-mismatch: matmul-dtype",
        r"(?:expected )?(?:mat1|m1|self) and (?:mat2|m2) (?:must|to) have the same dtype(?:, but got:?"
        r" \S+ (?:!=|and) [\w:]+)?",
        "a matrix product got two precisions; unlike addition it does not promote. Often adapter weights in "
        "fp32 on a bf16 base, or an input that was not cast, and no autocast",
        "run it under torch.autocast, or make both one dtype: x = x.to(self.weight.dtype); adapters:"
        " model.to(torch.bfloat16) after they are added",
    ),
    Pattern(
        "dtype-mismatch: conv-input-dtype",
        r"Input type \((?:torch\.|c10::|MPS)?[\w.:]+\) and (?:weight|bias) type "
        r"\((?:torch\.|c10::|MPS)?[\w.:]+\) should be the same",
        "the input and the layer have different precisions",
        "x = x.to(self.conv.weight.dtype) before the layer, or run the model under torch.autocast",
    ),
    Pattern(
        "dtype-mismatch: expected-long",
        r"expected scalar type Long but found \w+|expected target dtype to be Long or Byte|"
        r"\"nll_loss\w*\" not implemented for 'Int'",
        "class labels (or indices) must be int64; these are float or int32",
        "labels = labels.long(); read class labels as integers, and cast only the float tensors of a batch",
    ),
    Pattern(
        "dtype-mismatch: expected-scalar",
        r"expected scalar type (?P<want>\w+) but found (?P<got>\w+)",
        "one operand is {got} where {want} is expected: half of the model or batch was cast",
        "cast the other one too (x = x.to(weight.dtype)), or keep weights in fp32 and open torch.autocast",
    ),
    Pattern(
        "dtype-mismatch: attention-dtype",
        r"Expected query, key, and value to have the same dtype",
        "query, key and value have different precisions, as when a cache, an adapter or a rotary table is "
        "fp32 in a bf16 model",
        "cast them to one: k, v = k.to(q.dtype), v.to(q.dtype), or run under torch.autocast",
    ),
    Pattern(
        "dtype-mismatch: flash-attention-dtype",
        r"FlashAttention only supports? fp16 and bf16 data type",
        "FlashAttention has no fp32 kernel and the model is in fp32",
        'load with dtype=torch.bfloat16, or use attn_implementation="sdpa"',
    ),
    Pattern(
        "dtype-mismatch: embedding-indices-dtype",
        r"Expected tensor for argument #\d+ 'indices' to have one of the following scalar types: Long, Int",
        "token ids were cast to a float type: the whole batch was cast, ids included",
        "cast only floating tensors: v.to(dtype) if v.is_floating_point() else v",
    ),
    Pattern(
        "dtype-mismatch: index-put-dtype",
        r"Index put requires the source and destination dtypes match|scatter\(\): Expected self\.dtype"
        r" to be equal to src\.dtype",
        "values of one precision are written into a tensor of another; under autocast the right side is"
        " often half",
        "target[mask] = values.to(target.dtype)",
    ),
    Pattern(
        "dtype-mismatch: result-type",
        r"result type \w+ can't be cast to the desired output type \w+",
        "an in-place operation would put floats into an integer tensor",
        "x = x.float() first, or write the operation out of place",
    ),
    Pattern(
        "dtype-mismatch: half-overflow",
        r"value cannot be converted to type (?:at::|c10::)?\w+ without overflow",
        "a mask value such as -1e9 does not exist in half precision",
        "scores.masked_fill(mask, torch.finfo(scores.dtype).min)",
    ),
    Pattern(
        "dtype-mismatch: numpy-bfloat16",
        r"Got unsupported ScalarType BFloat16",
        "NumPy has no bfloat16",
        "x.float().cpu().numpy()",
    ),
    Pattern(
        "dtype-mismatch: fsdp-uniform-dtype",
        r"Must flatten tensors with uniform dtype but got \S+ and \S+",
        "FSDP1 flattens a whole unit, and adapters (fp32) and base (bf16) differ",
        "give all parameters one dtype before wrapping (bnb_4bit_quant_storage=torch.bfloat16 with"
        " QLoRA), or use FSDP2",
    ),
    Pattern(
        "scaler-misuse: scaler-bf16",
        r"\"_amp_foreach_non_finite_check_and_unscale_\w+\" not implemented for 'BFloat16'",
        "a GradScaler is used with bf16 weights; bf16 has the range of fp32 and needs no loss scaling",
        "remove the GradScaler (fp16=False, bf16=True), or keep the trainable weights in fp32",
    ),
    Pattern(
        "backend-unsupported: half-on-cpu",
        r"\"(?P<op>\w+)\" not implemented for '(?:Half|BFloat16)'",
        "{op} has no kernel for this precision on this device: half-precision weights on the CPU, as a rule",
        "load in fp32 on the CPU (dtype=torch.float32), or move the model to the GPU before it runs",
    ),
    Pattern(
        "backend-unsupported: op-not-for-dtype",
        r"\"(?P<op>\w+)\" not implemented for '(?P<dtype>\w+)'",
        "{op} has no kernel for {dtype}",
        "cast its input to a supported precision (float32, or int64 for labels and indices)",
    ),
    Pattern(
        "backend-unsupported: bf16-unsupported",
        r"Your setup doesn't support bf16/gpu",
        "bf16=True (TRL's default) wants a GPU with bf16; there is none here",
        "set bf16=False on this machine, or use_cpu=True to train on the CPU",
    ),
    Pattern(
        "other-error: fp16-and-bf16",
        r"At most one of fp16 and bf16 can be True",
        "both precisions are switched on",
        "keep one: bf16=True on GPUs that have it (Ampere and later), else fp16=True",
    ),
    Pattern(
        "autocast-device: unsafe-autocast",
        r"binary_cross_entropy and torch\.nn\.BCELoss are unsafe to autocast",
        "BCELoss wants probabilities, which overflow in half precision",
        "drop the sigmoid and use nn.BCEWithLogitsLoss",
    ),
    Pattern(
        "autocast-device: autocast-without-cuda",
        r"User provided device_type of 'cuda', but CUDA is not available|"
        r"In (?:CPU|MPS) autocast, but the target dtype is not supported",
        "autocast is opened for a device (or a precision) that is not there, so it does nothing",
        "torch.autocast(x.device.type, dtype=torch.bfloat16): take the device type from the tensors",
    ),
    Pattern(
        "scaler-misuse: scaler-without-cuda",
        r"GradScaler is enabled, but CUDA is not available",
        "a scaler for CUDA on a machine without it does nothing",
        "torch.amp.GradScaler(device.type, enabled=use_fp16)",
    ),
    Pattern(
        "scaler-misuse: unscale-fp16",
        r"Attempting to unscale FP16 gradients",
        "the trainable weights themselves are fp16, so their gradients are; the scaler needs fp32 weights",
        "keep trainable weights in fp32 and let autocast make fp16 activations: load with "
        "dtype=torch.float32, or for LoRA: p.data = p.data.float() for the trainable ones",
    ),
    Pattern(
        "scaler-misuse: no-inf-checks",
        r"No inf checks were recorded for this optimizer",
        "no parameter of this optimizer got a gradient: everything is frozen, the loss was rebuilt with"
        " torch.tensor()"
        " or .item(), all labels are masked, or the optimizer holds parameters made before the adapters",
        "repair the gradient, not the scaler: build the loss from the model's outputs (torch.stack, not "
        "torch.tensor), check that some p.requires_grad, and build the optimizer last",
    ),
    Pattern(
        "scaler-misuse: scaler-update-alone",
        r"No inf checks were recorded prior to update",
        "scaler.update() finds that no optimizer was stepped through the scaler since the last update",
        "step with scaler.step(optimizer), not optimizer.step(), and call scaler.update() once after it",
    ),
    Pattern(
        "backend-unsupported: sparse-gradient",
        r"does not support sparse gradients",
        "an embedding with sparse=True gives sparse gradients, which this optimizer cannot use",
        "leave sparse=True away, or give the embedding to torch.optim.SparseAdam (or SGD)",
    ),
    Pattern(
        "scaler-misuse: unscale-twice",
        r"unscale_\(\) has already been called on this optimizer since the last update\(\)",
        "scaler.unscale_ runs twice in one step (accumulation, or clipping in two places)",
        "call it once per optimizer step: scaler.unscale_(opt); clip; scaler.step(opt); scaler.update()",
    ),
    Pattern(
        "scaler-misuse: scaler-order",
        r"Attempted (?:step|unscale_?|update) but _scale is None|step\(\) has already been called since"
        r" the last update\(\)",
        "the scaler's calls are out of order",
        "scaler.scale(loss).backward(); scaler.step(opt); scaler.update(), each once per step",
    ),
    Pattern(
        "no-gradient: no-grad-fn",
        r"element \d+ of (?:tensors|variables) does not require grad and does not have a grad_fn",
        "the loss does not depend on any trainable parameter: everything is frozen, it was computed under "
        "no_grad, detached, or re-entrant checkpointing got inputs without gradient",
        "make sure some parameter requires grad; with checkpointing of a frozen base:"
        " model.enable_input_require_grads()"
        ' or gradient_checkpointing_kwargs={{"use_reentrant": False}}',
    ),
    Pattern(
        "no-gradient: checkpoint-no-grad-input",
        r"None of the inputs have requires_grad=True\. Gradients will be None",
        "re-entrant checkpointing needs an input that requires grad; behind a frozen embedding there is "
        "none, so the adapters inside get no gradient and never move",
        "checkpoint(..., use_reentrant=False), or model.enable_input_require_grads()"
        " (h.requires_grad_(True))",
    ),
    Pattern(
        "graph-kept: backward-twice",
        r"Trying to backward through the graph a second time",
        "a tensor that is kept from the last step (hidden state, running loss, cached target) still holds "
        "that step's graph",
        "detach what crosses steps: hidden = hidden.detach(), total += loss.item(); retain_graph=True"
        " only hides it",
    ),
    Pattern(
        "other-error: inplace-modified",
        r"one of the variables needed for gradient computation has been modified by an inplace operation",
        "a value that backward needs was overwritten (+=, relu_(), x[mask] = ..., an optimizer step before "
        "backward, or DDP broadcasting buffers between two forwards)",
        "write it out of place (x = x + y); torch.autograd.set_detect_anomaly(True) names the line;"
        " with two DDP forwards: broadcast_buffers=False",
    ),
    Pattern(
        "other-error: leaf-inplace",
        r"a (?:view of a )?leaf Variable that requires grad (?:is being|has been) used in an in-place"
        r" operation",
        "a parameter is overwritten in place while autograd watches",
        "with torch.no_grad(): p.copy_(...)",
    ),
    Pattern(
        "other-error: numpy-of-grad",
        r"Can't call numpy\(\) on Tensor that requires grad",
        "the tensor is part of a graph",
        "x.detach().cpu().numpy()",
    ),
    Pattern(
        "other-error: non-scalar-backward",
        r"grad can be implicitly created only for scalar outputs",
        "backward was called on a tensor of several values (a loss with reduction='none', or DataParallel's "
        "one loss per GPU)",
        "loss.mean().backward()",
    ),
    Pattern(
        "no-gradient: empty-parameter-list",
        r"optimizer got an empty parameter list",
        "nothing is trainable where the optimizer looks: layers in a Python list, or everything frozen",
        "use nn.ModuleList / nn.ParameterList, and check sum(p.requires_grad for p in model.parameters())",
    ),
    Pattern(
        "no-gradient: non-leaf-optimizer",
        r"can't optimize a non-leaf Tensor",
        "a Parameter was moved or computed after it was made (nn.Parameter(x).to(device) is no parameter"
        " any more)",
        "nn.Parameter(x.to(device)): move first, then wrap",
    ),
    Pattern(
        "no-gradient: unused-in-graph",
        r"One of the differentiated Tensors appears to not have been used in the graph",
        "torch.autograd.grad is asked for a tensor that the output does not depend on",
        "pass allow_unused=True, or make the output depend on it",
    ),
    Pattern(
        "other-error: checkpoint-recompute",
        r"Recomputed values for the following tensors have different metadata",
        "the checkpointed block did something else when it was recomputed: another dtype (autocast), device, "
        "cache or random branch",
        "use_cache=False, the same autocast around backward's recomputation, and no state changed inside"
        " the block",
    ),
    Pattern(
        "no-gradient: no-trainable-parameters",
        r"trainable params: 0 \|\||(?:trainable parameters|trainable params|可训练参数)\s*[:=] 0(?![\d.,%])",
        "no parameter is trainable, so nothing will be learnt",
        "PeftModel.from_pretrained(..., is_trainable=True), or freeze the base before get_peft_model,"
        " not after",
    ),
    Pattern(
        "non-finite: loss-zero-grad-nan",
        r"'?loss'?\s*[:=] '?0(?:\.0+)?'?\s*,.{0,60}?'?grad_norm'?\s*[:=] '?nan",
        "a true loss of NaN is shown as 0.0: all labels of the batch are -100 (truncated or wrong response "
        "marker), or fp16 overflowed",
        "check (labels != -100).any() per row; set logging_nan_inf_filter=False to see the NaN; prefer"
        " bf16 to fp16",
    ),
    Pattern(
        "non-finite: loss-nan",
        r"['\"]?(?:train_|eval_)?loss['\"]?\s*[:=]\s*['\"]?(?:nan|inf)\b|loss is (?:nan|inf)",
        "the loss is not finite: fp16 overflow, a learning rate too high, a batch without any label, or"
        " log/division of 0",
        "find the first bad step (torch.autograd.set_detect_anomaly(True)); use bf16 or a lower rate; skip "
        "rows whose labels are all -100",
    ),
    Pattern(
        "non-finite: probability-nan",
        r"probability tensor contains either `?inf`?, `?nan`? or element < 0",
        "the logits are NaN or infinite: a bf16 model run in fp16, or weights that broke in training",
        "run it in bf16 or fp32, and check torch.isfinite over the weights",
    ),
    Pattern(
        "dataset-field: all-labels-masked",
        r"All labels (?:in your dataset |in the dataset )?are"
        r" -100|(?:所有|全部)(?:的)?(?:标签|labels?)(?:都|均|全)?(?:是|为) -100",
        "no token is left to learn from: the response marker does not occur in the chat template's text, or "
        "truncation cut every answer off",
        "print one formatted row and take the marker from it; raise max_length or drop rows without labels",
    ),
    Pattern(
        "other-error: scheduler-order",
        r"Detected call of `?lr_scheduler\.step\(\)`? before `?optimizer\.step\(\)`?",
        "the scheduler steps first; with a GradScaler the first optimizer steps may be skipped for overflow, "
        "then the warning is harmless",
        "optimizer.step(); scheduler.step(), in this order",
    ),
)
