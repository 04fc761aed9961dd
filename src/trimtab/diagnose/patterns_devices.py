"""Known error texts about where tensors live: mismatched operands, indices, generators, split models."""

from __future__ import annotations

from trimtab.diagnose.pattern import ARGUMENT, DEVICE, Pattern, read_table

_SAME = r"Expected all tensors to be on the same device"
_TWO = rf"{_SAME}, but found at least two devices, {DEVICE} and {DEVICE}!? "


def _argument(names: str, method: str = "") -> str:
    """The two ways in which torch names the stray operand of a checked call, in `method` if one is given."""
    new = rf"{_SAME}, but got (?:{names}) is on {DEVICE}, different from other tensors on {DEVICE}"
    named = (
        rf" {ARGUMENT} (?:\w+ )?in method {method}" if method else rf"(?: {ARGUMENT} (?:\w+ )?in method \S*)?"
    )
    old = rf"{_TWO}{ARGUMENT} (?:{names}) in method " + (method or r"\S*")
    return f"(?:{new}{named}|{old})"


DEVICE_PATTERNS: tuple[Pattern, ...] = (
    Pattern(
        "index-device: gather-index",
        _argument(
            "index|indices|src|mask|source", r"wrapper_\w*(?:gather|scatter|index_[acfp]\w+|take|masked)\w*"
        ),
        "the index is on another device than the tensor that it reads ({a} and {b})",
        "index = index.to(tensor.device) before gather, scatter or index_select",
    ),
    Pattern(
        "device-mismatch: embedding-index",
        _argument("index|indices"),
        "an embedding looks up ids that are on another device than its weight ({a} and {b}): the model and "
        "the batch were sent to different devices, or only one of them was moved",
        "bring the ids to the weight before the call: input_ids = input_ids.to(model.device); in one go:"
        " batch = {{k: v.to(model.device) for k, v in batch.items()}}",
    ),
    Pattern(
        "device-mismatch: embedding-index-old",
        r"Expected object of (?:device type|backend) \w+ but got (?:device type|backend) \w+ for argument "
        r"#\d+ '\w+' in call to _?th_index_select",
        "an embedding looks up ids that are on another device than its weight: the ids (or the model)"
        " stayed behind",
        "bring the ids to the weight before the call: input_ids = input_ids.to(model.device)",
    ),
    Pattern(
        "device-mismatch: loss-class-weight",
        _argument("weight", r"wrapper_\w*(?:nll_loss|cross_entropy|binary_cross)\w*"),
        "the class weights given to the loss stayed on another device than the logits ({a} and {b});"
        " model.to() does not move a loss that is not part of the model",
        "make them there: nn.CrossEntropyLoss(weight=weights.to(logits.device)), or register them as a"
        " buffer",
    ),
    Pattern(
        "device-mismatch: loss-target",
        _argument("target|targets|labels?"),
        "the labels are on another device than the logits ({a} and {b}): they were never moved, or the model "
        "is split and its last layer lives elsewhere than its first",
        "bring the labels to the logits at the loss: loss = F.cross_entropy(logits,"
        " labels.to(logits.device))",
    ),
    Pattern(
        "unmoved-state: norm-statistics",
        _argument(
            "running_mean|running_var|weight|bias", r"wrapper_\w*(?:batch_norm|layer_norm|group_norm)\w*"
        ),
        "a normalisation layer's weights or statistics are on another device than its input ({a} and {b}): "
        "the layer was made after the model moved, is kept in a plain list, or belongs to another part of a "
        "split model",
        "move the whole model once after it is built (model.to(device)); in a split model bring the input to "
        "the layer: x = x.to(self.norm.weight.device)",
    ),
    Pattern(
        "device-mismatch: linear-operand",
        _argument("mat1|mat2|vec|weight|bias|self|input|batch1|batch2|tensor1|tensor2"),
        "a layer's input and its weight are on different devices ({a} and {b}): the batch was not moved, or "
        "this layer was not (made after .to(), or kept in a Python list or dict instead of "
        "nn.ModuleList/nn.ModuleDict)",
        "x = x.to(self.layer.weight.device) if the input is the stray one; else register the layer and call"
        " model.to(device) after it is added",
    ),
    Pattern(
        "device-mismatch: cat-of-devices",
        _argument("tensors?", r"wrapper_\w*(?:cat|stack)\w*"),
        "tensors from different devices ({a} and {b}) are joined; torch.cat moves nothing",
        "bring them to one device first: torch.cat([t.to(first.device) for t in tensors])",
    ),
    Pattern(
        "index-device: index-on-other-device",
        r"indices should be either on '?cpu'? or on the same device as the indexed tensor(?:"
        r" \((?P<indexed>[\w:]+)\))?",
        "a tensor is indexed by a GPU tensor of another device than its own. A CPU index into a GPU tensor "
        "is legal, the reverse is not: a table, mask or label tensor stayed on the CPU, or on the other GPU "
        "of a split model",
        "bring the table to the index: table.to(index.device)[index]; better: register the table with"
        " register_buffer so that it moves with the model",
    ),
    Pattern(
        "device-mismatch: two-gpus",
        rf"{_SAME}.{{0,60}}?cuda:(?P<first>\d+)\b.{{0,25}}?cuda:(?!(?P=first)\b)\d+",
        "two GPUs meet in one operation ({a} and {b}): the model is split over them (device_map, or several "
        ".to() calls) and a tensor stayed on one GPU while the layer it meets is on the other; often labels, "
        "masks or anything made on accelerator.device",
        "make helper tensors where their partner is (device=other.device) and move labels to"
        " logits.device at the"
        ' loss; if the model fits on one GPU, load it there: device_map={{"": 0}}',
    ),
    Pattern(
        "device-mismatch: cpu-and-gpu",
        rf"{_SAME}(?:.{{0,60}}?{DEVICE} and {DEVICE})?",
        "one operation got tensors from two devices ({a} and {b}): part of the batch was not moved, a tensor "
        "was made in forward without device=, or a module attribute is not a registered buffer",
        "move the whole batch to the model's device, give factories device=x.device, and use register_buffer "
        "for constants of a module; x.to(device) returns the moved tensor: assign it",
    ),
    *read_table(
        r"""
device-mismatch: old-device-type
  text Expected object of (?:device type|backend) (?P<want>\w+) but got (?:device type|backend) (?P<got>\w+) for
       (?:sequence element|argument) \S+(?: '(?P<arg>\w+)')?(?: in (?:call to|sequence)\S* \S+)?
  why  one operand is on {got}, the others are on {want} (torch 1.x wording): part of the batch, or a tensor
       made without device=, stayed behind
  fix  bring it to the others: t = t.to(other.device), and assign the result
device-mismatch: input-and-weight-device
  text Input type \((?:torch\.\w+Tensor\) and (?:weight|bias) type
       \((?:torch\.(?:cuda|mps)\.\w+|MPS\w+)|(?:torch\.(?:cuda|mps)\.\w+|MPS\w+)\) and (?:weight|bias) type
       \(torch\.\w+Tensor)\) should be the same
  why  the input and the layer's weight are on different devices: one of model and batch was not moved
  fix  model.to(device) once, and x = x.to(device) for every batch (assign the result)
device-mismatch: rnn-hidden
  text Input and (?:hidden|parameter) tensors are not at the same device(?:, found input tensor at \S+ and \w+
       tensor at \S+)?
  why  the recurrent layer's hidden state (or weights) and its input are on different devices: the first state
       is made without device=, as a rule
  fix  make the state where the input is: h0 = torch.zeros(layers, batch, hidden, device=x.device)
device-mismatch: mps-placeholder
  text Placeholder storage has not been allocated on MPS device
  why  the model is on mps and the input is still on the CPU (Apple's wording of a device mismatch)
  fix  move every tensor of the batch: batch = {{k: v.to("mps") for k, v in batch.items()}}
device-mismatch: numpy-of-gpu-tensor
  text can't convert (?:\S+ device type|CUDA) tensor to numpy
  why  NumPy reads host memory only; the tensor is on an accelerator
  fix  x.detach().cpu().numpy()
device-mismatch: old-type-of-gpu-tensor
  text expected TensorOptions\(dtype=\w+, device=cpu, .*\(got TensorOptions\(dtype=\w+, device=(?P<got>\w+)
  why  an old constructor (torch.FloatTensor, LongTensor) takes only tensors of the host, of its own type
  fix  convert the tensor, which keeps its device: x.float(), x.long()
generator-device: generator-device
  text Expected a '?(?P<want>\w+)'? (?:device type )?(?:for )?generator(?: device)?(?: type)? but found
       '?(?P<got>\w+)'?
  why  the random generator is a {got} one and the tensor to fill is on {want}: with torch.set_default_device
       ("cuda") a DataLoader's sampler draws on the GPU from a CPU generator
  fix  DataLoader(..., generator=torch.Generator(device="{want}")), or no global default device: give device=
       where tensors are made
pin-of-gpu-tensor: pin-of-gpu-tensor
  text cannot pin '?\S+?'? only (?:dense )?CPU (?:tensors|memory) can be pinned
  why  pin_memory=True is asked to pin a tensor that is already on the GPU: the data set or collate_fn moves it
  fix  leave data set and collate_fn on the CPU and move in the training loop, or set pin_memory=False
worker-uses-gpu: worker-uses-gpu
  text Cannot re-?initialize CUDA in forked subprocess
  why  a forked DataLoader worker touches the GPU: the data set or collate_fn makes or moves tensors to CUDA,
       and the parent has already initialised it
  fix  collate on the CPU and move in the training loop (batch = move(batch, device)); only if a worker truly
       needs the GPU: multiprocessing_context="spawn"
unmoved-state: foreach-state
  text Tensors of the same index must be on the same device
  why  the optimizer's state is on another device than its parameters: it was built (Adagrad makes state at
       once) or its checkpoint was loaded before the model moved
  fix  model.to(device) first, then build the optimizer and load its state
unmoved-state: accelerate-optimizer-before-model
  text The model and the optimizer parameters are not on the same device
  why  the optimizer was built from parameters that were then moved or replaced
  fix  build the optimizer after the model is on its device: model.to(device); optimizer =
       AdamW(model.parameters())
device-mismatch: loss-on-other-device
  text Calculated loss must be on the original device: (?P<want>\S+) but device in use is (?P<got>\S+)
  why  the model is split, and the loss comes back on {got} while the Trainer keeps its sum on {want}
  fix  return the loss on the input's device: loss = loss.to(input_ids.device) in compute_loss, or keep lm_head
       on the first device of the map
device-mismatch: generate-input-device
  text calling \.generate\(\) with the `?input_ids`? being on a device type different (?:than|from) your
       model'?s device
  why  input_ids were not moved to the model's device; generate may be slow or wrong
  fix  inputs = tokenizer(text, return_tensors='pt').to(model.device)
garbage-buffer: meta-copy
  text Cannot copy out of meta tensor; no data
  why  the weights are still on the meta device (made without memory, or offloaded): there is nothing to copy
  fix  load with a real device (device_map or low_cpu_mem_usage=False), or model.to_empty(device=...) and then
       load the state dict; do not call .to() on a dispatched model
placement-conflict: device-map-distributed
  text You can't train a model that has been loaded (?:in 8-bit (?:or 4-bit )?precision )?with
       `?device_map=['\"]auto['\"]`? in any distributed mode|You can't train a model that has been loaded in
       (?:8-bit|4-bit|8-bit or 4-bit)(?: precision)? with `?device_map=['\"]?auto['\"]?`?(?: in any distributed
       mode| in distributed mode)?
  why  device_map splits one copy of the model over all GPUs, a distributed launch wants one whole copy per GPU
  fix  with torchrun/accelerate launch: device_map={{"": local_rank}}; to split the model: start plain python,
       one process, and unset WORLD_SIZE, RANK and LOCAL_RANK left over from an earlier launch
placement-conflict: quantised-other-device
  text You can't train a model that has been loaded in 8-bit(?: or 4-bit)? precision on a different device than
       the one
  why  a quantised model cannot be moved any more, and it was loaded on another GPU than this process trains on
  fix  load it where it trains: device_map={{"": torch.cuda.current_device()}} (or {{"": local_rank}})
placement-conflict: move-of-offloaded-model
  text You (?:can't|shouldn't) move a model that has some modules offloaded|You shouldn't move a model that is
       dispatched using accelerate hooks
  why  the model was placed by a device map with offloading; .to() would break the hooks that move its layers
  fix  drop the .to() call, or load without device_map and move once
placement-conflict: to-of-quantised-model
  text `?\.to`? is not supported for `?(?:4-bit|8-bit)`?(?: or `?8-bit`?)? bitsandbytes models
  why  a bitsandbytes model is placed while it loads and cannot be moved afterwards
  fix  remove .to(device) and load with device_map={{"": 0}}
out-of-memory: dispatched-on-cpu
  text Some modules are dispatched on the CPU or the disk
  why  the quantised model does not fit on the GPUs that it may use, so the device map put layers on the CPU
  fix  free or allow more GPU memory (max_memory), use a smaller model, or pass
       llm_int8_enable_fp32_cpu_offload=True with a device_map of your own
placement-conflict: dataparallel-first-device
  text module must have its parameters and buffers on device \S+ \(device_ids\[0\]\) but found one of them on
       device: \S+
  why  nn.DataParallel wants the whole model on its first GPU; the Trainer wraps so when it sees several GPUs
       and one process, and this model is split or on another GPU ({a} and {b})
  fix  hide the other GPUs (CUDA_VISIBLE_DEVICES=0) or start with torchrun; for a split model, load with
       device_map so that the Trainer sees hf_device_map
placement-conflict: ddp-device-ids
  text DistributedDataParallel device_ids and output_device arguments only work with single-device
  why  DDP was given device_ids for a module that is on the CPU or split over several GPUs
  fix  module.to(local_rank) before DDP(module, device_ids=[local_rank]); for a split or CPU module leave
       device_ids out
"""
    ),
)
