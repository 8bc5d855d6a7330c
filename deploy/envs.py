"""`argosy envs`: which environments there are, and whether one is fit for training.

Invariant: `check` ends with status 1 if, and only if, something has to be repaired. What the model would see is shown
by the chat template of the model that is named, else by a plain one of the same make (ChatML, Hermes tool calls).
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import gymnasium
import typer
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..actors.chat import Chat
from ..envs import Message
from ..envs.check import Report, check
from ..envs.registry import environments, where
from .options import named_values

envs_app = typer.Typer(no_args_is_help=True, help="Environments: what there is, and whether yours is fit for training.")
Settings = Annotated[list[str] | None, typer.Argument(help="Arguments of its constructor, as name=value.")]

READS_CALLS = "argosy.actors.tool_calls:parse"
STYLE = {"pass": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
LONGEST = 600  # characters of a message that is shown
MESSAGES = 4  # after the opening


@envs_app.command("list")
def list_() -> None:
    """Print the environments that are registered here, those of installed packages too."""
    table = Table("id", "where", "settings")
    for name in environments():
        spec = gymnasium.registry[name]
        table.add_row(name, where(spec), _plain(spec.kwargs) if spec.kwargs else "")
    Console().print(table)
    print("Also by import path, package.module:Class, or by file, path/to/file.py:Class.")


@envs_app.command("check")
def check_(
    env: Annotated[str, typer.Argument(help="file.py, file.py:Class, package.module:Class or a registered id.")],
    settings: Settings = None,
    model: Annotated[Path | None, typer.Option(help="A model directory, to see its own prompt in its tokens.")] = None,
    seeds: Annotated[int, typer.Option(help="How many tasks to play.", min=1)] = 3,
    seconds: Annotated[float, typer.Option(help="How long one call may take.", min=0.1)] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Play an environment with random, odd and expert calls; report what would spoil training, and how to repair it."""
    kwargs = named_values(settings, "level=2")
    chat = Chat(model) if model else None
    with Console(stderr=True).status("starting") as status:
        report = check(env, kwargs, seeds, seconds, READS_CALLS, lambda doing: status.update(Text(doing)))
    prompt, conversation = _texts(report, chat)
    texts = {"prompt": prompt, "episode": conversation}
    tokens = {name: len(chat.encode(text)) for name, text in texts.items()} if chat and prompt else None
    if as_json:
        shown = {**texts, "tokens": tokens}
        print(json.dumps({"ok": report.ok, **asdict(report), "shown": shown}, indent=2, ensure_ascii=False))
    else:
        for part in _rendered(report, conversation, tokens):
            Console().print(part)
    if not report.ok:
        sys.exit(1)


def _rendered(report: Report, conversation: str, tokens: dict[str, int] | None) -> list[RenderableType]:
    table = Table(title=report.env, title_justify="left", show_header=False)
    for finding in report.findings:
        found = Text(finding.found)
        if finding.fix:
            found.append(f"\n-> {finding.fix}", style="italic")
        table.add_row(Text(finding.status, style=STYLE[finding.status]), Text(finding.what), found)
    counts = {s: n for s in ("fail", "warn") if (n := sum(f.status == s for f in report.findings))}
    verdict = "Fit for training." if not counts else ", ".join(f"{n} {status}" for status, n in counts.items())
    parts: list[RenderableType] = [table]
    if conversation:
        size = f" ({tokens['prompt']} tokens before its first word, {tokens['episode']} as shown)" if tokens else ""
        parts.insert(0, Panel(Text(conversation), title=f"what the model sees{size}", title_align="left"))
    return [*parts, Text(verdict, style=STYLE["fail" if not report.ok else "warn" if counts else "pass"])]


def _texts(report: Report, chat: Chat | None) -> tuple[str, str]:
    """The opening, and with it as much of an episode as is shown, as the model would see them."""
    if not report.opening:
        return "", ""
    said = report.opening + report.episode[:MESSAGES]
    shown = [{**message, "content": _clipped(str(message["content"]))} for message in said]
    if chat is None:
        return _template(report.opening, report.tools), _template(shown, report.tools)
    prompt, episode = (chat.decode(chat.opening(m, report.tools).ids) for m in (report.opening, shown))
    return prompt, episode


def _template(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str:
    """ChatML with tools as Qwen and Hermes models read them."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    system = [m for m in messages if m["role"] == "system"]
    said = [*(m["content"] for m in system), *([f"# Tools\n<tools>\n{listed}\n</tools>"] if tools else [])]
    parts = [f"<|im_start|>system\n{chr(10).join(said)}<|im_end|>"] if said else []
    for message in messages:
        text = message["content"]
        if message["role"] == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
        if message["role"] != "system":
            parts.append(f"<|im_start|>{message['role']}\n{text}<|im_end|>")
    return "\n".join(parts)


def _clipped(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... [{len(text) - LONGEST} more characters]"


def _plain(kwargs: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in kwargs.items())
