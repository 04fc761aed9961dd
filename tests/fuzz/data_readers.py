"""The readers that are fuzzed: for each, valid files that are made here, and a case that damages one and reads it.

`python tests/fuzz/data_readers.py READER CASES [SEED [FIRST]]` runs cases in this process, under a limit of memory and
a watchdog, and prints the outcomes it does not accept: anything but a value or a TrimtabError.
"""

from __future__ import annotations

import csv
import faulthandler
import io
import json
import resource
import shutil
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from damage import Damage

from trimtab.errors import TrimtabError

Case = Callable[[Damage], object]
MEMORY = 4 << 30
"""Bytes of address space that a reader may take beyond what the process has."""
SECONDS = 30.0
"""No case takes a second; a loaded machine is given time."""


def rows() -> list[dict[str, Any]]:
    return [
        {
            "instruction": f"Say {n}.",
            "input": "é" * n,
            "output": str(n),
            "n": n,
            "x": n / 3,
            "tags": ["a", {"b": None}],
        }
        for n in range(12)
    ]


def chats() -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    return [
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": f"q{n}"},
                {"role": "assistant", "content": "", "tool_calls": [call]}
                if n % 2
                else {"role": "user", "content": ""},
                {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        }
        for n in range(6)
    ]


def text_case(folder: Path, suffix: str, files: list[bytes]) -> Case:
    from trimtab.data.read import read_file

    path = folder / f"rows{suffix}"

    def case(damage: Damage) -> object:
        path.write_bytes(damage.raw(damage.random.choice(files), damage.random.choice(files)))
        return read_file(path)

    return case


def jsonl(folder: Path) -> Case:
    files = ["\n".join(map(json.dumps, made)).encode() for made in (rows(), chats())]
    files += [("\ufeff" + "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows())).encode()]
    files += ["\n".join(json.dumps(row) for row in rows()[:3]).encode("utf-16")]
    return text_case(folder, ".jsonl", files)


def json_list(folder: Path) -> Case:
    whole = [json.dumps(rows(), indent=1), json.dumps({"data": chats()}), "\n".join(map(json.dumps, rows()))]
    return text_case(folder, ".json", [text.encode() for text in whole])


def csv_rows(folder: Path) -> Case:
    files = [
        b'a,b,c\r\n1,"x ""y"", z",3\r\n,"two\nlines",\r\n' * 3,
        "a;b\n1,5;é\n".encode() * 2,
        b"text\none\ntwo\n",
    ]
    return text_case(folder, ".csv", files)


def tsv_rows(folder: Path) -> Case:
    return text_case(
        folder, ".tsv", [b'a\tb\n"one\ttwo\n"q"\t3\n', b'text\tlabel\n"Say ""hi"""\t0\n"one\ntwo"\t1\n']
    )


def parquet(folder: Path) -> Case:
    import pyarrow as pa
    import pyarrow.parquet as pq

    made = []
    talks = [
        {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a"}]}
        for n in range(9)
    ]
    plain = [{**row, "tags": ["a", None], "data": bytes(range(40)), "when": None} for row in rows()]
    dates = pa.table(
        {
            "at": pa.array([0, 1 << 40], pa.timestamp("us", "UTC")),
            "d": pa.array(["a", "a"]).dictionary_encode(),
        }
    )
    for table in (pa.Table.from_pylist(plain), pa.Table.from_pylist(talks), dates):
        for options in (
            {"compression": "snappy"},
            {"compression": "none", "write_page_checksum": True},
            {"compression": "gzip"},
        ):
            held = io.BytesIO()
            pq.write_table(table, held, **options)
            made.append(held.getvalue())
    ends = [len(file) - 8 - int.from_bytes(file[-8:-4], "little") for file in made]
    path = folder / "rows.parquet"

    def case(damage: Damage) -> object:
        from trimtab.data.read import read_file

        at = damage.random.randrange(len(made))
        file, end = made[at], ends[at]
        kind = damage.random.randrange(3)
        if kind == 0:
            damaged = damage.raw(file, damage.random.choice(made))
        else:  # the footer decides what is read; or the pages alone, with a whole footer behind them
            pages = damage.raw(file[4:end])[: end - 4].ljust(end - 4, b"\0") if kind == 1 else file[4:end]
            footer = damage.raw(file[end:-8]) if kind == 2 else file[end:-8]
            damaged = b"PAR1" + pages + footer + struct.pack("<I", len(footer)) + b"PAR1"
        path.write_bytes(damaged)
        return read_file(path)

    return case


def pictures(folder: Path) -> Case:
    from PIL import Image

    from trimtab.data.pictures import Picture

    made = []
    image = Image.radial_gradient("L").resize((24, 20))
    shapes = "PNG:RGB PNG:P PNG:I;16 PNG:LA JPEG:RGB JPEG:CMYK JPEG:L GIF:P WEBP:RGB BMP:RGB TIFF:RGB TIFF:F PPM:RGB"
    for form, mode in (shape.split(":") for shape in f"{shapes} JPEG2000:RGB TIFF:I;16".split()):
        for options in ({}, {"exif": _exif()} if form in ("JPEG", "PNG", "WEBP") else {}):
            held = io.BytesIO()
            (image.convert("I").convert(mode) if mode == "I;16" else image.convert(mode)).save(
                held, form, **options
            )
            made.append(held.getvalue())
    held = io.BytesIO()
    frames = [image.convert("P"), image.rotate(90).convert("P")]
    frames[0].save(held, "GIF", save_all=True, append_images=frames[1:])
    made.append(held.getvalue())

    def case(damage: Damage) -> object:
        return Picture(
            damage.raw(damage.random.choice(made), damage.random.choice(made)), "rows.jsonl, line 1"
        ).open()

    return case


def _exif() -> bytes:
    from PIL import Image

    told = Image.Exif()
    told[0x0112] = 6
    return told.tobytes()


def sounds(folder: Path) -> Case:
    import numpy as np
    import soundfile

    from trimtab.data.sound import read_sound, resample

    made = []
    samples = np.sin(np.arange(4000) / 20).astype(np.float32) * 0.5
    shapes = "WAV:PCM_16 WAV:FLOAT WAV:PCM_24 WAVEX:PCM_16 WAV:IMA_ADPCM FLAC:PCM_16 OGG:VORBIS OGG:OPUS RF64:PCM_16"
    for number, shape in enumerate(f"{shapes} MP3:MPEG_LAYER_III".split()):
        form, kind = shape.split(":")
        channels = 2 if number in (1, 3) else 1
        held = io.BytesIO()
        frames = np.repeat(samples[:, None], channels, 1)
        soundfile.write(held, frames, 24_000, kind, format=form)
        made.append(held.getvalue())
    path = folder / "clip.wav"

    def case(damage: Damage) -> object:
        data = damage.raw(damage.random.choice(made), damage.random.choice(made))
        if damage.random.random() < 0.5:
            path.write_bytes(data)
            sound = read_sound(path, "clip.wav")
        else:
            sound = read_sound(data, "clip.wav")
        return resample(sound.samples[:48_000], sound.rate, 24_000)

    return case


def told_rows(folder: Path) -> Case:
    """Rows of the formats for texts, as values: what the readers gave, with values of any kind in them."""
    from trimtab.config.schema import DataSettings
    from trimtab.data.clean import Tally, usable
    from trimtab.data.convert import convert
    from trimtab.data.formats import check_columns, detect, unused_columns
    from trimtab.data.sources import load_rows

    sets = [rows(), chats(), [{"text": "a"}, {"text": "b"}], [{"prompt": "a", "completion": "b"}] * 2]
    sets += [[{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}] * 2]
    path = folder / "told.jsonl"

    def case(damage: Damage) -> object:
        made = damage.random.choice(sets)
        path.write_bytes(b"\n".join(damage.as_json(damage.tree(row)) for row in made))
        data = DataSettings(source=str(path))
        loaded = load_rows(str(path), data)
        found = detect(loaded.rows, data.format, data.columns)
        tally = Tally()
        unused_columns(loaded.rows[0], found.form, data.columns)

        def make(row: Any) -> Any:
            check_columns(row, found.form, loaded.rows[0], data.columns)
            return convert(row, found.form, data.columns, tally)

        kept = list(usable(loaded.rows, make, lambda example: example.key, tally, False))
        return json.dumps([tally.reasons(), len(kept)], ensure_ascii=False).encode()

    return case


def picture_rows(folder: Path) -> Case:
    """Rows with pictures, up to the pictures."""
    from PIL import Image

    from trimtab.config.schema import DataSettings
    from trimtab.config.vision import VisionSettings
    from trimtab.data.picture_prepare import prepare_pictures

    Image.new("RGB", (8, 6), "red").save(folder / "red.png")
    turns = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "q"}]},
        {"role": "assistant", "content": "a"},
    ]
    sets: list[Any] = [
        [{"image": "red.png", "question": f"q{n}", "answer": f"a{n}"} for n in range(3)],
        [{"images": ["red.png"], "messages": turns}, {"images": [], "messages": [turns[1]]}],
        [{"image": {"path": "red.png", "bytes": None}, "question": "q", "answer": ["a", "b"]}],
        [
            {
                "image": "red.png",
                "conversations": [{"from": "human", "value": "<image>q"}, {"from": "gpt", "value": "a"}],
            }
        ],
    ]
    path = folder / "pictures.jsonl"

    def case(damage: Damage) -> object:
        made = damage.random.choice(sets)
        path.write_bytes(b"\n".join(damage.as_json(damage.tree(row)) for row in made))
        data = DataSettings(source=str(path), eval_fraction=0.0)
        return prepare_pictures(data, VisionSettings(), 0, lambda told: None)

    return case


def voice_rows(folder: Path) -> Case:
    """Rows of a voice, up to the clips."""
    from trimtab.config.schema import DataSettings
    from trimtab.data.clean import Tally, usable
    from trimtab.data.voice_rows import made, used_columns
    from trimtab.data.voice_source import load_voice_rows

    (folder / "a.wav").write_bytes(b"RIFF")
    (folder / "a.txt").write_text("Hello.")
    sets: list[Any] = [
        [{"audio": "a.wav", "text": "Hi.", "speaker": "x", "scene": "quiet_room"}] * 2,
        [{"id": "a", "text_file": "a.txt", "reference": "a.wav", "reference_text": "So."}],
        {
            "samples": [{"audio": "a.wav", "ref_speakers": [{"audio_file": "a.wav", "transcript": "x"}]}],
            "dataset_info": {},
        },
        {"a": {"transcript": "Hi."}, "b": {"transcript": "So."}},
    ]

    def case(damage: Damage) -> object:
        one = damage.tree(damage.random.choice(sets))
        path = folder / "voice.json"
        path.write_bytes(damage.as_json(one))
        data = DataSettings(source=str(path))
        loaded = load_voice_rows(str(path), data, "data.source")
        columns = used_columns(loaded.rows, data.columns)
        tally = Tally()
        return list(
            usable(loaded.rows, lambda row: made(row, columns, tally), lambda row: row.text, tally, True)
        )

    return case


def _tiny() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=32, bos_token_id=None, eos_token_id=1, pad_token_id=1,
        )
    )  # fmt: skip


def _tensors(damage: Damage, file: bytes) -> bytes:
    """A safetensors file with damaged bytes, or with a damaged tree for its header."""
    if damage.random.random() < 0.5:
        return damage.raw(file)
    end = 8 + int.from_bytes(file[:8], "little")
    header = damage.as_json(damage.tree(json.loads(file[8:end])))
    return len(header).to_bytes(8, "little") + header + file[end:]


def _quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def weight_headers(folder: Path) -> Case:
    """The headers of a model's files and its index, without loading them."""
    from trimtab.models.weight_files import model_tensors

    _quiet()
    single, shards = folder / "single", folder / "shards"
    _tiny().save_pretrained(single)
    _tiny().save_pretrained(shards, max_shard_size="2KB")
    kept = {
        file: file.read_bytes()
        for home in (single, shards)
        for file in home.iterdir()
        if "model" in file.name
    }

    def case(damage: Damage) -> object:
        file = damage.random.choice(sorted(kept))
        if file.suffix == ".json":
            file.write_bytes(damage.as_json(damage.tree(json.loads(kept[file]))))
        else:
            file.write_bytes(_tensors(damage, kept[file]))
        try:
            return model_tensors(file.parent, "model.name=x")
        finally:
            file.write_bytes(kept[file])

    return case


def weights(folder: Path) -> Case:
    """A whole model, loaded; its weights or its index damaged."""
    from trimtab.config.schema import ModelSettings
    from trimtab.models import load_model
    from trimtab.placement import PlacementPlan

    _quiet()
    plan = PlacementPlan(
        device="cpu", precision="fp32", scaler=False, weight_precision="fp32", strategy="single"
    )
    single, shards = folder / "single", folder / "shards"
    _tiny().save_pretrained(single)
    _tiny().save_pretrained(shards, max_shard_size="2KB")
    kept = {
        file: file.read_bytes()
        for home in (single, shards)
        for file in home.iterdir()
        if "model" in file.name
    }

    def case(damage: Damage) -> object:
        file = damage.random.choice(sorted(kept))
        if file.suffix == ".json":
            file.write_bytes(damage.as_json(damage.tree(json.loads(kept[file]))))
        else:
            file.write_bytes(_tensors(damage, kept[file]))
        try:
            return load_model(ModelSettings(name=str(file.parent)), plan)
        finally:
            file.write_bytes(kept[file])

    return case


def adapters(folder: Path) -> Case:
    from peft import LoraConfig, get_peft_model

    from trimtab.models.kept_adapter import with_adapter

    _quiet()
    get_peft_model(_tiny(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"])).save_pretrained(str(folder))
    config, file = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    told, held = json.loads(config.read_text()), file.read_bytes()

    def case(damage: Damage) -> object:
        config.write_text(json.dumps(told))
        file.write_bytes(held)
        if damage.random.random() < 0.5:
            config.write_bytes(damage.as_json(damage.tree(told)))
        else:
            file.write_bytes(_tensors(damage, held))
        return with_adapter(_tiny(), folder)

    return case


def trajectories(folder: Path) -> Case:
    """A file of losses: its records, and the request that its first line makes."""
    from trimtab.recipes.replay import _base
    from trimtab.zeroth.settings import ZerothSettings
    from trimtab.zeroth.trajectory import TrajectoryWriter, make_header, read_trajectory

    base = {"model": {"name": "smollm2"}, "method": "full", "lora": {}, "seed": 0, "weight_precision": "fp32"}
    made = []
    for settings in (
        ZerothSettings(),
        ZerothSettings(method="dizo", interval=2, projection_iterations=2, schedule="given"),
        ZerothSettings(method="fzoo", queries=3, schedule="cosine", total_steps=9),
    ):
        path = folder / "made.bin"
        writer = TrajectoryWriter(path, make_header(settings, [], [], {"base": base}))
        for _ in range(5):
            writer.step([1.0] * settings.passes, 0.1)
        made.append(path.read_bytes())
    path = folder / "trajectory.bin"

    def case(damage: Damage) -> object:
        line, _, rest = damage.random.choice(made).partition(b"\n")
        if damage.random.random() < 0.5:
            path.write_bytes(damage.raw(line + b"\n" + rest))
        else:
            path.write_bytes(damage.as_json(damage.tree(json.loads(line))) + b"\n" + rest)
        return _base(read_trajectory(path), path, ())

    return case


def codecs(folder: Path) -> Case:
    """A codec that a run kept: its config and its weights."""
    import numpy as np

    from trimtab.config.schema import Config
    from trimtab.models.codec import _loaded
    from trimtab.models.spectral_codec import SpectralCodec
    from trimtab.placement import PlacementPlan

    _quiet()
    plan = PlacementPlan(
        device="cpu", precision="fp32", scaler=False, weight_precision="fp32", strategy="single"
    )
    clip = np.random.default_rng(0).normal(size=48_000).astype(np.float32) * 0.1
    SpectralCodec.learn([clip], num_quantizers=2, codebook_size=8, seed=0).save_pretrained(folder)
    config, file = folder / "config.json", folder / "model.safetensors"
    told, held = json.loads(config.read_text()), file.read_bytes()
    asked = Config(recipe="voice")

    def case(damage: Damage) -> object:
        config.write_text(json.dumps(told))
        file.write_bytes(held)
        if damage.random.random() < 0.5:
            config.write_bytes(damage.as_json(damage.tree(told)))
        else:
            file.write_bytes(_tensors(damage, held))
        return _loaded(asked, plan, str(folder))

    return case


def tasks(folder: Path) -> Case:
    """Rows of the benchmark tasks in a folder of the user's, up to the questions that a model is asked."""
    from trimtab.data.tasks import TASKS
    from trimtab.data.tasks.load import load_task

    whole = {
        name: [dict(row.values) for row in load_task(task, "sample", train_rows=2).splits["train"]]
        for name, task in TASKS.items()
    }
    own: list[dict[str, Any]] = [
        {"prompt": "q", "candidates": ["a", "b"], "label": 1},
        {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 0], "options": [[1], [2]], "label": 0},
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
    ]
    forms = ("jsonl", "json", "csv", "tsv")

    def case(damage: Damage) -> object:
        name = damage.random.choice(list(TASKS))
        home, form = folder / name, damage.random.choice(forms)
        home.mkdir(exist_ok=True)
        for file in home.iterdir():
            file.unlink()
        made = list(whole[name])
        if form.startswith("json") and damage.random.random() < 0.3:
            made = [damage.random.choice(own)]
        at = damage.random.randrange(len(made))
        hurt = [*made[:at], damage.tree(made[at]), *made[at + 1 :]]
        for split in TASKS[name].splits:
            (home / f"{split}.{form}").write_bytes(_told_as(form, hurt if split == "train" else made, damage))
        loaded = load_task(TASKS[name], folder, train_rows=2)
        questions = [TASKS[name].question(row) for rows in loaded.splits.values() for row in rows]
        # A tokenizer takes what UTF-8 can hold.
        return [text.encode() for q in questions for text in (q.prompt, *q.options) if isinstance(text, str)]

    return case


def _told_as(form: str, made: list[Any], damage: Damage) -> bytes:
    if form == "json":
        return damage.as_json(made)
    if form == "jsonl":
        return b"\n".join(damage.as_json(row) for row in made)
    there = [row for row in made if isinstance(row, dict)]
    names = list(dict.fromkeys(name for row in there for name in row))
    held = io.StringIO()
    writer = csv.DictWriter(held, names, delimiter="\t" if form == "tsv" else ",")
    writer.writeheader()
    writer.writerows(there)
    text = held.getvalue().encode("utf-8", "surrogatepass")
    return damage.raw(text) if damage.random.random() < 0.2 else text


READERS: dict[str, Callable[[Path], Case]] = {
    "jsonl": jsonl,
    "json": json_list,
    "csv": csv_rows,
    "tsv": tsv_rows,
    "parquet": parquet,
    "told_rows": told_rows,
    "tasks": tasks,
    "pictures": pictures,
    "picture_rows": picture_rows,
    "sounds": sounds,
    "voice_rows": voice_rows,
    "weight_headers": weight_headers,
    "weights": weights,
    "adapters": adapters,
    "trajectories": trajectories,
    "codecs": codecs,
}


def fuzz(reader: str, cases: int, seed: int = 0, first: int = 0) -> tuple[Counter[str], list[str]]:
    """How the cases ended, and the text of each end that is not accepted."""
    ends: Counter[str] = Counter()
    bad: list[str] = []
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{reader}-"))
    try:
        case = READERS[reader](folder)
        for number in range(first, first + cases):
            started = time.monotonic()
            try:
                case(Damage(seed, number))
                ends["value"] += 1
            except TrimtabError as error:
                ends[type(error).__name__] += 1
                if len(str(error)) > 7000 or str(error).count("\n") != 2:
                    bad.append(f"{reader} {seed}:{number}: a message of another form: {str(error)[:500]!a}")
            except Exception as error:
                ends[type(error).__name__] += 1
                bad.append(f"{reader} {seed}:{number}: " + "".join(traceback.format_exception(error)[-6:]))
            if time.monotonic() - started > SECONDS:
                bad.append(f"{reader} {seed}:{number}: took {time.monotonic() - started:.0f} s")
            yield_watchdog()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ends, bad


def yield_watchdog() -> None:
    """Starts the watchdog again, where it runs: a case that hangs in C is ended with its stack."""
    if _watched:
        faulthandler.dump_traceback_later(2 * SECONDS, exit=True)


_watched = False


def main(reader: str, cases: int, seed: int = 0, first: int = 0) -> int:
    global _watched
    faulthandler.enable()
    fuzz(reader, 3, seed, first)  # imports, before memory is counted
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))
    _watched = True
    ends, bad = fuzz(reader, cases, seed, first)
    kinds = Counter(text.splitlines()[-1][:150] for text in bad)
    print(
        json.dumps(
            {"reader": reader, "seed": seed, "cases": cases, "ends": ends, "bad": len(bad), "kinds": kinds}
        )
    )
    for text in bad[:5]:
        print(text)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
