"""A model's own chat template and tokenizer, without torch: messages become ids, with the span of each content.

Invariant: ids that continue a conversation are the template's own text, found by prefix difference and verified: a
conversation that ends with a stand-in assistant message must be rendered as a true prefix of the same conversation
with the new messages appended. When it is not, `following` says so (None) and the transcript starts a new trace.
Renderings that continue a conversation are cached by content, because agents keep getting the same answers.
"""

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from ..envs import Message

CACHED = 16384  # continuations kept; a few hundred bytes each
_MARK = "\ue000{}\ue001"  # stands in for a content: private-use characters that no template knows


@dataclass(frozen=True)
class Rendered:
    """Ids and, for each message in them, the span [start, end) of the tokens that begin in its content."""

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


class Chat:
    """Reads tokenizer.json, the chat template and the special tokens of a Hugging Face directory."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        settings = json.loads((model / "tokenizer_config.json").read_text())
        self._special = {
            name: token["content"] if isinstance(token, dict) else token
            for name, token in settings.items()
            if name.endswith("_token") and isinstance(token, str | dict)
        }
        self._template = _environment().from_string(_template_text(model, settings))
        config = json.loads((model / "config.json").read_text())
        self.vocab_size: int = config.get("vocab_size") or config["text_config"]["vocab_size"]
        self.stop_id = self._stop_id(model)
        self.following = lru_cache(CACHED)(self._following)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def opening(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Rendered:
        """A whole conversation, up to where the model is to speak."""
        text = self._render(messages, tools, speak=True)
        return self._encode(text, self._contents(text, messages, tools))

    def _following(self, new: str, tools: str, stopped: bool) -> Rendered | None:
        """What follows an assistant message when `new` messages (JSON) are appended; None if that changes its past.

        `stopped`: the model closed its message itself, so the template's closing token is not repeated.
        """
        messages, schemas = json.loads(new), json.loads(tools)
        stand_in = _MARK.format("assistant")
        past = [{"role": "user", "content": _MARK.format("user")}, {"role": "assistant", "content": stand_in}]
        before = self._render(past, schemas)
        after = self._render(past + messages, schemas, speak=True)
        if not after.startswith(before) or stand_in not in before:
            return None
        start = before.rindex(stand_in) + len(stand_in)
        contents = self._contents(after, past + messages, schemas)[len(past) :]
        rendered = self._encode(after[start:], [(a - start, b - start) for a, b in contents])
        if not stopped or rendered.ids[0] != self.stop_id:
            return rendered
        return Rendered(rendered.ids[1:], tuple((a - 1, b - 1) for a, b in rendered.spans))

    def _render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], speak: bool = False) -> str:
        return self._template.render(
            messages=messages, tools=tools or None, documents=None, add_generation_prompt=speak, **self._special
        )

    def _contents(
        self, text: str, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> list[tuple[int, int]]:
        """Where each message's content stands in the rendered text, found between the template's own pieces."""
        marks = [_MARK.format(i) for i in range(len(messages))]
        marked = self._render([{**m, "content": mark} for m, mark in zip(messages, marks)], tools, speak=True)
        spans, cursor = [], 0
        for message, mark in zip(messages, marks):
            piece, found, marked = marked.partition(mark)
            start = cursor + len(piece) if found and text.startswith(piece, cursor) else None
            if start is None or not text.startswith(message["content"], start):
                # The template reworded this content (trimmed it, say): look for it, and settle for nothing.
                content = message["content"].strip()
                start = max(text.find(content, cursor), cursor)
                end = start + len(content) if text.startswith(content, start) else start
            else:
                end = start + len(message["content"])
            spans.append((start, end))
            cursor = end
        return spans

    def _encode(self, text: str, contents: Sequence[tuple[int, int]]) -> Rendered:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        starts = [start for start, _ in encoding.offsets]
        spans = tuple((_first(starts, begin), _first(starts, end)) for begin, end in contents)
        return Rendered(tuple(encoding.ids), spans)

    def _stop_id(self, model: Path) -> int:
        """The token that closes an assistant message, as the template writes it."""
        rendered = self._render([{"role": "user", "content": "."}, {"role": "assistant", "content": _MARK}], [])
        closing = self.encode(rendered.rpartition(_MARK)[2])
        if not closing:
            raise ValueError(f"{model}: the chat template does not close an assistant message with a token")
        return closing[0]


def _first(starts: list[int], position: int) -> int:
    """Index of the first token that starts at or after a text position."""
    return bisect_left(starts, position)


def _template_text(model: Path, settings: dict[str, Any]) -> str:
    file = model / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {each["name"]: each["template"] for each in template}.get("default")
    if not template:
        raise ValueError(f"{model} has no chat template: add chat_template.jinja")
    return template


def _environment() -> ImmutableSandboxedEnvironment:
    """The same as transformers' own, which chat templates are written for."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=options.pop("ensure_ascii", False), **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
