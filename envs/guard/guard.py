"""A look at each tool call before it happens: the one that cheats is blocked, the episode goes on.

Invariant: a guard only ever blocks a call and says why in one line; it never ends an episode, changes a call or a
reward. What it blocked is counted by rule, and `parts` marks the trajectory with it. Rules are data (rules.yaml); one
guard object watches one episode.
"""

import fnmatch
import functools
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from ..tasks import RewardFile, Task
from ..tools import ToolCall
from .judge import Judge
from .normal import plain

_KEYS = {"id", "message", "pattern", "tool", "field", "disabled"}
_END_OF_NAME = r"(?![\w-])"
_NOT_WITHIN = r"(?<![\w.~-])"
_REST_OF_PATH = r"(?=$|[/\s;|&<>()=,:\]}`])[^\s;|&<>()=,:]*"
_NAMES = ("secret", "kept", "rewards", "repository", "package")


@dataclass(frozen=True)
class Rule:
    """Blocks a call of `tool` in whose `field` one of the patterns is found."""

    id: str
    message: str
    pattern: tuple[str, ...]
    tool: tuple[str, ...] = ("*",)
    field: tuple[str, ...] = ("*",)
    disabled: bool = False


@dataclass(frozen=True)
class Blocked:
    """Why a call does not happen; `message` is for the model."""

    rule: str
    message: str


@dataclass(frozen=True)
class Terms:
    """What the names in patterns stand for in one task. A user adds own paths with `Guard(extra=Terms(...))`."""

    secret: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    rewards: tuple[str, ...] = ()
    repository: tuple[str, ...] = ()
    package: tuple[str, ...] = ()

    @property
    def paths(self) -> frozenset[str]:
        return frozenset((*self.secret, *self.kept, *self.rewards))


class Guard:
    """`rules`: those of rules.yaml, unless given. `judge` is asked about what the rules let pass."""

    def __init__(self, rules: Iterable[Rule] | None = None, extra: Terms = Terms(), judge: Judge | None = None):
        self.rules = {rule.id: rule for rule in (default_rules() if rules is None else rules) if not rule.disabled}
        self.extra, self.judge = extra, judge
        self.blocked: Counter[str] = Counter()
        self._terms: tuple[Task, Terms, dict[str, list[re.Pattern[str]]]] | None = None

    def check(self, call: ToolCall, task: Task) -> Blocked | None:
        """What the rules say; milliseconds."""
        terms, patterns = self._for(task)
        for name, text in _texts(call.arguments):
            rules = [rule for rule in self.rules.values() if _any(call.name, rule.tool) and _any(name, rule.field)]
            if not rules:
                continue
            spelled = plain(text, task.sandbox.workdir, terms.paths)
            for rule in rules:
                if any(pattern.search(spelled) for pattern in patterns[rule.id]):
                    return self._block(rule.id, rule.message)
        return None

    async def review(self, call: ToolCall, task: Task) -> Blocked | None:
        """`check`, then the judge's opinion if there is one; a judge that does not answer has none."""
        found = self.check(call, task)
        if found is not None or self.judge is None:
            return found
        why = await self.judge.objection(call, task)
        return None if why is None else self._block("judge", why)

    def parts(self) -> Mapping[str, float]:
        """For `Grade.parts`: how often, and by which rule."""
        found = {f"guard/{rule}": float(count) for rule, count in self.blocked.items()}
        return {"guard/blocked": float(self.blocked.total()), **found}

    def _block(self, rule: str, message: str) -> Blocked:
        self.blocked[rule] += 1
        return Blocked(rule, f"blocked ({rule}): {message}")

    def _for(self, task: Task) -> tuple[Terms, dict[str, list[re.Pattern[str]]]]:
        if self._terms is None or self._terms[0] is not task:
            terms = terms_of(task, self.extra)
            self._terms = task, terms, {rule.id: _compile(rule, terms) for rule in self.rules.values()}
        return self._terms[1], self._terms[2]


def read_rules(text: str, origin: str) -> list[Rule]:
    """Rules from YAML; ValueError names the place and what is wrong there."""
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{origin} is not YAML: {error}") from None
    if not isinstance(found, list):
        raise ValueError(f"{origin} must be a list of rules")
    return [_rule(each, f"{origin}, rule {number}") for number, each in enumerate(found, 1)]


@functools.cache
def default_rules() -> tuple[Rule, ...]:
    return tuple(read_rules(resources.files(__package__).joinpath("rules.yaml").read_text("utf-8"), "rules.yaml"))


def load_rules(*files: str | Path, off: Sequence[str] = (), on: Sequence[str] = ()) -> list[Rule]:
    """The default rules and those of the files, of which the last with an id counts; some switched off or on."""
    rules = {rule.id: rule for rule in default_rules()}
    for file in files:
        rules |= {rule.id: rule for rule in read_rules(Path(file).read_text("utf-8"), str(file))}
    if unknown := {*off, *on} - set(rules):
        raise ValueError(f"there is no rule {min(unknown)!r}; there are {', '.join(sorted(rules))}")
    return [replace(rule, disabled=(rule.disabled or rule.id in off) and rule.id not in on) for rule in rules.values()]


def terms_of(task: Task, extra: Terms = Terms()) -> Terms:
    """Secret is what no agent's sandbox holds; what grading replaces in an image may be read, but not changed."""
    workdir = task.sandbox.workdir
    given = {posixpath.join(workdir, path) for stage in task.stages for path in stage.files}
    secret, kept, rewards = set(extra.secret), set(extra.kept), set(extra.rewards)
    for stage in task.stages:
        hidden = {posixpath.normpath(posixpath.join(workdir, path)) for path in stage.grading.files}
        outside = {path for path in hidden if not path.startswith(workdir.rstrip("/") + "/")}
        secret |= {"/".join(path.split("/")[:2]) for path in outside}
        if task.sandbox.image is None:
            secret |= hidden - given
        kept |= hidden | {posixpath.join(workdir, path) for path in stage.grading.protected if "*" not in path}
        if isinstance(stage.grading.verdict, RewardFile):
            rewards.add(stage.grading.verdict.folder)
    repository = re.fullmatch(r"(?:.*/)?([\w.-]+?)__([\w.-]+?)(?:-\d+|\.[0-9a-f]{6,}.*)", task.id)
    repositories = (f"{repository[1]}/{repository[2]}",) if repository else ()
    packages = (repository[2],) if repository else ()
    secret -= {"/tmp", "/"}
    return Terms(
        tuple(sorted(secret)),
        tuple(sorted(kept)),
        tuple(sorted(rewards)),
        (*repositories, *extra.repository),
        (*packages, *extra.package),
    )


def _compile(rule: Rule, terms: Terms) -> list[re.Pattern[str]]:
    compiled = []
    for pattern in rule.pattern:
        names = [name for name in _NAMES if f"{{{name}}}" in pattern]
        if all(getattr(terms, name) for name in names):
            for name in names:
                words = "|".join(map(re.escape, getattr(terms, name)))
                end = (
                    r"(?![\w-])" if name in ("repository", "package") else r"(?=$|[/\s;|&<>()=,:\]}`])[^\s;|&<>()=,:]*"
                )
                start = "" if end is _END_OF_NAME else _NOT_WITHIN
                pattern = pattern.replace(f"{{{name}}}", f"{start}(?:{words}){end}")
            compiled.append(re.compile(pattern, re.IGNORECASE if "repository" in names else 0))
    return compiled


def _rule(found: Any, place: str) -> Rule:
    if not isinstance(found, dict):
        raise ValueError(f"{place} must be a mapping with id, message and pattern")
    if unknown := set(found) - _KEYS:
        raise ValueError(f"{place} has an unknown key {min(map(str, unknown))!r}; there are {', '.join(sorted(_KEYS))}")
    for key in ("id", "message"):
        if not isinstance(found.get(key), str) or not found[key].strip():
            raise ValueError(f"{place}: {key} must be a text")
    lists = {key: _list(found.get(key, "*"), f"{place}: {key}") for key in ("pattern", "tool", "field")}
    if "pattern" not in found:
        raise ValueError(f"{place} ({found['id']}) lacks a pattern")
    for pattern in lists["pattern"]:
        try:
            re.compile(re.sub(rf"\{{({'|'.join(_NAMES)})\}}", "x", pattern))
        except re.error as error:
            raise ValueError(f"{place} ({found['id']}): the pattern {pattern!r} is wrong: {error}") from None
    return Rule(found["id"], " ".join(found["message"].split()), disabled=bool(found.get("disabled", False)), **lists)


def _list(value: Any, place: str) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise ValueError(f"{place} must be a text or a list of texts")
    return tuple(values)


def _texts(arguments: object, name: str = "") -> Iterable[tuple[str, str]]:
    """Every string of the arguments, under the name of its argument."""
    if isinstance(arguments, str):
        yield name, arguments
    elif isinstance(arguments, Mapping):
        for key, value in arguments.items():
            yield from _texts(value, str(key))
    elif isinstance(arguments, list | tuple):
        for value in arguments:
            yield from _texts(value, name)


def _any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
