"""Known error texts about data, batches, trainers' settings and checkpoints."""

from __future__ import annotations

from trimtab.diagnose.pattern import Pattern

_COLUMNS = (
    "input_ids|labels?|text|texts|instruction|input|output|prompt|completion|chosen|rejected|messages|conversations?|"
    "question|query|answers?|response|attention_mask|image|images|pixel_values|audio|sentence\\d?|premise|hypothesis|"
    "content|role|target|targets|tokens"
)

DATA_PATTERNS: tuple[Pattern, ...] = (
    Pattern(
        "dataset-field: key-of-column",
        rf"KeyError:?\s*['\"](?P<name>{_COLUMNS})['\"]",
        "a row or batch has no field '{name}': the data set names it otherwise, was not tokenised, or the "
        "Trainer removed the column because the model's forward does not take it",
        "print the columns of one row and map '{name}' to the right one; if a collator needs it:"
        " TrainingArguments(remove_unused_columns=False)",
    ),
    Pattern(
        "dataset-field: key-in-data",
        r"KeyError:?\s*['\"](?P<name>[^'\"\n]{1,60})['\"]",
        "a row or batch has no field '{name}'",
        "print the keys of the row that fails; map the field once, at loading, and raise there for rows"
        " that lack it",
        only_if=r"__getitem__|collat|_prepare_|datasets?/|map_|DataLoader|fetch\.py",
    ),
    Pattern(
        "dataset-field: no-loss",
        r"The model did not return a loss from the inputs, only the following keys: (?P<keys>[\w, ]+)",
        "the batch has no labels, so the model returned {keys} and no loss",
        "add a labels column, or DataCollatorForLanguageModeling(tokenizer, mlm=False), which makes it"
        " from input_ids",
    ),
    Pattern(
        "dataset-field: loss-none",
        r"'NoneType' object has no attribute '(?:backward|item|detach|mean)'|"
        r"unsupported operand type\(s\) for [-+*/]=?: '(?:Tensor|float|int)' and 'NoneType'",
        "the loss is None: the model got no labels (or returned a tuple or dict without loss)",
        "pass labels=... to the model, and take outputs.loss",
    ),
    Pattern(
        "dataset-field: columns-dropped",
        r"No columns in the dataset match the model's forward method signature",
        "the data set is not tokenised (or its columns are named otherwise), and the Trainer drops"
        " unknown columns",
        "tokenise first (dataset.map), or TrainingArguments(remove_unused_columns=False) with a collator"
        " of your own",
    ),
    Pattern(
        "batch-type: unable-to-tensor",
        r"Unable to create tensor, you should probably activate truncation and/or padding",
        "rows of different length (often labels, which tokenizer.pad does not pad, or a column of strings) "
        "cannot become one tensor",
        "DataCollatorForSeq2Seq / DataCollatorForLanguageModeling pad labels too; or padding=True, "
        "truncation=True; remove text columns",
    ),
    Pattern(
        "batch-type: ragged",
        r"expected sequence of length \d+ at dim \d+ \(got \d+\)|stack expects each tensor to be equal size",
        "rows of different length are stacked",
        "pad in the collator: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), or tokenizer.pad",
    ),
    Pattern(
        "batch-type: collate-type",
        r"default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; found"
        r" (?P<type><class [^>]+>)",
        "a row holds {type}, which cannot be batched (None for a missing value, a PIL image, an own object)",
        "return tensors or numbers from __getitem__, or write a collate_fn that handles this field",
    ),
    Pattern(
        "batch-type: to-on-non-tensor",
        r"'(?P<type>list|str|dict|tuple|int|float|NoneType|set)' object has no attribute"
        r" '(?:to|cuda|device)'",
        "a {type} in the batch is not a tensor and cannot be moved (a list of strings beside the"
        " tensors, a nested batch)",
        "move only tensors: {{k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()}}",
    ),
    Pattern(
        "batch-type: to-of-list",
        r"to\(\) received an invalid combination of arguments - got \((?P<got>[^)]*)\)",
        "to() got ({got}): what was passed is no device, or the object that is moved is a list",
        "make it a tensor in the collator (torch.tensor(rows)) and pass a device: x.to(device)",
    ),
    Pattern(
        "batch-type: list-for-tensor",
        r"argument '(?P<name>indices|input|target|weight)' \(position \d+\) must be Tensor, not (?P<type>list|tuple|str"
        r"|dict|NoneType|numpy\.ndarray)",
        "the model is given a {type} where it needs a tensor: the collator returned the rows as they are",
        "make tensors in the collator: torch.tensor([row[...] for row in rows]), or tokenizer.pad(..., "
        'return_tensors="pt")',
    ),
    Pattern(
        "batch-type: model-output-field",
        r"(?P<type>\w*Output\w*)\.__init__\(\) got an unexpected keyword argument '(?P<name>\w+)'",
        "the model adds '{name}' to its output, and {type} cannot be rebuilt with it (DDP and"
        " DataParallel rebuild outputs)",
        "return only loss and logits from a wrapper's forward, or declare a ModelOutput with that field",
    ),
    Pattern(
        "batch-type: views",
        r"expects (?P<want>\d+) views, got (?P<got>\d+)",
        "the image processor makes {got} views and this model takes {want}: the two are configured"
        " differently",
        "set the number of views in one place (the processor's config) and read it in the model",
    ),
    Pattern(
        "out-of-memory: worker-killed",
        r"DataLoader worker \(pid(?:\(s\))? ?[\d, ]+\) (?:is killed by signal:"
        r" (?:Killed|Aborted|Terminated)|exited unexpectedly)",
        "the system ended a DataLoader worker: host memory ran out, as a rule",
        "fewer workers, smaller prefetch_factor, stream the data instead of holding it in each worker; "
        "num_workers=0 shows the error itself",
        consequence=True,
    ),
    Pattern(
        "out-of-memory: shared-memory",
        r"Bus error.{0,120}?(?:shared memory|shm)|killed by signal: Bus error|unable to (?:open|allocate) "
        r"shared memory object|unable to write to file </torch_|No space left on device.{0,60}?/dev/shm",
        "shared memory (/dev/shm) is full; containers give 64 MB by default",
        "docker run --shm-size=8g (or --ipc=host), fewer workers,"
        ' torch.multiprocessing.set_sharing_strategy("file_system")',
    ),
    Pattern(
        "other-error: open-files",
        r"Too many open files|received 0 items of ancdata",
        "workers pass tensors by file descriptors and the limit is reached",
        'torch.multiprocessing.set_sharing_strategy("file_system"), or ulimit -n 65536',
    ),
    Pattern(
        "other-error: main-guard",
        r"An attempt has been made to start a new process before the current process has finished its"
        r" bootstrapping phase",
        "with spawn every worker imports the script again, and the training code stands at top level",
        'put it under `if __name__ == "__main__":`',
    ),
    Pattern(
        "batch-type: pickle-local",
        r"Can't (?:pickle local object|get local object) '(?P<name>[^']+)'",
        "spawned workers get the data set and collate_fn by pickle, and {name} is local (a lambda or"
        " nested function)",
        "define it at the top of the module, or use functools.partial",
    ),
    Pattern(
        "dataset-field: empty-dataset",
        r"num_samples should be a positive integer value, but got num_samples=0",
        "the data set is empty: a filter, a split name or a path gave no rows",
        "print len(dataset) after each step that filters",
    ),
    Pattern(
        "other-error: removed-argument",
        r"got an unexpected keyword argument"
        r" '(?P<name>no_cuda|use_mps_device|evaluation_strategy|warmup_ratio|"
        r"logging_dir|overwrite_output_dir|tokenizer|max_seq_length|dataset_text_field|packing|torch_dtype)'",
        "this setting was renamed or removed in the installed transformers or TRL: '{name}'",
        "no_cuda/use_mps_device -> use_cpu=True (a GPU is found by itself); evaluation_strategy ->"
        " eval_strategy;"
        " tokenizer -> processing_class; max_seq_length -> max_length in SFTConfig; torch_dtype -> dtype",
    ),
    Pattern(
        "other-error: compute-loss-argument",
        r"compute_loss\(\) got an unexpected keyword argument 'num_items_in_batch'",
        "Trainer passes num_items_in_batch since transformers 4.46",
        "def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None)",
    ),
    Pattern(
        "batch-type: forward-argument",
        r"forward\(\) got an unexpected keyword argument '(?P<name>\w+)'",
        "the batch holds '{name}', which the model's forward does not take",
        "remove it in the collator, or leave remove_unused_columns=True",
    ),
    Pattern(
        "batch-type: no-pad-token",
        r"Asking to pad but the tokenizer does not have a padding token",
        "the tokenizer has no pad token",
        "tokenizer.pad_token = tokenizer.eos_token, and mask labels by position (attention mask), not by"
        " pad id",
    ),
    Pattern(
        "dataset-field: no-chat-template",
        r"Cannot use chat template functions because tokenizer\.chat_template is not set",
        "messages are given, and this (base) model's tokenizer has no chat template",
        "use the instruct model's tokenizer, or set tokenizer.chat_template",
    ),
    Pattern(
        "batch-type: batch-size-of-target",
        r"Expected input batch_size \(\d+\) to match target batch_size \(\d+\)|Target size \(.{0,40}?\) must "
        r"be the same as input size",
        "logits and labels have different shapes",
        "logits.view(-1, vocab) with labels.view(-1); for binary losses labels.float().unsqueeze(1)",
    ),
    Pattern(
        "other-error: shapes",
        r"mat1 and mat2 shapes cannot be multiplied \((?P<a1>\S+) and (?P<b1>[^)]+)\)",
        "the layer expects another number of features than its input has ({a1} and {b1})",
        "make in_features equal to the last dimension of the input (print x.shape before the layer)",
    ),
    Pattern(
        "no-gradient: target-modules",
        r"Target modules .{0,200}? not found in the base model",
        "the LoRA target names do not occur in this model",
        'target_modules="all-linear", or take the names from model.named_modules()',
    ),
    Pattern(
        "map-location: module-prefix",
        r"(?:Missing|Unexpected) key\(s\) in state_dict:.{0,80}?\"(?P<prefix>module|_orig_mod)\.",
        "the checkpoint was saved from a wrapped model: its names begin with '{prefix}.'",
        "save model.module.state_dict(), or strip the prefix: {{k.removeprefix('{prefix}.'): v for k, v"
        " in sd.items()}}",
    ),
    Pattern(
        "other-error: state-dict-keys",
        r"(?:Missing|Unexpected) key\(s\) in state_dict",
        "checkpoint and model have different parameters",
        "build the model as it was when it was saved (same class, adapters, heads); strict=False leaves the "
        "missing ones untrained",
    ),
    Pattern(
        "other-error: size-mismatch",
        r"size mismatch for (?P<name>[\w.]+): copying a param with shape",
        "the checkpoint's {name} has another shape: other num_labels, vocabulary or rank",
        "give the model the checkpoint's settings, or ignore_mismatched_sizes=True to start this layer anew",
    ),
    Pattern(
        "other-error: weights-only",
        r"Weights only load failed",
        "the file holds Python objects beside tensors, which torch.load refuses since 2.6",
        "save state dicts only; for a file that you trust: torch.serialization.safe_globals([...])",
    ),
    Pattern(
        "other-error: shared-tensors",
        r"Some tensors share memory, this will lead to duplicate memory",
        "tied weights cannot be saved twice in safetensors",
        "model.save_pretrained(...), or safetensors.torch.save_model, which knows ties",
    ),
    Pattern(
        "unmoved-state: optimizer-groups",
        r"loaded state dict contains a parameter group that doesn't match the size of optimizer's "
        r"group|loaded state dict has a different number of parameter groups",
        "the optimizer checkpoint was made for other trainable parameters",
        "freeze and add adapters exactly as in the first run before building the optimizer",
    ),
    Pattern(
        "other-error: eval-dataset",
        r"You have set `?args\.eval_strategy`? to \S+ but you didn't pass an `?eval_dataset`?",
        "evaluation is switched on without data for it",
        'pass eval_dataset=..., or eval_strategy="no"',
    ),
    Pattern(
        "other-error: best-model-strategy",
        r"load_best_model_at_end requires the sav(?:e|ing)",
        "the best model can only be found where it was evaluated and saved",
        "the same eval_strategy and save_strategy, save_steps a multiple of eval_steps",
    ),
    Pattern(
        "other-error: grpo-group",
        r"must be (?:evenly )?divisible by (?:the )?(?:num_generations|number of generations)",
        "the batch cannot be cut into groups of num_generations",
        "make per_device_train_batch_size x processes x accumulation a multiple of num_generations",
    ),
    Pattern(
        "other-error: worker-wrapper",
        r"Caught \w+ in DataLoader worker process \d+",
        "the error happened in a worker; the message below it is the fault itself",
        "see the original message; num_workers=0 gives a plain traceback",
        consequence=True,
    ),
)
