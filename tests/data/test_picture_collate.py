"""Batches of pictures, token by token for each family: labels on the answers and their ends, and on nothing else."""

from __future__ import annotations

import pickle
import re
from itertools import groupby
from typing import Any

import pytest
import torch

from picture_rows import drawn, question, turns
from tiny_processors import FAMILIES, Family, tiny_pair, tiny_processor
from trimtab.data.clean import BadRow
from trimtab.data.picture_collate import PictureCollator
from trimtab.data.picture_tokens import moved
from trimtab.data.pictures import Picture, PictureRow
from trimtab.data.render import IGNORED
from trimtab.errors import RequestError

CHATTING = [name for name in FAMILIES if name != "paligemma"]
WIDE, SQUARE, TALL = drawn(40, 20), drawn(28, 28, "blue"), drawn(24, 56, "green")
ASKED = "How many bars?"
# What a row of one picture of 40 × 20 and one question is for each family, up to its answer; and its answer.
SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
SEEN = "<|vision_start|><|image_pad|><|vision_end|>"
SPLIT = (
    "<fake_token_around_image><row_1_col_1><image><fake_token_around_image><row_1_col_2><image>\n"
    "\n<fake_token_around_image><global-img><image><fake_token_around_image>"
)
SOFT = "<start_of_image>" + "<image_soft_token>" * 4 + "<end_of_image>"
EXPECTED = {
    "llava": (f"<s>USER: {'<image>' * 4}\n{ASKED} ASSISTANT:", " 14</s>"),
    "llava_onevision": (
        f"<|im_start|>user {'<image>' * 14}\n{ASKED}<|im_end|><|im_start|>assistant\n",
        "14<|im_end|>",
    ),
    "qwen2_5_vl": (
        f"{SYSTEM}<|im_start|>user\n{SEEN}{ASKED}<|im_end|>\n<|im_start|>assistant\n",
        "14<|im_end|>",
    ),
    "qwen3_vl": (f"<|im_start|>user\n{SEEN}{ASKED}<|im_end|>\n<|im_start|>assistant\n", "14<|im_end|>"),
    "idefics3": (
        f"<|begin_of_text|>User:{SPLIT}{ASKED}<end_of_utterance>\nAssistant:",
        " 14<end_of_utterance>",
    ),
    "smolvlm": (f"<|im_start|>User:{SPLIT}{ASKED}<end_of_utterance>\nAssistant:", " 14<end_of_utterance>"),
    "paligemma": (f"{'<image>' * 4}<bos>{ASKED}\n", "14<eos>"),
    "gemma3": (
        f"<bos><start_of_turn>user\n\n\n{SOFT}\n\n{ASKED}<end_of_turn>\n<start_of_turn>model\n",
        "14<end_of_turn>",
    ),
    "internvl": (
        f"<|im_start|>user\n<img>{'<IMG_CONTEXT>' * 3}</img>\n{ASKED}<|im_end|>\n<|im_start|>assistant\n",
        "14<|im_end|>",
    ),
}


def collator(model_type: str, **options: Any) -> PictureCollator:
    return PictureCollator(tiny_processor(model_type), **options)


def trained(made: PictureCollator, batch: dict[str, torch.Tensor], row: int = 0) -> list[str]:
    """What is trained on in a row, as text, one entry for each run of labels."""
    ids, labels = batch["input_ids"][row].tolist(), batch["labels"][row].tolist()
    runs = groupby(zip(ids, labels, strict=True), key=lambda pair: pair[1] != IGNORED)
    found = [[label for _, label in run] for kept, run in runs if kept]
    assert all(label in (IGNORED, token) for token, label in zip(ids, labels, strict=True))
    return [made.processor.tokenizer.decode(run) for run in found]


def unpadded(batch: dict[str, torch.Tensor], row: int, name: str = "input_ids") -> list[int]:
    return batch[name][row][batch["attention_mask"][row].bool()].tolist()


def mixed(model_type: str) -> list[PictureRow]:
    """No picture, one, two; and where the family knows turns, a conversation with pictures in two of them."""
    rows = [
        question("What is three and four?", "seven", where="mixed, row 0"),
        question(ASKED, "14", WIDE, where="mixed, row 1"),
        question(
            "Which colour is the largest of the two?", "green, I think", SQUARE, TALL, where="mixed, row 2"
        ),
    ]
    return [*rows, talk()] if model_type in CHATTING else rows


def talk() -> PictureRow:
    return turns(
        ("user", "<image>What is it?"),
        ("assistant", "a circle"),
        ("user", "<image>And this?\nSay it briefly."),
        ("assistant", "assistant"),
        pictures=(WIDE, TALL),
    )


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_row_is_what_the_family_writes_and_its_answer_alone_is_trained_on(model_type: str) -> None:
    made = collator(model_type)
    batch = made([question(ASKED, "14", WIDE)])
    before, answer = EXPECTED[model_type]
    labels = batch["labels"][0]
    start = int((labels != IGNORED).nonzero()[0])
    decode = made.processor.tokenizer.decode
    assert decode(batch["input_ids"][0][:start]) == before
    assert decode(batch["input_ids"][0][start:]) == answer
    assert torch.equal(labels[start:], batch["input_ids"][0][start:])
    assert (labels[:start] == IGNORED).all()
    assert {value.device.type for value in batch.values()} == {"cpu"}


@pytest.mark.parametrize("model_type", CHATTING)
def test_every_answer_of_a_conversation_is_trained_on(model_type: str) -> None:
    made = collator(model_type)
    end = EXPECTED[model_type][1].partition("14")[2]
    # LLaVA's template writes no end behind an answer that is not the last.
    first_end = "" if model_type == "llava" else end
    space = " " if model_type in ("llava", "idefics3", "smolvlm") else ""
    assert trained(made, made([talk()])) == [f"{space}a circle{first_end}", f"{space}assistant{end}"]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_mixed_batch_holds_each_row_as_it_is_alone(model_type: str) -> None:
    made, rows = collator(model_type), mixed(model_type)
    batch = made(rows)
    padding = batch["attention_mask"] == 0
    assert (batch["input_ids"][padding] == made.processor.tokenizer.pad_token_id).all()
    assert (batch["labels"][padding] == IGNORED).all()
    marks = [made.processor.tokenizer.convert_tokens_to_ids(FAMILIES[model_type].picture)]
    assert (batch["labels"][torch.isin(batch["input_ids"], torch.tensor(marks))] == IGNORED).all()
    for number, row in enumerate(rows):
        alone = made([row])
        for name in alone:
            if name in batch and alone[name].shape == alone["input_ids"].shape and name != "image_sizes":
                assert unpadded(batch, number, name) == unpadded(alone, 0, name), name
        assert trained(made, batch, number) == trained(made, alone)
        assert bool(row.pictures) == ("pixel_values" in alone)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_model_learns_from_a_mixed_batch_and_from_one_without_pictures(model_type: str) -> None:
    model, processor = tiny_pair(model_type)
    made, rows = PictureCollator(processor), mixed(model_type)
    for batch in (made(rows), made(rows[:1]), made(rows[1:2])):
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        assert loss.isfinite()
        learnt = {
            name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0
        }
        assert any("language_model" in name or "text_model" in name for name in learnt)
        towers = [name for name in learnt if re.search(r"vision_tower|vision_model|visual\.", name)]
        assert bool(towers) == ("pixel_values" in batch)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_loss_is_that_of_the_answers_alone(model_type: str) -> None:
    model, processor = tiny_pair(model_type)
    batch = PictureCollator(processor)(mixed(model_type))
    with torch.no_grad():
        whole = model(**batch)
        logits = whole.logits[:, :-1].flatten(0, 1)
        own = torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten())
    assert torch.allclose(whole.loss, own, rtol=1e-5)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_picture_takes_as_many_tokens_as_the_model_makes_of_it(model_type: str) -> None:
    model, processor = tiny_pair(model_type)
    batch = PictureCollator(processor)(mixed(model_type))
    mark = processor.tokenizer.convert_tokens_to_ids(FAMILIES[model_type].picture)
    names = ("pixel_values", "image_grid_thw", "image_sizes", "batch_num_images", "pixel_attention_mask")
    with torch.no_grad():
        given = model.get_image_features(**{name: batch[name] for name in names if name in batch})
    features = given.pooler_output
    features = (
        torch.cat([f.flatten(0, -2) for f in features]) if isinstance(features, list | tuple) else features
    )
    assert features.flatten(0, -2).shape[0] == (batch["input_ids"] == mark).sum()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_question_is_asked_as_it_was_trained_on(model_type: str) -> None:
    made, rows = collator(model_type), mixed(model_type)
    asked, batch = made.asked(rows), made(rows)
    assert "labels" not in asked
    assert (asked["attention_mask"][:, -1] == 1).all()
    for number in range(len(rows)):
        labels = unpadded(batch, number, "labels")
        last = trained(made, batch, number)[-1]
        count = next(n for n in range(1, len(labels)) if IGNORED in labels[-n:]) - 1
        assert made.processor.tokenizer.decode(labels[-count:]) == last
        assert unpadded(asked, number) == unpadded(batch, number)[:-count]
    for name in ("pixel_values", "image_grid_thw", "pixel_attention_mask", "image_sizes"):
        assert (name in asked) == (name in batch)
        assert name not in batch or torch.equal(asked[name], batch[name])


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_system_message_is_read_and_letters_of_several_tokens_are_learnt_whole(model_type: str) -> None:
    made = collator(model_type)
    said = (("system", "Be brief."), ("user", "<image>What?"), ("assistant", "café 🎈 «14»"))
    batch = made([turns(*said, pictures=(WIDE,))])
    assert "Be brief." in made.processor.tokenizer.decode(batch["input_ids"][0])
    assert trained(made, batch) == [EXPECTED[model_type][1].replace("14", "café 🎈 «14»")]


def words_by_space(family: Family, scheme: str) -> Any:
    """A tokenizer that writes a space as ▁, like those of Llama and Gemma, and not by bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", family.eos, str(family.bos), *family.special, *family.named.values()]
    letters = sorted(set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ?:.\n0123456789▁"))
    pieces = ["▁14", "14", "▁H", "▁b", "▁A", "\n\n", "▁▁"]
    vocabulary = {token: number for number, token in enumerate([*special, *letters, *pieces])}
    merges = [(piece[0], piece[1:]) for piece in ("14", "▁H", "▁b", "▁A", "\n\n", "▁▁")] + [("▁", "14")]
    made = Tokenizer(models.BPE(vocabulary, merges))
    if scheme == "legacy":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif scheme == "gemma":
        made.normalizer = normalizers.Replace(" ", "▁")
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    made.decoder = decoders.Replace("▁", " ")
    made.add_special_tokens(special)
    if scheme == "gemma":
        made.add_tokens(["\n", "\n\n"])  # Gemma's has them beside its special ones, and they end no turn
    made.post_processor = processors.TemplateProcessing(
        single=[str(family.bos), "$A"],
        pair=None,
        special_tokens=[(str(family.bos), special.index(str(family.bos)))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=family.eos,
        bos_token=family.bos,
        pad_token="<pad>",
        extra_special_tokens=family.named,
        model_input_names=["input_ids", "attention_mask"],
    )


@pytest.mark.parametrize("model_type", ["llava", "gemma3"])
@pytest.mark.parametrize("scheme", ["legacy", "first", "always", "never", "gemma"])
def test_spaces_may_be_letters_of_the_vocabulary(model_type: str, scheme: str) -> None:
    processor = tiny_processor(model_type)
    tokenizer = words_by_space(FAMILIES[model_type], scheme)
    made = PictureCollator(
        type(processor)(
            processor.image_processor,
            tokenizer,
            chat_template=processor.chat_template,
            **FAMILIES[model_type].own,
        )
    )
    rows = [question(ASKED, "14", WIDE), question("What?", "a b", SQUARE, TALL), talk()]
    batch = made(rows)
    end = EXPECTED[model_type][1].partition("14")[2]
    said = [[run.replace(end, "").strip() for run in trained(made, batch, row)] for row in range(3)]
    assert said == [["14"], ["a b"], ["a circle", "assistant"]]
    ends = [tokenizer.convert_tokens_to_ids(end)] * 3
    assert [unpadded(batch, row, "labels")[-1] for row in range(3)] == ends
    bos = (batch["input_ids"] == tokenizer.bos_token_id).sum(1).tolist()
    assert bos == [1, 1, 1]


def test_paligemma_reads_its_prefix_both_ways_and_knows_one_answer() -> None:
    made = collator("paligemma")
    batch = made(mixed("paligemma"))
    for number in range(3):
        types, labels = unpadded(batch, number, "token_type_ids"), unpadded(batch, number, "labels")
        assert types == [int(label != IGNORED) for label in labels]
    decode = made.processor.tokenizer.decode
    assert decode(unpadded(batch, 0)) == "<bos>What is three and four?\nseven<eos>"
    with pytest.raises(RequestError, match=r"rows.jsonl, line 2: a conversation of several turns"):
        made([talk()])


def test_pictures_are_opened_and_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = collator("llava_onevision")
    opened, prepared = [], []
    decode, preprocess = Picture.open, type(made.processor.image_processor).preprocess

    def counted(self: Any, images: Any, *more: Any, **options: Any) -> Any:
        prepared.extend(image for row in images for image in row)
        return preprocess(self, images, *more, **options)

    monkeypatch.setattr(Picture, "open", lambda self: opened.append(self) or decode(self))
    monkeypatch.setattr(type(made.processor.image_processor), "preprocess", counted)
    made([talk(), question(ASKED, "14", SQUARE)])
    assert len(opened) == len(prepared) == 3


THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif m['role'] == 'assistant' and loop.last and SPECIAL %}{{ WRITTEN }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + PROMPT }}{% endif %}"
)


def templated(special: str, written: str, prompt: str) -> PictureCollator:
    processor = tiny_processor("qwen3_vl")
    text = THINKING.replace("SPECIAL", special).replace("WRITTEN", written).replace("PROMPT", prompt)
    processor.chat_template = text
    return PictureCollator(processor)


def test_a_prompt_that_opens_a_thought_is_answered_by_closing_it() -> None:
    made = templated("true", "'<think>\n\n</think>\n\n' + part['text']", "'<think>\n'")
    assert trained(made, made([question(ASKED, "14", WIDE)])) == ["\n</think>\n\n14<|im_end|>"]


@pytest.mark.parametrize(
    ("special", "written", "prompt", "why"),
    [
        ("true", "part['text'].split('</think>')[-1]", "''", "rewrites an answer"),
        ("messages | length > 2", "part['text'].upper()", "''", "rewrites an answer"),
        (
            "messages[-1] == m",
            "'<think>\n\n</think>\n\n' + part['text']",
            "'<think>\n'",
            "before answer 1 is not",
        ),
    ],
)
def test_a_template_that_rewrites_turns_is_refused_with_the_row(
    special: str, written: str, prompt: str, why: str
) -> None:
    row = turns(
        ("user", "<image>What?"),
        ("assistant", "<think>Hm.</think>a circle"),
        ("user", "And?"),
        ("assistant", "red"),
        pictures=(WIDE,),
        where="talks.jsonl, line 8",
    )
    made = templated(special, written, prompt)
    with pytest.raises(RequestError, match=rf"talks.jsonl, line 8: .*{why}"):
        made([row])
    with pytest.raises(BadRow, match=why):
        made.check(row)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_control_token_inside_a_text_is_refused(model_type: str) -> None:
    made = collator(model_type)
    for token in (FAMILIES[model_type].picture, FAMILIES[model_type].eos):
        for row in (question(f"What is {token}?", "14", WIDE), question(ASKED, f"14{token}", WIDE)):
            with pytest.raises(
                RequestError, match=rf"line 1: a text holds the control token {re.escape(token)}"
            ):
                made([row])


def test_an_answer_is_cut_at_max_length_and_a_picture_never() -> None:
    row = question(ASKED, "one two three four five six seven", WIDE)
    whole = collator("llava_onevision")([row])
    width, answer = whole["labels"].shape[1], int((whole["labels"] != IGNORED).sum())
    cut = collator("llava_onevision", max_length=width - 3)([row])
    for name in ("input_ids", "attention_mask", "labels"):
        assert torch.equal(cut[name], whole[name][:, : width - 3])
    assert torch.equal(cut["pixel_values"], whole["pixel_values"])
    with pytest.raises(RequestError, match=r"(?s)line 1: .*nothing of its answer") as refused:
        collator("llava_onevision", max_length=width - answer)([row])
    assert "data.max_length" in str(refused.value)
    # Behind the first answer of two, and before the second picture.
    first = int((collator("llava_onevision")([talk()])["labels"] != IGNORED).nonzero()[2, 1])
    with pytest.raises(RequestError, match=r"(?s)line 2: .*a picture is never cut"):
        collator("llava_onevision", max_length=first)([talk()])
    # A question is never cut: generation has no such limit.
    asked = collator("llava_onevision", max_length=4).asked([row])
    assert asked["input_ids"].shape[1] == width - answer


@pytest.mark.parametrize("model_type", FAMILIES)
def test_lengths_are_known_without_preparing_pictures_again(model_type: str) -> None:
    made = collator(model_type)
    for row in mixed(model_type) * 2:
        assert abs(made.length(row) - made([row])["input_ids"].shape[1]) <= 2


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_collator_travels_to_other_processes(model_type: str) -> None:
    made, rows = collator(model_type), mixed(model_type)
    sent = pickle.loads(pickle.dumps(made))
    here, there = made(rows), sent(rows)
    assert here.keys() == there.keys()
    assert all(torch.equal(value, there[name]) for name, value in here.items())


def test_spans_are_found_behind_widened_pictures_or_not_at_all() -> None:
    text, marks = "u<i>q1 a one u<i>q2 a two", ["<i>"]
    widened = text.replace("<i>", "[" + "<p>" * 5 + "]\n")
    spans = [(text.index(word), text.index(word) + 3) for word in ("one", "two")]
    found = moved(spans, text, widened, marks)
    assert found is not None
    assert [widened[start:end] for start, end in found] == ["one", "two"]
    same = "u<i>a u<i>a u<i>a"
    starts = [m.start() for m in re.finditer("a", same)]
    again = moved([(s, s + 1) for s in starts], same, same.replace("<i>", "<p><p>"), marks)
    assert again is not None
    assert [same.replace("<i>", "<p><p>")[s:e] for s, e in again] == ["a", "a", "a"]
    # A piece that what stands for a picture holds as well, and a text that did not stay as it was.
    assert moved([(4, 5)], "u<i>a<i>b", "u-a-a-b", marks) is None
    assert moved([(4, 5)], "u<i>a<i>b", "u-x-y", marks) is None


def test_a_tokenizer_that_closes_every_text_is_refused() -> None:
    from tokenizers import processors

    processor = tiny_processor("llava")
    eos = processor.tokenizer.eos_token
    processor.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=["$A", eos], special_tokens=[(eos, processor.tokenizer.eos_token_id)]
    )
    with pytest.raises(RequestError, match="behind every text"):
        PictureCollator(processor)


def test_a_processor_that_cannot_write_turns_is_refused() -> None:
    processor = tiny_processor("llava")
    processor.chat_template = processor.tokenizer.chat_template = None
    with pytest.raises(RequestError, match="no chat template"):
        PictureCollator(processor)
    with pytest.raises(RequestError, match="leaves it out"):
        templated("true", "''", "''")
