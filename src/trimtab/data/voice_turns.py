"""A row to be spoken as the conversation that the model knows, in tokens: one audio token for each clip.

    system, scene · user: words of the reference · assistant: the reference · user: the text · assistant: the clip

Written by the model's own chat template where a trial shows that it writes such a conversation. Where it knows no
scene, the scene goes into the system's turn between its marks; where it cannot write sound at all, the turns are
written as the family's published layout has them. `how` says which. Reads no clip: how many columns one takes is the
collator's matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trimtab.config.schema import VoiceSettings
from trimtab.data.clean import BadRow
from trimtab.data.render import opening_ids
from trimtab.data.template_guard import TemplateRefusal, rendered
from trimtab.data.voice_marks import VoiceMarks, token_id
from trimtab.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trimtab.data.voice_rows import VoiceRow

Message = dict[str, Any]

_HEADER, _HEADER_END, _END = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
_SCENE, _SCENE_END = "<|scene_desc_start|>", "<|scene_desc_end|>"
_SOUND: list[Message] = [{"type": "audio"}]


class VoiceTurns:
    """Writes rows for one tokenizer, in the way that its template was found able to."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, marks: VoiceMarks, voice: VoiceSettings) -> None:
        self.tokenizer = tokenizer
        self.marks = marks
        self.system, self.scene = voice.system, voice.scene
        self._opening = opening_ids(tokenizer)
        special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        special |= {*tokenizer.all_special_ids, marks.audio.id, marks.bos.id, marks.delay.id, marks.eos.id}
        # What stands for the unknown also comes of plain words.
        self._special = frozenset(special - {tokenizer.unk_token_id})
        for name, text in (("voice.system", voice.system), ("voice.scene", voice.scene)):
            if found := self._token_in(text or ""):
                raise RequestError.of(
                    f"{name} holds the special token {found}",
                    "it would open or end a turn, or stand for sound that is not there",
                    f"take it out of {name}; a scene's own marks are written by Trimtab",
                )
        self._by_template, self._scene_apart = True, True
        self.how = self._tried()

    def ids(self, row: VoiceRow, heard: bool) -> list[int]:
        """The whole conversation, with one audio token for the reference, where it is `heard`, and one for the clip."""
        texts = {"text": row.text, "reference text": row.reference_text, "scene": row.scene}
        for name, text in texts.items():
            if _is_broken(text or ""):
                raise BadRow(f"its {name} holds half of a surrogate pair (broken Unicode)")
            if found := self._token_in(text or ""):
                raise BadRow(f"its {name} holds the special token {found}, which would not be read as words")
        ids = self._tokens(self._turns(row.text, row.reference_text, row.scene or self.scene, heard))
        if ids.count(self.marks.audio.id) != 1 + heard or self.marks.delay.id in ids:
            raise BadRow("the chat template gives its clips another number of places")
        return ids

    def trained(self, ids: Sequence[int]) -> range:
        """Which places of a written conversation are trained: behind the clip, through the last token of the turn.

        What a template writes behind that (a newline, mostly) is not.
        """
        after = len(ids) - ids[::-1].index(self.marks.audio.id)
        ends = [place for place in range(after, len(ids)) if ids[place] in self._special]
        return range(after, ends[-1] + 1 if ends else after)

    def _token_in(self, text: str) -> str | None:
        made = self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        found = next((token for token in made if token in self._special), None)
        return None if found is None else str(self.tokenizer.convert_ids_to_tokens(found))

    def _turns(self, text: str, before: str | None, scene: str | None, heard: bool) -> list[Message]:
        """The conversation as messages; `heard` says whether a reference is in it, `before` what is said there."""
        turns = [_said("system", self.system)]
        turns += [_said("scene", scene)] if scene else []
        if heard:
            turns += [_said("user", before)] if before else []
            turns.append({"role": "assistant", "content": _SOUND})
        return [*turns, _said("user", text), {"role": "assistant", "content": _SOUND}]

    def _tokens(self, turns: list[Message]) -> list[int]:
        # Special tokens cut a text, so one that stands where a clip's many will has the same neighbours as those.
        ids = list(self.tokenizer(self._written(turns), add_special_tokens=False)["input_ids"])
        return ids if ids[: len(self._opening)] == self._opening else self._opening + ids

    def _written(self, turns: list[Message], *, prompt: bool = False) -> str:
        if not self._scene_apart:
            turns = _scene_in_system(turns)
        if not self._by_template:
            return self._published(turns, prompt)
        try:
            return rendered(self.tokenizer, turns, add_generation_prompt=prompt)
        except TemplateRefusal as error:
            raise BadRow(f"the chat template refuses it ({error})") from None

    def _published(self, turns: list[Message], prompt: bool) -> str:
        """The layout that the family was trained with: Llama 3's headers."""
        clip = self.marks.bos.text + self.marks.audio.text + self.marks.eos.text
        text = self.tokenizer.bos_token or ""
        for turn in turns:
            said = clip if turn["content"] is _SOUND else turn["content"][0]["text"].strip()
            text += f"{_header(turn['role'])}{said}{_END}"
        return text + (_header("assistant") + self.marks.bos.text if prompt else "")

    def _tried(self) -> str:
        """Settle on the first way of writing that passes a trial, and tell it."""
        if self.tokenizer.chat_template:
            fault = self._fault(scene=None)
            if fault is None and (unknown := self._fault(scene="probe scene") or self._scene_is_any_role()):
                self._scene_apart = False
                fault = self._fault(scene="probe scene")
                if fault is None:
                    return f"conversations by the model's chat template, the scene in the system's turn ({unknown})"
            elif fault is None:
                return "conversations by the model's chat template"
        else:
            fault = "there is none"
        self._by_template, self._scene_apart = False, False
        missing = [mark for mark in (_HEADER, _HEADER_END, _END) if token_id(self.tokenizer, mark) is None]
        if missing:
            raise RequestError.of(
                f"the model's chat template cannot write a conversation with sound: {fault}",
                f"the published layout cannot be written either: the tokenizer has no {', '.join(missing)}",
                "set model.chat_template to a template that takes parts of the type audio",
            )
        return f"conversations in the published layout, not by the chat template ({fault})"

    def _fault(self, scene: str | None) -> str | None:
        """What is wrong with a trial conversation as it is written now; None where all is well."""
        for heard in (True, False):
            turns = [_said("system", "probe rules")]
            turns += self._turns("probe text", "probe words", scene, heard)[1:]
            try:
                whole, prompt = self._written(turns), self._written(turns[:-1], prompt=True)
            except BadRow as bad:
                return str(bad)
            said = ["probe rules", *([scene] if scene else []), *(["probe words"] if heard else [])]
            places = [whole.find(text) for text in (*said, "probe text")]
            if -1 in places or places != sorted(places) or "'type'" in whole:
                return "it does not write every text of it as it stands"
            if whole.count(self.marks.audio.text) != 1 + heard:
                return f"it does not write one {self.marks.audio.text} for each clip"
            if not prompt.endswith(self.marks.bos.text):
                return f"its generation prompt does not end in {self.marks.bos.text}"
            if not whole.startswith(prompt + self.marks.audio.text + self.marks.eos.text):
                return "it does not go on from its generation prompt with the clip and its end"
        return None

    def _scene_is_any_role(self) -> str | None:
        """A template that takes every role makes a turn of the scene, which the model has never seen."""
        turns = self._turns("probe text", None, "probe scene", False)
        strange = [{**turn, "role": "elsewhere"} if turn["role"] == "scene" else turn for turn in turns]
        try:
            same = self._written(strange).replace("elsewhere", "scene") == self._written(turns)
        except BadRow:
            return None
        return "it has no role for a scene" if same else None


def _is_broken(text: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def _said(role: str, text: str) -> Message:
    return {"role": role, "content": [{"type": "text", "text": text}]}


def _header(role: str) -> str:
    return f"{_HEADER}{role}{_HEADER_END}\n\n"


def _scene_in_system(turns: list[Message]) -> list[Message]:
    scene = [turn["content"][0]["text"].strip() for turn in turns if turn["role"] == "scene"]
    if not scene:
        return turns
    system = f"{turns[0]['content'][0]['text'].strip()}\n\n{_SCENE}\n{scene[0]}\n{_SCENE_END}"
    return [_said("system", system), *(turn for turn in turns[1:] if turn["role"] != "scene")]
