"""Known error texts about precision, gradients, loss scaling and the graph."""

from __future__ import annotations

from trimtab.diagnose.pattern import read_table

PRECISION_PATTERNS = read_table(
    r"""
dtype-mismatch: matmul-dtype
  text (?:expected )?(?:mat1|m1|self) and (?:mat2|m2) (?:must|to) have the same dtype(?:, but got:? \S+
       (?:!=|and) [\w:]+)?
  why  a matrix product got two precisions; unlike addition it does not promote. Often adapter weights in fp32
       on a bf16 base, or an input that was not cast, and no autocast
  fix  run it under torch.autocast, or make both one dtype: x = x.to(self.weight.dtype); adapters:
       model.to(torch.bfloat16) after they are added
dtype-mismatch: conv-input-dtype
  text Input type \((?:torch\.|c10::|MPS)?[\w.:]+\) and (?:weight|bias) type \((?:torch\.|c10::|MPS)?[\w.:]+\)
       should be the same
  why  the input and the layer have different precisions
  fix  x = x.to(self.conv.weight.dtype) before the layer, or run the model under torch.autocast
dtype-mismatch: expected-long
  text expected scalar type Long but found \w+|expected target dtype to be Long or Byte|\"nll_loss\w*\" not
       implemented for 'Int'
  why  class labels (or indices) must be int64; these are float or int32
  fix  labels = labels.long(); read class labels as integers, and cast only the float tensors of a batch
dtype-mismatch: expected-scalar
  text expected scalar type (?P<want>\w+) but found (?P<got>\w+)
  why  one operand is {got} where {want} is expected: half of the model or batch was cast
  fix  cast the other one too (x = x.to(weight.dtype)), or keep weights in fp32 and open torch.autocast
dtype-mismatch: attention-dtype
  text Expected query, key, and value to have the same dtype
  why  query, key and value have different precisions, as when a cache, an adapter or a rotary table is fp32 in
       a bf16 model
  fix  cast them to one: k, v = k.to(q.dtype), v.to(q.dtype), or run under torch.autocast
dtype-mismatch: flash-attention-dtype
  text FlashAttention only supports? fp16 and bf16 data type
  why  FlashAttention has no fp32 kernel and the model is in fp32
  fix  load with dtype=torch.bfloat16, or use attn_implementation="sdpa"
dtype-mismatch: embedding-indices-dtype
  text Expected tensor for argument #\d+ 'indices' to have one of the following scalar types: Long, Int
  why  token ids were cast to a float type: the whole batch was cast, ids included
  fix  cast only floating tensors: v.to(dtype) if v.is_floating_point() else v
dtype-mismatch: index-put-dtype
  text Index put requires the source and destination dtypes match|scatter\(\): Expected self\.dtype to be equal
       to src\.dtype
  why  values of one precision are written into a tensor of another; under autocast the right side is often half
  fix  target[mask] = values.to(target.dtype)
dtype-mismatch: types-differ
  text (?:must|to|should) have (?:the )?same (?:scalar type|dtype|data type)|are not the same dtype|
       expected dtype \S+ for \S+ but got dtype|Found dtype \w+ but expected \w+|mixed dtype \(CPU\)
  why  what meets here has two precisions, and this operation does not promote
  fix  cast one to the other's precision, or run both under torch.autocast
dtype-mismatch: result-type
  text result type \w+ can't be cast to the desired output type \w+
  why  an in-place operation would put floats into an integer tensor
  fix  x = x.float() first, or write the operation out of place
dtype-mismatch: half-overflow
  text value cannot be converted to type (?:at::|c10::)?(?:Half|BFloat16|Float8\w*) without overflow
  why  a mask value such as -1e9 does not exist in half precision
  fix  scores.masked_fill(mask, torch.finfo(scores.dtype).min)
dtype-mismatch: numpy-bfloat16
  text Got unsupported ScalarType BFloat16
  why  NumPy has no bfloat16
  fix  x.float().cpu().numpy()
dtype-mismatch: fsdp-uniform-dtype
  text Must flatten tensors with uniform dtype but got \S+ and \S+
  why  FSDP1 flattens a whole unit, and adapters (fp32) and base (bf16) differ
  fix  give all parameters one dtype before wrapping (bnb_4bit_quant_storage=torch.bfloat16 with QLoRA), or use
       FSDP2
scaler-misuse: scaler-bf16
  text \"_amp_foreach_non_finite_check_and_unscale_\w+\" not implemented for 'BFloat16'
  why  a GradScaler is used with bf16 weights; bf16 has the range of fp32 and needs no loss scaling
  fix  remove the GradScaler (fp16=False, bf16=True), or keep the trainable weights in fp32
scaler-misuse: scaler-complex
  text \"_amp_foreach_non_finite_check_and_unscale_\w+\" not implemented for 'Complex\w+'
  why  a GradScaler is given gradients of complex weights, for which CUDA has no kernel
  fix  keep such weights as pairs of real numbers: nn.Parameter(torch.view_as_real(w)), torch.view_as_complex(...)
       in forward; or train in bfloat16, without a scaler
backend-unsupported: half-on-cuda
  text \"\w+_(?:cuda|cusolver)\w*\" not implemented for '(?:Half|BFloat16)'|HalfTensor is not supported|
       Low precision dtypes not supported\. Got \w+|Unsupported dtype (?:Half|BFloat16)|
       cuFFT only supports dimensions whose sizes are powers of two when computing in half precision
  why  this operation has no kernel for 16 bits on a GPU
  fix  compute it in float32 (.float() on what it is given), and cast the result back where half is needed
backend-unsupported: half-on-cpu
  text \"(?P<op>\w+)\" not implemented for '(?:Half|BFloat16)'
  why  {op} has no kernel for this precision on this device: half-precision weights on the CPU, as a rule
  fix  load in fp32 on the CPU (dtype=torch.float32), or move the model to the GPU before it runs
backend-unsupported: op-not-for-dtype
  text \"(?P<op>\w+)\" not implemented for '(?P<dtype>\w+)'
  why  {op} has no kernel for {dtype}
  fix  cast its input to a supported precision (float32, or int64 for labels and indices)
backend-unsupported: bf16-unsupported
  text Your setup doesn't support bf16/gpu
  why  bf16=True (TRL's default) wants a GPU with bf16; there is none here
  fix  set bf16=False on this machine, or use_cpu=True to train on the CPU
other-error: fp16-and-bf16
  text At most one of fp16 and bf16 can be True
  why  both precisions are switched on
  fix  keep one: bf16=True on GPUs that have it (Ampere and later), else fp16=True
autocast-device: unsafe-autocast
  text binary_cross_entropy and torch\.nn\.BCELoss are unsafe to autocast
  why  BCELoss wants probabilities, which overflow in half precision
  fix  drop the sigmoid and use nn.BCEWithLogitsLoss
autocast-device: autocast-without-cuda
  text User provided device_type of 'cuda', but CUDA is not available|In (?:CPU|MPS) autocast, but the target
       dtype is not supported
  why  autocast is opened for a device (or a precision) that is not there, so it does nothing
  fix  torch.autocast(x.device.type, dtype=torch.bfloat16): take the device type from the tensors
scaler-misuse: scaler-without-cuda
  text GradScaler is enabled, but CUDA is not available
  why  a scaler for CUDA on a machine without it does nothing
  fix  torch.amp.GradScaler(device.type, enabled=use_fp16)
scaler-misuse: unscale-fp16
  text Attempting to unscale FP16 gradients
  why  the trainable weights themselves are fp16, so their gradients are; the scaler needs fp32 weights
  fix  keep trainable weights in fp32 and let autocast make fp16 activations: load with dtype=torch.float32, or
       for LoRA: p.data = p.data.float() for the trainable ones
scaler-misuse: no-inf-checks
  text No inf checks were recorded for this optimizer
  why  no parameter of this optimizer got a gradient: everything is frozen, the loss was rebuilt with
       torch.tensor() or .item(), all labels are masked, or the optimizer holds parameters made before the
       adapters
  fix  repair the gradient, not the scaler: build the loss from the model's outputs (torch.stack, not
       torch.tensor), check that some p.requires_grad, and build the optimizer last
scaler-misuse: scaler-update-alone
  text No inf checks were recorded prior to update
  why  scaler.update() finds that no optimizer was stepped through the scaler since the last update
  fix  step with scaler.step(optimizer), not optimizer.step(), and call scaler.update() once after it
backend-unsupported: sparse-gradient
  text does not support sparse gradients
  why  an embedding with sparse=True gives sparse gradients, which this optimizer cannot use
  fix  leave sparse=True away, or give the embedding to torch.optim.SparseAdam (or SGD)
scaler-misuse: unscale-twice
  text unscale_\(\) has already been called on this optimizer since the last update\(\)
  why  scaler.unscale_ runs twice in one step (accumulation, or clipping in two places)
  fix  call it once per optimizer step: scaler.unscale_(opt); clip; scaler.step(opt); scaler.update()
scaler-misuse: scaler-order
  text Attempted (?:step|unscale_?|update) but _scale is None|step\(\) has already been called since the last
       update\(\)|unscale_\(\) is being called after step\(\)
  why  the scaler's calls are out of order
  fix  scaler.scale(loss).backward(); scaler.step(opt); scaler.update(), each once per step
no-gradient: no-grad-fn
  text element \d+ of (?:tensors|variables) does not require grad and does not have a grad_fn
  why  the loss does not depend on any trainable parameter: everything is frozen, it was computed under no_grad,
       detached, or re-entrant checkpointing got inputs without gradient
  fix  make sure some parameter requires grad; with checkpointing of a frozen base:
       model.enable_input_require_grads() or gradient_checkpointing_kwargs={{"use_reentrant": False}}
no-gradient: checkpoint-no-grad-input
  text None of the inputs have requires_grad=True\. Gradients will be None
  why  re-entrant checkpointing needs an input that requires grad; behind a frozen embedding there is none, so
       the adapters inside get no gradient and never move
  fix  checkpoint(..., use_reentrant=False), or model.enable_input_require_grads() (h.requires_grad_(True))
graph-kept: backward-twice
  text Trying to backward through the graph a second time
  why  a tensor that is kept from the last step (hidden state, running loss, cached target) still holds that
       step's graph
  fix  detach what crosses steps: hidden = hidden.detach(), total += loss.item(); retain_graph=True only hides
       it
other-error: inplace-modified
  text one of the variables needed for gradient computation has been modified by an inplace operation
  why  a value that backward needs was overwritten (+=, relu_(), x[mask] = ..., an optimizer step before
       backward, or DDP broadcasting buffers between two forwards)
  fix  write it out of place (x = x + y); torch.autograd.set_detect_anomaly(True) names the line; with two DDP
       forwards: broadcast_buffers=False
other-error: leaf-inplace
  text a (?:view of a )?leaf Variable that requires grad (?:is being|has been) used in an in-place operation
  why  a parameter is overwritten in place while autograd watches
  fix  with torch.no_grad(): p.copy_(...)
no-gradient: inference-tensor
  text Inference tensors cannot be saved for backward|Inplace update to inference tensor outside InferenceMode
  why  a tensor that was made under torch.inference_mode() is used where gradients are computed
  fix  torch.no_grad() instead of torch.inference_mode() for what is trained with later, or x.clone() of it
dtype-mismatch: rnn-dtype
  text RNN input dtype \(torch\.\w+\) does not match weight dtype
  why  the input and the layer have different precisions
  fix  cast the input where it is made (x.float()), or run the model under torch.autocast
eval-mode: rnn-in-eval-mode
  text cudnn RNN backward can only be called in training mode
  why  the layer ran in eval mode, in which cuDNN keeps nothing for a backward pass
  fix  model.train() before training goes on (after every evaluation), or torch.backends.cudnn.flags(enabled=False)
       around the layer where it is meant
other-error: numpy-of-grad
  text Can't call numpy\(\) on Tensor that requires grad
  why  the tensor is part of a graph
  fix  x.detach().cpu().numpy()
other-error: non-scalar-backward
  text grad can be implicitly created only for scalar outputs
  why  backward was called on a tensor of several values (a loss with reduction='none', or DataParallel's one
       loss per GPU)
  fix  loss.mean().backward()
other-error: gradient-count
  text function \w+Backward returned an incorrect number of gradients \(expected (?P<want>\d+), got (?P<got>\d+)\)
  why  backward returns {got} gradients, and forward takes {want} inputs
  fix  return a gradient, or None, for every argument of forward after ctx
no-gradient: empty-parameter-list
  text optimizer got an empty parameter list
  why  nothing is trainable where the optimizer looks: layers in a Python list, or everything frozen
  fix  use nn.ModuleList / nn.ParameterList, and check sum(p.requires_grad for p in model.parameters())
no-gradient: non-leaf-optimizer
  text can't optimize a non-leaf Tensor
  why  a Parameter was moved or computed after it was made (nn.Parameter(x).to(device) is no parameter any more)
  fix  nn.Parameter(x.to(device)): move first, then wrap
no-gradient: unused-in-graph
  text differentiated Tensors?(?: at index \d+)? (?:appears to not have been used in the graph|does not require grad)
  why  torch.autograd.grad is asked for a tensor that the output does not depend on
  fix  pass allow_unused=True, or make the output depend on it
other-error: checkpoint-recompute
  text Recomputed values for the following tensors have different metadata
  why  the checkpointed block did something else when it was recomputed: another dtype (autocast), device, cache
       or random branch
  fix  use_cache=False, the same autocast around backward's recomputation, and no state changed inside the block
no-gradient: no-trainable-parameters
  text trainable params: 0 \|\||(?:trainable parameters|trainable params|可训练参数)\s*[:=] 0(?![\d.,%])
  why  no parameter is trainable, so nothing will be learnt
  fix  PeftModel.from_pretrained(..., is_trainable=True), or freeze the base before get_peft_model, not after
non-finite: loss-zero-grad-nan
  text '?loss'?\s*[:=] '?0(?:\.0+)?'?\s*,.{0,60}?'?grad_norm'?\s*[:=] '?nan
  why  a true loss of NaN is shown as 0.0: all labels of the batch are -100 (truncated or wrong response
       marker), or fp16 overflowed
  fix  check (labels != -100).any() per row; set logging_nan_inf_filter=False to see the NaN; prefer bf16 to
       fp16
non-finite: gradient-nan
  text The total norm of order \S+ for gradients from `parameters` is non-finite|
       Function '\w+' returned nan values in its \d+th output
  why  a gradient is NaN or infinite
  fix  keep what is divided by, and what a root, a logarithm or an angle is taken of, away from where its slope ends
non-finite: loss-nan
  text ['\"]?(?:train_|eval_)?loss['\"]?\s*[:=]\s*['\"]?(?:nan|inf)\b|loss is (?:nan|inf)
  why  the loss is not finite: fp16 overflow, a learning rate too high, a batch without any label, or
       log/division of 0
  fix  find the first bad step (torch.autograd.set_detect_anomaly(True)); use bf16 or a lower rate; skip rows
       whose labels are all -100
non-finite: distribution-nan
  text to satisfy the constraint .{0,120}?,? but found invalid values:.{0,80}?nan
  why  the distribution is given NaN: weights or scores broke before
  fix  find where they first stop being finite; see the finding before this one
non-finite: probability-nan
  text probability tensor contains either `?inf`?, `?nan`? or element < 0
  why  the logits are NaN or infinite: a bf16 model run in fp16, or weights that broke in training
  fix  run it in bf16 or fp32, and check torch.isfinite over the weights
dataset-field: all-labels-masked
  text All labels (?:in your dataset |in the dataset )?are -100|
       (?:所有|全部)(?:的)?(?:标签|labels?)(?:都|均|全)?(?:是|为) -100
  why  no token is left to learn from: the response marker does not occur in the chat template's text, or
       truncation cut every answer off
  fix  print one formatted row and take the marker from it; raise max_length or drop rows without labels
other-error: scheduler-order
  text Detected call of `?lr_scheduler\.step\(\)`? before `?optimizer\.step\(\)`?
  why  the scheduler steps first; with a GradScaler the first optimizer steps may be skipped for overflow, then
       the warning is harmless
  fix  optimizer.step(); scheduler.step(), in this order
"""
)
