"""What must hold when everybody is dead: checked against the lineage of the learner's newest checkpoint."""

from collections import Counter
from typing import Any

import books
import redis
from argosy.buffer import Lineage, ReplayBuffer, Unreadable, read_archive
from chaos_processes import CHECKPOINT_EVERY, Durable, Life, tokens

ASIDE = 100  # how many the buffer keeps
KEPT_ASIDE = ("dropped:poisoned", "dropped:rejected")


def check(life: Life, client: redis.Redis, forgetful: bool) -> dict[str, int]:
    """Raises AssertionError at the first broken promise; returns numbers for the report."""
    durable = Durable(life.folder)
    lines = list(durable.lines())
    last = durable.saved["step"]
    assert [line["step"] for line in lines] == list(range(1, last + 1)), "a step is missing or there twice"

    buffer = ReplayBuffer(life.settings)
    recently = {line["step"]: line["ids"] for line in lines[-2 * CHECKPOINT_EVERY :]}
    buffer.rewind(last, recently, durable.saved["version"], Lineage.of(durable.saved["repeats"]))
    if life.settings.archive:
        buffer.archive(life.archive)
    found = books.read(client, life.settings.run)
    assert not found.complaints, found.complaints
    sabotaged = set((life.folder / "sabotaged").read_text().split())
    check_steps(life, durable, lines)
    check_states(life, lines, buffer, found, forgetful)
    check_groups(life, lines, found, forgetful)
    check_payloads(buffer, found, sabotaged, forgetful)
    if life.settings.archive:
        check_archive(life, lines, found, sabotaged, forgetful)
    buffer.close()
    return {"steps": last, "attempts": len(found.states)} | Counter(s.split(":")[0] for s in found.states.values())


def check_steps(life: Life, durable: Durable, lines: list[dict[str, Any]]) -> None:
    """Uses, staleness, tokens, the order of segments: of the lineage alone."""
    uses: Counter[str] = Counter()
    where: dict[int, str] = {}
    passed: set[int] = set()  # what came home before something that was trained
    for line in lines:
        for attempt in dict.fromkeys(line["ids"]):
            fact = line["facts"][attempt]
            uses[attempt] += 1
            assert durable.age(fact["oldest"], line["version"]) <= life.settings.eta, f"{attempt} was too old in {line}"
            for token in fact["tokens"]:
                other = where.setdefault(token, attempt)
                assert other == attempt, f"token {token} was trained in {other} and in {attempt}"
            early = passed.intersection(fact["tokens"]) if uses[attempt] == 1 else None
            assert not early, f"{attempt} was trained after a later segment of its episode"
            passed.update(fact["home"])
    over = {attempt: n for attempt, n in uses.items() if n > life.settings.max_uses}
    assert not over, f"trained too often: {over}"


def check_states(
    life: Life, lines: list[dict[str, Any]], buffer: ReplayBuffer, found: books.Books, forgetful: bool
) -> None:
    """One state for each attempt, and it agrees with the lineage and the ledger."""
    steps: dict[str, list[int]] = {}
    for line in lines:
        for attempt in dict.fromkeys(line["ids"]):
            steps.setdefault(attempt, []).append(line["step"])
    for attempt, state in found.states.items():
        if state.startswith("trained"):
            used = steps.get(attempt, [])
            last = used if forgetful else used[-1:]
            assert state in [f"trained:{step}" for step in last], f"{attempt} is {state}, the lineage says {used}"
        elif attempt in steps:
            assert state in ("ready", "claimed") and life.settings.max_uses > 1, f"{attempt} is trained and {state}"
    lost = steps.keys() - found.states.keys()
    assert lost == found.foretold, f"the lineage has {lost}, of which Redis foretells {found.foretold}"
    ledger = buffer.ledger()
    assert ledger.balanced, ledger
    counts = Counter(state.partition(":")[0] for state in found.states.values())
    assert ledger.created == len(found.states), (ledger, counts)
    assert ledger.trained == counts["trained"]
    assert ledger.live["claimed"] == 0
    reasons = Counter(s.partition(":")[2] for s in found.states.values() if s.startswith("dropped"))
    assert ledger.dropped == reasons, (ledger, reasons)
    assert forgetful or not (reasons["lost"] or found.foretold), f"nothing was to be lost: {reasons}"
    if not life.segments:
        assert {name for name in found.states if "." not in name} == {
            f"{group}/{member}"
            for group in range(buffer.stats()["next_index"])
            for member in range(life.settings.group_size)
        }


def check_groups(life: Life, lines: list[dict[str, Any]], found: books.Books, forgetful: bool) -> None:
    """Whole or padded from more than half, and never in two steps."""
    size = life.settings.group_size
    trained: dict[str, set[str]] = {}
    for line in lines:
        assert len(line["ids"]) == size * life.settings.batch_size, line
        for first in range(0, len(line["ids"]), size):
            ids = line["ids"][first : first + size]
            members = set(ids)
            group = books.group_of(ids[0])
            assert {books.group_of(one) for one in ids} == {group}, ids
            assert 2 * len(members) > size, f"{ids} is too small a part of its group"
            assert ids == [ids[i % len(members)] for i in range(size)], f"{ids} is padded with something else"
            if life.settings.max_uses == 1:
                assert group not in trained, f"group {group} is in two steps"
            trained.setdefault(group, set()).update(members)
    for attempt, state in found.states.items():
        group = trained.get(books.group_of(attempt))
        left_out = group and attempt not in group and not state.startswith("dropped")
        assert not left_out or (life.settings.max_uses > 1 and forgetful), f"{attempt} is {state}, trained is {group}"


def check_payloads(buffer: ReplayBuffer, found: books.Books, sabotaged: set[str], forgetful: bool) -> None:
    """Nobody but the saboteur spoils a payload, and what it spoiled is kept aside."""
    ready = [attempt for attempt, state in found.states.items() if state == "ready"]
    try:
        assert [trajectory.attempt for trajectory in buffer.get(ready)] == ready
    except Unreadable as error:
        assert error.reasons.keys() <= sabotaged, error
    rejected = {attempt for attempt, state in found.states.items() if state == "dropped:rejected"}
    assert rejected <= sabotaged, f"{rejected - sabotaged} were rejected, and nobody had spoiled them"
    aside = set(buffer.stats()["aside"])
    assert all(buffer.aside(attempt) is not None for attempt in aside)
    others = {found.states[attempt] for attempt in aside} - set(KEPT_ASIDE)
    assert forgetful or not others, f"aside are also {others}"
    if sum(state in KEPT_ASIDE for state in found.states.values()) <= ASIDE:
        assert rejected <= aside, f"{rejected - aside} were not kept aside"


def check_archive(
    life: Life, lines: list[dict[str, Any]], found: books.Books, sabotaged: set[str], forgetful: bool
) -> None:
    """Each finished attempt that has a payload is there once, but for what was kept aside or spoiled, under its outcome
    and with the tokens that were trained on. What Redis forgot the arrival of has no payload, whatever became of it."""
    archived = [] if not life.archive.exists() else list(read_archive(life.archive))
    times = Counter(one.trajectory.attempt for one in archived)
    assert all(n == 1 for n in times.values()), f"archived twice: {times.most_common(3)}"
    for one in archived:
        state = found.states.get(one.trajectory.attempt, "trained" * (one.trajectory.attempt in found.foretold))
        trained_anyway = forgetful and state.startswith("trained")  # as the learner said, when it was archived already
        assert state == one.outcome or trained_anyway, f"{one.trajectory.attempt} is {state}, not {one.outcome}"
    missing = {
        attempt
        for attempt, story in found.stories.items()
        if "h" in story.rpartition("m")[2] and found.states[attempt] not in KEPT_ASIDE and attempt not in times
    }
    assert missing <= sabotaged, f"not archived: {missing - sabotaged}"
    if not forgetful:
        trained = {attempt: fact["tokens"] for line in lines for attempt, fact in line["facts"].items()}
        for one in archived:
            _, here = tokens(one.trajectory)
            assert trained.get(one.trajectory.attempt, here) == here, f"{one.trajectory.attempt} was another"
