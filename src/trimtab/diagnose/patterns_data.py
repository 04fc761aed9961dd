"""Known error texts about data, batches, trainers' settings and checkpoints."""

from __future__ import annotations

from trimtab.diagnose.pattern import read_table

DATA_PATTERNS = read_table(
    r"""
dataset-field: key-of-column
  text KeyError:?\s*['\"](?P<name>input_ids|labels?|text|texts|instruction|input|output|prompt|completion|
       chosen|rejected|messages|conversations?|question|query|answers?|response|attention_mask|image|images|
       pixel_values|audio|sentence\d?|premise|hypothesis|content|role|target|targets|tokens)['\"]
  why  a row or batch has no field '{name}': the data set names it otherwise, was not tokenised, or the Trainer
       removed the column because the model's forward does not take it
  fix  print the columns of one row and map '{name}' to the right one; if a collator needs it:
       TrainingArguments(remove_unused_columns=False)
dataset-field: key-in-data
  text KeyError:?\s*['\"](?P<name>[^'\"\n]{1,60})['\"]
  only __getitem__|collat|_prepare_|datasets?/|map_|DataLoader|fetch\.py
  why  a row or batch has no field '{name}'
  fix  print the keys of the row that fails; map the field once, at loading, and raise there for rows that lack
       it
dataset-field: no-loss
  text The model did not return a loss from the inputs, only the following keys: (?P<keys>[\w, ]+)
  why  the batch has no labels, so the model returned {keys} and no loss
  fix  add a labels column, or DataCollatorForLanguageModeling(tokenizer, mlm=False), which makes it from
       input_ids
dataset-field: loss-none
  text 'NoneType' object has no attribute '(?:backward|item|detach|mean)'|unsupported operand type\(s\) for
       [-+*/]=?: '(?:Tensor|float|int)' and 'NoneType'
  why  the loss is None: the model got no labels (or returned a tuple or dict without loss)
  fix  pass labels=... to the model, and take outputs.loss
dataset-field: columns-dropped
  text No columns in the dataset match the model's forward method signature
  why  the data set is not tokenised (or its columns are named otherwise), and the Trainer drops unknown columns
  fix  tokenise first (dataset.map), or TrainingArguments(remove_unused_columns=False) with a collator of your
       own
batch-type: unable-to-tensor
  text Unable to create tensor, you should probably activate truncation and/or padding
  why  rows of different length (often labels, which tokenizer.pad does not pad, or a column of strings) cannot
       become one tensor
  fix  DataCollatorForSeq2Seq / DataCollatorForLanguageModeling pad labels too; or padding=True,
       truncation=True; remove text columns
batch-type: ragged
  text expected sequence of length \d+ at dim \d+ \(got \d+\)|stack expects each tensor to be equal size
  why  rows of different length are stacked
  fix  pad in the collator: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), or tokenizer.pad
batch-type: collate-type
  text default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; found (?P<type><class
       [^>]+>)
  why  a row holds {type}, which cannot be batched (None for a missing value, a PIL image, an own object)
  fix  return tensors or numbers from __getitem__, or write a collate_fn that handles this field
batch-type: to-on-non-tensor
  text '(?P<type>list|str|dict|tuple|int|float|NoneType|set)' object has no attribute '(?:to|cuda|device)'
  why  a {type} in the batch is not a tensor and cannot be moved (a list of strings beside the tensors, a nested
       batch)
  fix  move only tensors: {{k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()}}
batch-type: to-of-list
  text to\(\) received an invalid combination of arguments - got \((?P<got>[^)]*)\)
  why  to() got ({got}): what was passed is no device, or the object that is moved is a list
  fix  make it a tensor in the collator (torch.tensor(rows)) and pass a device: x.to(device)
batch-type: list-for-tensor
  text argument '(?P<name>indices|input|target|weight)' \(position \d+\) must be Tensor, not
       (?P<type>list|tuple|str|dict|NoneType|numpy\.ndarray)
  why  the model is given a {type} where it needs a tensor: the collator returned the rows as they are
  fix  make tensors in the collator: torch.tensor([row[...] for row in rows]), or tokenizer.pad(...,
       return_tensors="pt")
batch-type: model-output-field
  text (?P<type>\w*Output\w*)\.__init__\(\) got an unexpected keyword argument '(?P<name>\w+)'
  why  the model adds '{name}' to its output, and {type} cannot be rebuilt with it (DDP and DataParallel rebuild
       outputs)
  fix  return only loss and logits from a wrapper's forward, or declare a ModelOutput with that field
batch-type: model-output-fixed
  text You cannot use ``(?P<what>update|setdefault|pop|__delitem__)`` on an? (?P<type>\w+) instance
  why  {type} is one of transformers' output classes, whose fields are fixed: it refuses {what}
  fix  make a new output: {type}(**{{**output, ...}}) with fields that it declares; give others beside it, or declare
       a class of your own with them
batch-type: views
  text expects (?P<want>\d+) views, got (?P<got>\d+)
  why  the image processor makes {got} views and this model takes {want}: the two are configured differently
  fix  set the number of views in one place (the processor's config) and read it in the model
out-of-memory: worker-killed (a consequence)
  text DataLoader worker \(pid(?:\(s\))? ?[\d, ]+\) (?:is killed by signal: (?:Killed|Aborted|Terminated)|exited
       unexpectedly)
  why  the system ended a DataLoader worker: host memory ran out, as a rule
  fix  fewer workers, smaller prefetch_factor, stream the data instead of holding it in each worker;
       num_workers=0 shows the error itself
out-of-memory: shared-memory
  text Bus error.{0,120}?(?:shared memory|shm)|killed by signal: Bus error|unable to (?:open|allocate) shared
       memory object|unable to write to file </torch_|No space left on device.{0,60}?/dev/shm
  why  shared memory (/dev/shm) is full; containers give 64 MB by default
  fix  docker run --shm-size=8g (or --ipc=host), fewer workers,
       torch.multiprocessing.set_sharing_strategy("file_system")
other-error: open-files
  text Too many open files|received 0 items of ancdata
  why  workers pass tensors by file descriptors and the limit is reached
  fix  torch.multiprocessing.set_sharing_strategy("file_system"), or ulimit -n 65536
other-error: main-guard
  text An attempt has been made to start a new process before the current process has finished its bootstrapping
       phase
  why  with spawn every worker imports the script again, and the training code stands at top level
  fix  put it under `if __name__ == "__main__":`
batch-type: pickle-local
  text Can't (?:pickle local object|get local object) '(?P<name>[^']+)'
  why  spawned workers get the data set and collate_fn by pickle, and {name} is local (a lambda or nested
       function)
  fix  define it at the top of the module, or use functools.partial
dataset-field: empty-dataset
  text num_samples should be a positive integer value, but got num_samples=0
  why  the data set is empty: a filter, a split name or a path gave no rows
  fix  print len(dataset) after each step that filters
other-error: removed-argument
  text got an unexpected keyword argument
       '(?P<name>no_cuda|use_mps_device|evaluation_strategy|warmup_ratio|logging_dir|overwrite_output_dir|
       tokenizer|max_seq_length|dataset_text_field|packing|torch_dtype)'
  why  this setting was renamed or removed in the installed transformers or TRL: '{name}'
  fix  no_cuda/use_mps_device -> use_cpu=True (a GPU is found by itself); evaluation_strategy -> eval_strategy;
       tokenizer -> processing_class; max_seq_length -> max_length in SFTConfig; torch_dtype -> dtype
other-error: compute-loss-argument
  text compute_loss\(\) got an unexpected keyword argument 'num_items_in_batch'
  why  Trainer passes num_items_in_batch since transformers 4.46
  fix  def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None)
batch-type: forward-argument
  text forward\(\) got an unexpected keyword argument '(?P<name>\w+)'
  why  the batch holds '{name}', which the model's forward does not take
  fix  remove it in the collator, or leave remove_unused_columns=True
batch-type: no-pad-token
  text Asking to pad but the tokenizer does not have a padding token
  why  the tokenizer has no pad token
  fix  tokenizer.pad_token = tokenizer.eos_token, and mask labels by position (attention mask), not by pad id
dataset-field: no-chat-template
  text Cannot use chat template functions because tokenizer\.chat_template is not set
  why  messages are given, and this (base) model's tokenizer has no chat template
  fix  use the instruct model's tokenizer, or set tokenizer.chat_template
batch-type: batch-size-of-target
  text Expected input batch_size \(\d+\) to match target batch_size \(\d+\)|Target size \(.{0,40}?\) must be the
       same as input size
  why  logits and labels have different shapes
  fix  logits.view(-1, vocab) with labels.view(-1); for binary losses labels.float().unsqueeze(1)
other-error: shapes
  text mat1 and mat2 shapes cannot be multiplied \((?P<a1>\S+) and (?P<b1>[^)]+)\)
  why  the layer expects another number of features than its input has ({a1} and {b1})
  fix  make in_features equal to the last dimension of the input (print x.shape before the layer)
other-error: assigned-parameter
  text cannot assign '\S+' as parameter '(?P<name>\w+)' \(torch\.nn\.Parameter or None expected\)
  why  '{name}' is a parameter of this module, and a computed tensor cannot take its place
  fix  give the result a name of its own, or write into the parameter: with torch.no_grad():
       self.{name}.copy_(...)
graph-kept: copied-with-graph
  text Only Tensors created explicitly by the user \(graph leaves\) support the deepcopy protocol
  why  what is copied holds a tensor with its graph (a result of the last pass that was kept)
  fix  copy before the first pass, or let go of what was kept (self.features = None)
no-gradient: whole-numbers-trained
  text [Oo]nly Tensors of floating point and complex dtype can require gradients
  why  whole numbers have no gradient
  fix  make them floating point first: x.float()
no-gradient: target-modules
  text Target modules .{0,200}? not found in the base model
  why  the LoRA target names do not occur in this model
  fix  target_modules="all-linear", or take the names from model.named_modules()
map-location: module-prefix
  text (?:Missing|Unexpected) key\(s\) in state_dict:.{0,80}?\"(?P<prefix>module|_orig_mod)\.
  why  the checkpoint was saved from a wrapped model: its names begin with '{prefix}.'
  fix  save model.module.state_dict(), or strip the prefix: {{k.removeprefix('{prefix}.'): v for k, v in
       sd.items()}}
other-error: state-dict-keys
  text (?:Missing|Unexpected) key\(s\) in state_dict
  why  checkpoint and model have different parameters
  fix  build the model as it was when it was saved (same class, adapters, heads); strict=False leaves the
       missing ones untrained
other-error: size-mismatch
  text size mismatch for (?P<name>[\w.]+): copying a param with shape
  why  the checkpoint's {name} has another shape: other num_labels, vocabulary or rank
  fix  give the model the checkpoint's settings, or ignore_mismatched_sizes=True to start this layer anew
other-error: weights-only
  text Weights only load failed
  why  the file holds Python objects beside tensors, which torch.load refuses since 2.6
  fix  save state dicts only; for a file that you trust: torch.serialization.safe_globals([...])
other-error: shared-tensors
  text Some tensors share memory, this will lead to duplicate memory
  why  tied weights cannot be saved twice in safetensors
  fix  model.save_pretrained(...), or safetensors.torch.save_model, which knows ties
unmoved-state: optimizer-groups
  text loaded state dict contains a parameter group that doesn't match the size of optimizer's group|loaded
       state dict has a different number of parameter groups
  why  the optimizer checkpoint was made for other trainable parameters
  fix  freeze and add adapters exactly as in the first run before building the optimizer
other-error: eval-dataset
  text You have set `?args\.eval_strategy`? to \S+ but you didn't pass an `?eval_dataset`?
  why  evaluation is switched on without data for it
  fix  pass eval_dataset=..., or eval_strategy="no"
other-error: best-model-strategy
  text load_best_model_at_end requires the sav(?:e|ing)
  why  the best model can only be found where it was evaluated and saved
  fix  the same eval_strategy and save_strategy, save_steps a multiple of eval_steps
other-error: grpo-group
  text must be (?:evenly )?divisible by (?:the )?(?:num_generations|number of generations)
  why  the batch cannot be cut into groups of num_generations
  fix  make per_device_train_batch_size x processes x accumulation a multiple of num_generations
other-error: worker-wrapper (a consequence)
  text Caught \w+ in DataLoader worker process \d+
  why  the error happened in a worker; the message below it is the fault itself
  fix  see the original message; num_workers=0 gives a plain traceback
"""
)
