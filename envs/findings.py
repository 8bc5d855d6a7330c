"""What a probe's record says about an environment: pure functions from the record to findings, each with its fix.

A finding is "fail" when training would be wrong or would stall, "warn" when it would be worse than it need be.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, quantiles
from typing import Any, Literal

from .probe import Episode, one_of_each
from .tool_env import Message

SLOW = 5.0  # seconds of a turn, 95 % of which should be faster: long episodes come home stale
BLOCKING = 0.25  # seconds without a turn of the event loop
LARGE = 10.0  # of a reward: the defaults of critic and objectives are made for about 1
SHOWN = 60  # characters of an answer that a finding quotes

Status = Literal["pass", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Finding:
    """One line of the report, e.g. `Finding("rewards", "fail", "reward must be one finite number, not nan", "...")`."""

    what: str
    status: Status
    found: str
    fix: str = ""


def not_loaded(failure: Mapping[str, str]) -> Finding:
    fix = "repair what the error names, then check again"
    return Finding("loads", "fail", f"{failure['kind']}: {failure['error']}{_at(failure)}", fix)


def stuck(doing: str, seconds: float, trace: str) -> Finding:
    """The probe did not come back; its trace begins with the innermost frame."""
    frames = re.findall(r'File "(.+)", line (\d+) in (\w+)', trace)
    theirs = [frame for frame in frames if "/argosy/envs/" not in frame[0] and "/lib/python" not in frame[0]]
    where = f" (at {theirs[0][0]}:{theirs[0][1]} in {theirs[0][2]})" if theirs else ""
    fix = "let what waits be async and have a deadline of its own; raise --seconds if it only is slow"
    return Finding("answers in time", "fail", f"{doing} blocked for more than {seconds:g} s{where}", fix)


def died(doing: str, code: int, said: str) -> Finding:
    last = said.splitlines()[-1] if said else "it said nothing"
    fix = "run code of others, and what may crash, in a sandbox or a process of its own"
    return Finding("survives", "fail", f"the process ended with {code} during {doing}: {last}", fix)


def of(played: Mapping[str, Any], elsewhere: Finding) -> Iterator[Finding]:
    """All findings of one probe, and in its place what a second one added."""
    first = played["first"]
    yield Finding("loads", "pass", f"{played['class']}: {played['doc']}".removesuffix(": "))
    yield _described(played["tools"])
    yield from _runs(first, played["endings"])
    same_seed = _same_seed(played)
    yield same_seed
    for finding in (elsewhere, _replays(played), _side_by_side(played)):
        follows = same_seed.status == "fail" and finding.status == "fail"
        yield Finding(finding.what, "skip", "not while a seed gives different episodes") if follows else finding
    yield _varies(first)
    yield _rewards(first)
    yield _ends(first)
    yield from _left(played["left"])
    yield _quick(first)
    yield _yields(*played["blocked"])
    yield _gymnasium(played["gymnasium"])


def _described(tools: Sequence[Mapping[str, Any]]) -> Finding:
    functions = [tool["function"] for tool in tools]
    bare = [function["name"] for function in functions if not function.get("description")]
    bare += [
        f"{function['name']}.{name}"
        for function in functions
        for name, parameter in function["parameters"].get("properties", {}).items()
        if not parameter.get("description")
    ]
    if not tools:
        fix = "mark the methods that the model may call with @tool"
        return Finding("tools", "warn", "there are none: the model can only write text", fix)
    if bare:
        fix = "a docstring, with an entry for each parameter under `Args:`, is all that the model reads"
        return Finding("tools", "warn", f"not described: {', '.join(bare)}", fix)
    return Finding("tools", "pass", ", ".join(function["name"] for function in functions))


def _runs(first: Sequence[Episode], endings: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    failures: dict[tuple[str, str], dict[str, Any]] = {}
    for failure in (*(episode["failure"] for episode in first if "failure" in episode), *endings):
        failures.setdefault((failure["kind"], failure["where"]), failure)
    for failure in failures.values():
        doing, kind = failure["doing"], failure["kind"]
        if kind == "InvalidGrade":
            fix = "return Grade(x) with one finite number; raise InfrastructureError when there is none"
        elif kind == "TimeoutError":
            fix = "give what it waits for a deadline; raise --seconds if it only is slow"
        elif failure["infrastructure"]:
            fix = "the world must be there: see the error. An attempt that meets this is tried again, never scored"
        elif doing.startswith(("setup", "grade", "ending")):
            fix = f"{doing.split()[0]} must work for every seed and after any calls; each failure costs an attempt"
        else:
            fix = 'raise ToolError("...") with a text for the model where its arguments make no sense'
        yield Finding("runs", "fail", f"{kind}: {failure['error']}{_at(failure)}, in {doing}", fix)
    if not failures:
        turns = sum(len(episode["rewards"]) for episode in first)
        yield Finding("runs", "pass", f"{len(first)} episodes, {turns} turns, with {_names(first)} calls")


def _same_seed(played: Mapping[str, Any]) -> Finding:
    if where := _difference(played["first"], played["again"]):
        fix = "draw everything from random.Random(seed) in setup, and set every attribute there anew"
        return Finding("same seed, same episode", "fail", f"{where} when the object began it again", fix)
    return Finding("same seed, same episode", "pass", "played again, all messages and grades are the same")


def elsewhere(played: Mapping[str, Any], there: Mapping[str, Any]) -> Finding:
    if "failure" in there:
        return not_loaded(there["failure"])
    if where := _difference(played["first"], there["first"]):
        fix = "nothing may depend on hash(), the order of a set, the clock, global random state: use sorted(), the seed"
        return Finding("same in another process", "fail", where, fix)
    return Finding("same in another process", "pass", "the same with another PYTHONHASHSEED")


def _replays(played: Mapping[str, Any]) -> Finding:
    if not played["replayable"]:
        return Finding("replays", "skip", "replayable = False: an interrupted episode starts over")
    if where := _difference(played["first"], played["replayed"]):
        fix = "an answer may depend on the seed and the calls alone; else set replayable = False in the class"
        return Finding("replays", "fail", f"{where} when a new object was given the same calls", fix)
    return Finding("replays", "pass", "a new object that is given the same calls gives the same answers and grades")


def _side_by_side(played: Mapping[str, Any]) -> Finding:
    if where := _difference(one_of_each(played["first"]), played["together"]):
        fix = "keep an episode's state in self, not in the class, module or a file: an actor plays many at a time"
        return Finding("side by side", "fail", f"{where} when others ran at the same time", fix)
    return Finding("side by side", "pass", f"{len(played['together'])} episodes at a time do not disturb each other")


def _varies(first: Sequence[Episode]) -> Finding:
    openings = {episode["seed"]: str(episode["opening"]) for episode in first if "opening" in episode}
    if len(openings) > 1 and len(set(openings.values())) == 1:
        fix = "fine if only what is hidden differs; else use the seed in setup, because it is what makes tasks differ"
        return Finding("seeds differ", "warn", f"seeds {', '.join(map(str, openings))} begin alike", fix)
    return Finding("seeds differ", "pass", f"{len(set(openings.values()))} of {len(openings)} openings are different")


def _rewards(first: Sequence[Episode]) -> Finding:
    returns: dict[str, list[float]] = {}
    for episode in first:
        if "reward" in episode:
            returns.setdefault(episode["policy"], []).append(episode["reward"] + sum(episode["rewards"]))
    every = [value for values in returns.values() for value in values]
    if not every:
        return Finding("rewards", "skip", "no episode was graded")
    shown = ", ".join(f"{policy} {mean(values):.3g}" for policy, values in returns.items())
    shown += f" (mean); {min(every):.3g} to {max(every):.3g}"
    if max(map(abs, every)) > LARGE:
        return Finding(
            "rewards", "warn", shown, "scale rewards to about 0 to 1: the learner's defaults are made for it"
        )
    if "expert" in returns and mean(returns["expert"]) <= mean(returns.get("random", (-math.inf,))):
        return Finding("rewards", "warn", shown, "an expert should earn more than random calls: see grade, expert")
    return Finding("rewards", "pass", shown)


def _ends(first: Sequence[Episode]) -> Finding:
    ends = [episode["end"] for episode in first if "failure" not in episode]
    if not ends:
        return Finding("ends", "skip", "no episode came to its end")
    shown = ", ".join(f"{ends.count(end)} {end}" for end in dict.fromkeys(ends))
    experts = [one["end"] for one in first if one["policy"] == "expert" and "failure" not in one]
    if experts and "terminated" not in experts:
        return Finding("ends", "warn", shown, "call self.finish() where the task is done; out of turns is no end")
    return Finding("ends", "pass", shown)


def _left(left: Mapping[str, Sequence[Sequence[str]]]) -> Iterator[Finding]:
    grown = False
    for kind, (before, once, many) in left.items():
        new = _without(many, once)
        if new:
            grown = True
            fix = "give back in close_episode what setup took; it runs after every episode"
            yield Finding("leaves nothing", "fail", f"{len(new)} {kind} more after the episodes: {_some(new)}", fix)
        elif kind == "processes" and (kept := _without(once, before)):
            grown = True
            fix = "fine if it is meant to be shared and ends with this process; else end it in close_episode"
            yield Finding("leaves nothing", "warn", f"still there at the end: {_some(kept)}", fix)
    if not grown:
        yield Finding("leaves nothing", "pass", f"no {', '.join(left)} are left after the episodes")


def _quick(first: Sequence[Episode]) -> Finding:
    seconds = sorted(second for episode in first for second in episode["seconds"])
    if len(seconds) < 2:
        return Finding("turns take", "skip", "too few turns to say")
    percent = quantiles(seconds, n=100, method="inclusive")
    shown = f"p50 {_time(percent[49])}, p95 {_time(percent[94])}, at most {_time(seconds[-1])}"
    if percent[94] > SLOW:
        return Finding("turns take", "warn", shown, "long episodes come home stale: do less, or do it in advance")
    return Finding("turns take", "pass", shown)


def _yields(seconds: float, doing: str) -> Finding:
    if seconds > BLOCKING:
        fix = "make it `async def` and await what waits (or asyncio.to_thread): an actor's other episodes stand still"
        return Finding("lets others run", "warn", f"{doing} blocked the event loop for {_time(seconds)}", fix)
    return Finding("lets others run", "pass", f"the event loop was blocked for {_time(seconds)} at most")


def _gymnasium(complaints: Sequence[str]) -> Finding:
    if complaints:
        return Finding("gymnasium's check_env", "fail", "; ".join(complaints), "see the findings above first")
    return Finding("gymnasium's check_env", "pass", "no complaints")


def conversation(first: Sequence[Episode]) -> tuple[list[Message], list[Message]]:
    """How an episode opens, and how it goes on: the expert's, else a random one."""
    shown = next((one for one in reversed(first) if one["policy"] != "odd" and "opening" in one), None)
    if shown is None:
        return [], []
    messages: list[Message] = []
    for said, turn in zip(shown["said"], shown["turns"]):
        messages += [{"role": "assistant", "content": said}, *turn["messages"]]
    return shown["opening"], messages


def _difference(one: Sequence[Episode], other: Sequence[Episode]) -> str:
    """Where two plays of the same episodes part; "" if they do not. What failed is reported elsewhere."""
    for a, b in zip(one, other, strict=True):
        if "failure" in a:
            continue
        where = f"seed {a['seed']}, {a['policy']} calls"
        if "failure" in b:
            return f"{where}: {b['failure']['kind']}: {b['failure']['error']}"
        if text := _parting(a["opening"], b["opening"]):
            return f"{where}: the opening was {text}"
        for number, (before, now) in enumerate(zip(a["turns"], b["turns"]), 1):
            if text := _parting(before["messages"], now["messages"]):
                return f"{where}: turn {number} was answered {text}"
        if a.get("reward") != b.get("reward"):
            return f"{where}: the reward was {a.get('reward')} and then {b.get('reward')}"
        if len(a["turns"]) != len(b["turns"]):
            return f"{where}: it ended after {len(a['turns'])} turns and then after {len(b['turns'])}"
    return ""


def _parting(before: Sequence[Message], now: Sequence[Message]) -> str:
    if before == now:
        return ""
    one, other = ("\n".join(str(message["content"]) for message in messages) for messages in (before, now))
    same = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    start = max(0, same - SHOWN // 3)
    return f"{one[start : start + SHOWN]!r} and then {other[start : start + SHOWN]!r}"


def _without(items: Sequence[str], others: Sequence[str]) -> list[str]:
    left = list(others)
    return [item for item in items if item not in left or left.remove(item)]  # type: ignore[func-returns-value]


def _some(items: Sequence[str]) -> str:
    shown = ", ".join(dict.fromkeys(item[:SHOWN] for item in items[:3]))
    return shown if len(items) <= 3 else f"{shown}, ..."


def _names(first: Sequence[Episode]) -> str:
    return ", ".join(dict.fromkeys(episode["policy"] for episode in first))


def _at(failure: Mapping[str, str]) -> str:
    return f" ({failure['where']})" if failure["where"] else ""


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
