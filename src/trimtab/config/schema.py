"""The settings of a run, documented where they are declared: the general ones here, a recipe's own in its file.

This file only declares: reading YAML, overrides, aliases and error reports live in `load.py`.
Importing it never imports torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from trimtab.config.grpo import GrpoSettings as GrpoSettings
from trimtab.config.section import Section as Section
from trimtab.config.speed import SpeedSettings as SpeedSettings
from trimtab.config.vision import ShirgSettings as ShirgSettings
from trimtab.config.vision import VisionSettings as VisionSettings
from trimtab.config.voice import VoiceSettings as VoiceSettings
from trimtab.config.zeroth_order import ZerothSettings as ZerothSettings

BadRows = Annotated[
    Literal["drop", "stop"], BeforeValidator(lambda said: "stop" if said == "error" else said)
]
"""`error` was the name of `stop`, and still means it."""

Device = Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")]


def _names(said: object) -> object:
    """One name is a list of one; false and null name none."""
    return [said] if isinstance(said, str) else [] if said is None or said is False else said


class ModelSettings(Section):
    """Which model is tuned. `model: NAME` is short for `model: {name: NAME}`."""

    name: Annotated[str, Field(min_length=1)] = "smollm2"
    """The built-in `smollm2` (`tiny-vision` sees, `tiny-voice` speaks), a folder with safetensors, or a hub id."""

    revision: str | None = None
    """Branch, tag or commit of a hub model."""

    trust_remote_code: Annotated[list[str], BeforeValidator(_names)] = Field(default_factory=list)
    """Repositories (or folders) whose Python code may run here, each by its name: `--trust-remote-code owner/name`.
    Counts on the command line alone, is not kept with a run, and must name the model."""

    chat_template: str | None = None
    """A `.jinja` file (or the template text) to use in place of the model's own chat template."""

    attn_implementation: str | None = None
    """Attention kernel (`sdpa`, `eager`, `flash_attention_2`); null leaves the choice to transformers."""

    quantize: Literal["nf4"] | None = None
    """`nf4` holds the frozen weights of the language model's linear layers in four bits, as QLoRA does, with `method:
    lora`: a quarter of their memory, for GPUs that are small. The adapter loads on the unquantised model too, and
    `export` merges it into that. Embeddings, heads and towers stay as they are; null quantises nothing."""

    ignore_weights: list[str] = Field(default_factory=list)
    """Parts of the weights that the model has no place for and does without, by how their tensors' names begin
    (`score`, `v_head`; `*` stands for anything). Others that it has no place for are refused."""


class DataSettings(Section):
    """What the model is tuned on. `data: PATH` is short for `data: {source: PATH}`."""

    source: Annotated[str, Field(min_length=1)] = "device-errors"
    """The built-in `device-errors`, a file or folder (JSON, JSONL, Parquet, CSV), `s3://bucket/key`, or a hub id."""

    eval_source: str | None = None
    """A separate source for evaluation, read like `source`. Without it a part of `source` is held out."""

    format: Literal["auto", "alpaca", "sharegpt", "messages", "prompt_completion", "text"] = "auto"
    """How rows are laid out; `auto` detects it from the columns and says what it found."""

    columns: dict[str, str] = Field(default_factory=dict)
    """Maps a column that the format expects to the column that the file has: `{instruction: question}`."""

    eval_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    """Share of rows held out for evaluation when there is no `eval_source`; 0 holds out nothing."""

    max_rows: Annotated[int, Field(ge=1)] | None = None
    """Read at most this many rows."""

    max_length: Annotated[int, Field(ge=8)] = 1024
    """Longest sequence in tokens; what is longer is cut (see `too_long`)."""

    too_long: Literal["truncate", "drop"] = "truncate"
    """What happens to a row over `max_length`. A row left without any answer token is always dropped and counted."""

    packing: bool = False
    """Put several short rows into one sequence of `max_length` tokens; rows do not see each other."""

    train_on: Literal["answers", "all"] = "answers"
    """Which tokens the loss is computed on: the assistant's answers, or everything."""

    bad_rows: BadRows = "drop"
    """Rows that cannot be trained on (no answer, a broken picture): drop and count them, or stop at the first."""

    keep_duplicates: bool = False
    """Keep rows that repeat an earlier row exactly. Otherwise they are dropped and counted."""

    split: str = "train"
    """Which split of a hub data set to read."""

    subset: str | None = None
    """Which configuration of a hub data set to read."""

    media_root: str | None = None
    """A folder outside of the data's own in which rows may name pictures and clips; `/` allows every folder. Without
    it, a path in a row that leads out of the data's folder (absolute, `..`, a link) is refused."""

    endpoint_url: str | None = None
    """Endpoint of an S3-compatible store (R2, MinIO); without it AWS_ENDPOINT_URL or AWS itself."""


class LoraSettings(Section):
    """The low-rank adapter; used with `method: lora`."""

    r: Annotated[int, Field(ge=1)] = 16
    """Rank of the update."""

    alpha: Annotated[int, Field(ge=1)] = 32
    """Scale of the update: it is multiplied by alpha / r."""

    rslora: bool = False
    """Multiply by alpha / √r in place of alpha / r (rsLoRA), so that a higher rank does not weaken the update."""

    dora: bool = False
    """Train the length of each output's weights apart from their direction (DoRA): slower, often better at low rank."""

    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout on the adapter's input while training."""

    targets: str | list[str] = "all-linear"
    """Which layers get an adapter: the roles `attention`, `mlp`, `all-linear` of the language model, `vision` and
    `connector` beside it, or module names such as `q_proj`. `ROLE:LAYERS` means those layers of the stack alone (`3`,
    `0-3`, `24-` to the last), `ROLE:LAYERS:NAMES` these modules in them: `"vision:0-3:q_proj,k_proj"` (in quotes).
    Where a layer has an MLP for text and one for sound (Higgs Audio v2), `mlp` and `all-linear` mean both, `text_mlp`
    and `audio_mlp` one of them; `audio_head` is the head that gives the codes."""


class TrainingSettings(Section):
    """How long, how fast, how often."""

    epochs: Annotated[float, Field(gt=0)] = 3.0
    """Passes over the training rows; `max_steps` wins when set."""

    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Stop after this many optimizer steps."""

    batch_size: Annotated[int, Field(ge=1)] = 4
    """Rows per device in one forward pass."""

    eval_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Rows per device in evaluation; null takes `batch_size`."""

    gradient_accumulation_steps: Annotated[int, Field(ge=1)] = 1
    """Forward passes gathered into one optimizer step."""

    effective_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Rows of one optimizer step: `batch_size` × processes × `gradient_accumulation_steps`. When set, another product
    is an error, so that a run on other machines is the run that was meant; null: not checked."""

    halve_batch_on_oom: bool = False
    """Where a step finds no memory, begin again from the last checkpoint with half the `batch_size` and twice the
    `gradient_accumulation_steps`, as often as it takes: the same rows a step. Said, and kept in the summary."""

    learning_rate: Annotated[float, Field(gt=0)] = 2e-4
    """Peak learning rate."""

    lr_scheduler: Literal["linear", "cosine", "constant", "constant_with_warmup", "polynomial"] = "cosine"
    """How the learning rate falls after the warm-up."""

    warmup_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 0.03
    """Share of the steps over which the learning rate rises; `warmup_steps` wins when set."""

    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Number of steps over which the learning rate rises."""

    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """AdamW's weight decay."""

    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Gradients are clipped to this norm."""

    optimizer: str = "auto"
    """Optimizer, by the name that transformers gives it; `auto` is AdamW, on CUDA torch's fused one."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time. Always non-re-entrant."""

    group_by_length: bool = False
    """Batch rows of similar length together, to compute less padding."""

    eval_steps: Annotated[int, Field(ge=1)] | None = None
    """Evaluate every so many steps; null evaluates once an epoch."""

    save_steps: Annotated[int, Field(ge=1)] | None = None
    """Save a checkpoint every so many steps; null saves when it evaluates."""

    save_total_limit: Annotated[int, Field(ge=1)] | None = 2
    """Keep at most this many checkpoints; null keeps all."""

    keep_best: bool = True
    """End with the checkpoint of the lowest held-out loss, not the last one."""

    logging_steps: Annotated[int, Field(ge=1)] = 1
    """Write a line of metrics every so many steps."""

    dataloader_workers: Annotated[int, Field(ge=0)] = 0
    """Worker processes that prepare batches; they stay on the CPU."""

    resume: bool | str = False
    """`true` goes on from the newest checkpoint in `output_dir`; a path goes on from that checkpoint."""

    resume_changed: Literal["data", "reward", "both"] | None = None
    """What may be another than the resumed run began with, and is taken from there on: `data` (the rows and how they
    are read), `reward` (functions, their source and weights). Otherwise another one is refused."""


class MonitorSettings(Section):
    """What is shown and watched while the run goes."""

    progress: Literal["auto", "bar", "plain", "none"] = "auto"
    """A bar on a terminal, plain lines elsewhere; or choose one."""

    slow_after_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Without a finished step for this long, say that the run is slow and where it is."""

    stuck_after_seconds: Annotated[float, Field(gt=0)] = 300.0
    """Without a finished step for this long (three times the longest recent one, where that is more), idle or waiting
    for another rank: the run is stuck."""

    start_stuck_after_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """The same until the end of the first step: downloads, loading and compiling take long. Also how long the processes
    wait for each other at the start."""

    on_stuck: Literal["warn", "stop"] = "warn"
    """What is done about a run that is stuck: say so with every stack and who is behind, or end it as well, with its
    last checkpoint to go on from."""

    restarts: Annotated[int, Field(ge=0)] = 3
    """How often in a row, without a new checkpoint between, `train` begins again from the last checkpoint by itself
    when one of the several processes that it started dies; 0 never."""

    stop_on_nonfinite: bool = True
    """Stop loudly at a NaN or infinite loss or gradient."""

    report_to: list[str] = Field(default_factory=list)
    """Trackers that also get the metrics: tensorboard, trackio, wandb, mlflow."""


class SampleSettings(Section):
    """Prompts answered before and after training, to see the difference with one's own eyes."""

    prompts: list[str] = Field(default_factory=list)
    """User messages to answer."""

    max_new_tokens: Annotated[int, Field(ge=1)] = 80
    """Longest answer in tokens."""

    held_out: Annotated[int, Field(ge=0)] = 0
    """Held-out rows answered before and after training, counted as right where the whole answer is the same."""


class ExportSettings(Section):
    """What `train` makes of the finished run. `export: ollama` is short for `export: {to: ollama}`."""

    to: Literal["merged", "gguf", "ollama"] | None = None
    """A transformers folder, one GGUF file, or a GGUF with a Modelfile; null leaves it to `trimtab export`."""

    dtype: Literal["f32", "f16", "bf16", "q8_0"] | None = None
    """Number format; null takes f16 for a GGUF, and the base model's own for `merged`."""

    name: Annotated[str, Field(min_length=1)] | None = None
    """Name of the model, in the file and in Ollama; null takes the run folder's."""


class Config(Section):
    """One run, whole. Nothing outside this decides how a run goes, but for the machine it runs on."""

    recipe: Literal["sft", "grpo", "zeroth_order", "vision", "voice"] = "sft"
    """What kind of training this is: supervised fine-tuning, rewards on completions, zeroth-order steps, answers about
    pictures, or a voice."""

    model: ModelSettings = Field(default_factory=ModelSettings)
    data: DataSettings = Field(default_factory=DataSettings)

    method: Literal["lora", "full"] = "lora"
    """Tune a low-rank adapter, or all weights."""

    lora: LoraSettings = Field(default_factory=LoraSettings)
    training: TrainingSettings = Field(default_factory=TrainingSettings)
    grpo: GrpoSettings = Field(default_factory=GrpoSettings)
    zeroth: ZerothSettings = Field(default_factory=ZerothSettings)
    vision: VisionSettings = Field(default_factory=VisionSettings)
    shirg: ShirgSettings = Field(default_factory=ShirgSettings)
    voice: VoiceSettings = Field(default_factory=VoiceSettings)
    speed: SpeedSettings = Field(default_factory=SpeedSettings)

    device: Device = "auto"
    """auto, cpu, cuda, cuda:N or mps. A device that is not there is an error, never a silent fall-back."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Number format of the computation; `auto`: bf16 on GPUs that have it, fp16 on older ones, else fp32."""

    model_parallel: bool | None = None
    """Split one model over several GPUs in one process: true demands it, null decides, false forbids it and keeps one
    device (unless `processes` or `sharding` asks for several)."""

    sharding: bool | None = None
    """Shard weights and optimizer over the processes (FSDP2): true demands it, false forbids it, null decides."""

    processes: Annotated[int, Field(ge=1)] | None = None
    """Processes on this machine, one per GPU; null decides. Under a launcher the launcher decides."""

    monitor: MonitorSettings = Field(default_factory=MonitorSettings)
    samples: SampleSettings = Field(default_factory=SampleSettings)
    export: ExportSettings = Field(default_factory=ExportSettings)

    output_dir: Annotated[str, Field(min_length=1)] | None = None
    """Where the run is kept; null makes a new folder under `runs/`."""

    overwrite: bool = False
    """Move what an earlier run wrote in `output_dir` aside, into `replaced-TIME/` there; nothing else is touched."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the split, the order, the adapter's start and dropout."""
