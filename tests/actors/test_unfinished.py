"""Episodes that break off and go on, and episodes that come home in segments."""

import asyncio
import functools
import itertools
import random
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
import redis
from argosy.actors.engine import Generation
from argosy.actors.episode import Unleased, run_episode, to_trajectory
from argosy.actors.errors import CannotContinue
from argosy.actors.settings import ActorConfig, ActorSettings, TaskSource
from argosy.actors.unfinished import Unfinished
from argosy.actors.worker import Worker
from argosy.buffer import Lease, ReplayBuffer, Task, pack, unpack
from argosy.envs import make_env
from conftest import changed, last_line, ledger_of, ready, run_worker, wait_until

SETTINGS = ActorSettings(context_tokens=100_000)
TASK = Task("guess/3", "guess", 3)
LEASE = Lease("3/0", "token", TASK, group="3", group_size=1, group_index=0, tries=1)


class BrokenOff(Exception):
    pass


def scripted(chat, env):
    """Answers by the turn alone: now a call, now text, now something malformed, some of it cut off."""
    texts = [
        '<tool_call>\n{"name": "guess", "arguments": {"number": 11}}\n</tool_call>',
        "I think.",
        "<tool_call>",
        "",
        '<tool_call>{"name": "gess"}</tool_call>',
        "é😀",
        "7",
    ]

    async def answer(transcript, seconds):
        turn = sum(message["role"] == "assistant" for message in transcript.messages)
        ids = chat.encode(texts[turn % len(texts)]) + [chat.stop_id] * (turn % 3 != 1)
        logprobs = [-0.1 * (turn + 1) - 0.01 * i for i in range(len(ids))]
        return Generation(ids, logprobs, [turn + i // 4 for i in range(len(ids))], "stop", "engine-0", prefilled=turn)

    return answer


def play(chat, source, lease=LEASE, settings=SETTINGS, break_off=None, pieces=None):
    """An episode by the script, gone on with if the lease has a partial; its checkpoint after turn `break_off`."""

    async def run():
        env = make_env(source.env, **source.kwargs)
        episode = Unfinished(lease, env, chat, source, settings, "actor-0")
        left = None

        async def after_turn(outcome):
            nonlocal left
            if cut := episode.segment(outcome):
                pieces.append(cut[1])
            left = cut[2] if cut else episode.checkpoint(outcome)
            if outcome.turns == break_off:
                raise BrokenOff

        try:
            so_far = await episode.resume() if lease.partial else None
            policy = scripted(chat, env)
            outcome = await run_episode(env, TASK.seed, policy, episode.transcript, settings, after_turn, so_far)
            return episode.trajectory(outcome), outcome
        except BrokenOff:
            return unpack(pack(left)), None
        finally:
            await env.stop()

    return asyncio.run(run())


def timeless(trajectory):
    """Without what no clock shows twice."""
    traces = [replace(trace, turns=[turn._replace(seconds=0.0) for turn in trace.turns]) for trace in trajectory.traces]
    return replace(trajectory, traces=traces, timing={})


STUCK = TaskSource(name="guess", env="arena:Stuck")
REPAIR = TaskSource(name="guess", env="argosy/repair", kwargs={"level": 2})


@pytest.mark.parametrize("source", [STUCK, REPAIR], ids=["arena", "repair"])
@pytest.mark.parametrize("template", ["chat", "forgetful"])
def test_an_episode_goes_on_wherever_it_broke_off(source, template, request):
    """Broken off after any of its turns, the last one included, it ends as if nothing had happened."""
    chat = request.getfixturevalue(template)
    whole, outcome = play(chat, source)
    assert outcome.turns >= 6 and len(whole.traces) == (1 if template == "chat" else outcome.turns)
    for turn in range(1, outcome.turns):
        left, _ = play(chat, source, break_off=turn)
        assert left.status == "segment" and left.n_sampled > 0
        resumed, after = play(chat, source, replace(LEASE, partial=left))
        assert timeless(resumed) == timeless(whole)
        assert (after.turns, after.malformed, after.prefilled) == (outcome.turns, outcome.malformed, outcome.prefilled)
    assert sum(value for trace in whole.traces for _, value in trace.rewards) == (0.25 if source is STUCK else 0.0)


def test_time_that_was_spent_counts_once(chat):
    left, _ = play(chat, STUCK, break_off=3)
    assert 0 < left.timing["env"] + left.timing["engine"] <= left.timing["total"]
    whole, _ = play(chat, STUCK)
    spent = replace(LEASE, partial=replace(left, timing=left.timing | {"total": 1000.0, "waited": 10.0}))
    over, _ = play(chat, STUCK, spent, SETTINGS.model_copy(update={"episode_seconds": 989.0}))
    assert over.status == "truncated" and over.n_sampled < whole.n_sampled
    in_time, _ = play(chat, STUCK, spent, SETTINGS.model_copy(update={"episode_seconds": 995.0}))
    assert timeless(in_time) == timeless(whole) and 1000 < in_time.timing["total"] < 1001


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"state": {}}, "its state is not understood: messages: Field required"),
        ({"state": {"turns": "3"}}, "its state is not understood: turns: Input should be a valid integer"),
        ({"state": {"messages": [1]}}, r"its state is not understood: messages\.0"),
        ({"state": {"later": 1}}, "its state is not understood: later: Extra inputs"),
        ({"env": "arena:Guess"}, "the environment was 'arena:Guess' and is 'arena:Stuck'"),
        ({"task": Task("guess/4", "guess", 4)}, "the task was"),
        ({"sampling": {"temperature": 0.5}}, "the sampling was {'temperature': 0.5} and is {'temperature': 1.0}"),
        ({"state": {"tools": "0123"}}, "the tools was '0123' and is"),
        ({"state": {"segments": 1}}, "the number of segments at home was 1 and is 0"),
        ({"kwargs": {"mood": " Maybe."}}, "the opening differs: it was '.*10.' and is '.*10. Maybe.' at character"),
        ({"said": (1, "higher still")}, "turn 1 differs: it was 'higher still' and is 'lower' at character 0"),
        ({"said": (3, None)}, "turn 3 differs: it was '' and is 'Error: <tool_call> without"),
        ({"more": {"role": "tool", "content": "x" * 500}}, f"turn 3 differs: it was '{'x' * 80}' and is '' at"),
        ({"more": {"content": "x"}}, "turn 3 differs: it was 'x' and is '' at character 0"),
        ({"more": {"role": "assistant", "content": None}}, "turn 3 differs: it was 'None' and is ''"),
        ({"repeat": 4}, "turn 6 ended the episode, which went on when it was recorded"),
        ({"kwargs": {"turn": 2}}, "the replay took more than 1 s"),
    ],
)
def test_what_is_not_as_it_was_starts_over(chat, change, reason):
    left, _ = play(chat, STUCK, break_off=3)
    messages = [dict(message) for message in left.state["messages"]]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if "said" in change:
        turn, text = change["said"]
        messages[answers[turn - 1] + 1 :] = [{**messages[answers[turn - 1] + 1], "content": text}] if text else []
    messages += [change["more"]] if "more" in change else messages[answers[1] : answers[2]] * change.get("repeat", 0)
    fields = {name: value for name, value in change.items() if name in ("env", "task", "sampling")}
    state = {} if change.get("state") == {} else left.state | {"messages": messages} | change.get("state", {})
    lease = replace(LEASE, partial=replace(left, state=state, **fields))
    source = STUCK.model_copy(update={"kwargs": change.get("kwargs", {})})
    with pytest.raises(CannotContinue, match=reason):
        play(chat, source, lease, SETTINGS.model_copy(update={"episode_seconds": 1.0}))


def test_an_environment_may_say_that_it_cannot_be_replayed(chat):
    fleeting = TaskSource(name="guess", env="arena:Fleeting")
    left, _ = play(chat, fleeting, break_off=2)
    with pytest.raises(CannotContinue, match="arena:Fleeting cannot be replayed"):
        play(chat, fleeting, replace(LEASE, partial=left))


def test_an_episode_in_segments_goes_on_too(chat, forgetful):
    """Broken off after any turn, every sampled token still comes home once."""
    cutting = SETTINGS.model_copy(update={"segment_tokens": 5})
    for each in (chat, forgetful):
        whole, outcome = play(each, STUCK)
        for turn in range(1, outcome.turns):
            pieces = []
            left, _ = play(each, STUCK, LEASE, cutting, break_off=turn, pieces=pieces)
            lease = replace(LEASE, partial=left, segments=len(pieces))
            final, after = play(each, STUCK, lease, cutting, pieces=pieces)
            assert [piece.attempt for piece in pieces] == [f"3:{n}/0" for n in range(1, len(pieces) + 1)]
            assert all((p.status, p.reward, p.reward_parts, p.state) == ("segment", 0.0, {}, {}) for p in pieces)
            assert sampled([*pieces, final]) == sampled([whole]) and len(pieces) > 1
            assert (after.turns, final.reward, final.status) == (outcome.turns, whole.reward, whole.status)
        with pytest.raises(CannotContinue, match=r"segments at home was .* and is 9"):
            play(each, STUCK, replace(lease, segments=9), cutting)


def sampled(trajectories):
    """Every sampled token with mu and version, and every reward, in order."""
    traces = [trace for trajectory in trajectories for trace in trajectory.traces]
    columns = [(trace.tokens, trace.logprobs, trace.versions) for trace in traces]
    tokens = [tuple(column[trace.sampled].tolist()) for row, trace in zip(columns, traces) for column in row]
    rows = [list(zip(*tokens[i : i + 3])) for i in range(0, len(tokens), 3)]
    return list(itertools.chain(*rows)), [value for trace in traces for _, value in trace.rewards]


def test_segments_and_groups_exclude_each_other(model, tmp_path):
    buffer = {"run": "r", "url": "unix:///r.sock", "batch_size": 2, "group_size": 4}
    with pytest.raises(ValueError, match=r"actor\.segment_tokens=100 needs buffer\.group_size=1, not 4"):
        ActorConfig(run_dir=tmp_path, model=model, buffer=buffer, actor={"segment_tokens": 100})


def test_nothing_is_stored_of_an_episode_without_a_lease(chat):
    """Evaluation and demonstrations play the same episodes."""

    async def run():
        env = make_env("arena:Stuck")
        episode = Unfinished(LEASE, env, chat, STUCK, SETTINGS, "expert")
        outcome = await run_episode(env, TASK.seed, scripted(chat, env), episode.transcript, SETTINGS)
        lease = Unleased("demonstration/guess/3", TASK)
        return to_trajectory(outcome, episode.transcript.traces(), lease, STUCK, SETTINGS, "expert")

    assert asyncio.run(run()).state == {}


# With real workers, a real engine and a real Redis


def partials(config):
    """What is stored of unfinished episodes, by attempt."""
    client = redis.Redis.from_url(config.buffer.url)
    blobs = [client.get(name) for name in client.scan_iter(f"{{{config.buffer.run}}}:partial:*")]
    found = [unpack(blob) for blob in blobs if blob]
    return {trajectory.attempt: trajectory for trajectory in found}


def events(config, attempt):
    return [event.what for event in ReplayBuffer(config.buffer).story(attempt).events]


def start_and_wait(start, config, turns):
    """A worker whose four episodes stand still after so many turns."""
    worker = start("worker", config)
    wait_until(lambda: [partial.state["turns"] for partial in partials(config).values()] == [turns] * 4, 40, worker)
    return worker


def begins_with(trajectory, partial):
    (whole,), (part,) = trajectory.traces, partial.traces
    return (
        all(
            np.array_equal(getattr(whole, column)[: len(part)], getattr(part, column))
            for column in ("tokens", "sampled", "logprobs", "versions")
        )
        and whole.turns[: len(part.turns)] == part.turns
    )


@pytest.mark.timeout(120)
def test_another_worker_goes_on_where_a_killed_one_was(config, start):
    killed = start_and_wait(start, changed(config, env="arena:Stuck", kwargs={"turn": 4}), 3)
    left = partials(config)
    killed.popen.send_signal(signal.SIGKILL)
    killed.wait(5)
    free = changed(config, env="arena:Stuck").model_copy(update={"name": "actor-1"})
    other = start("worker", free)
    wait_until(lambda: ledger_of(free).live.get("ready", 0) == 40, 60, other)
    for attempt in left:
        assert events(free, attempt)[1:4] == ["leased by actor-0", "its worker is gone", "leased by actor-1"]
    wait_until(lambda: last_line(free, "actor-1")["resumed"] == 4, 5, other)
    home = {trajectory.attempt: trajectory for trajectory in ready(free)}
    for attempt, partial in left.items():
        assert begins_with(home[attempt], partial) and partial.n_sampled < home[attempt].n_sampled
        assert home[attempt].actor == "actor-1" and home[attempt].timing["total"] > partial.timing["total"] > 0
    assert ledger_of(free).balanced and not partials(free)


@pytest.mark.timeout(120)
def test_a_worker_that_starts_again_goes_on_at_once(config, start):
    """It takes back what it held under its name; nobody waits for leases to expire."""
    patient = config.model_copy(update={"buffer": config.buffer.model_copy(update={"lease_seconds": 1000})})
    killed = start_and_wait(start, changed(patient, env="arena:Stuck", kwargs={"turn": 4}), 3)
    left = partials(config)
    killed.popen.send_signal(signal.SIGKILL)
    killed.wait(5)
    free = changed(patient, env="arena:Stuck")
    again = start("worker", free)
    wait_until(lambda: ledger_of(free).live.get("ready", 0) == 40, 60, again)
    assert all(events(free, attempt)[2] == "its worker is gone" for attempt in left)
    home = {trajectory.attempt: trajectory for trajectory in ready(free)}
    assert all(begins_with(home[attempt], partial) for attempt, partial in left.items())


@pytest.mark.timeout(120)
def test_what_a_draining_worker_cannot_finish_goes_on_elsewhere(config, start):
    """Checkpoints may be far apart: while it drains, every turn is stored. Giving back counts no try."""
    slow = changed(config, kwargs={"pause": 2.0}, drain_seconds=3.2, checkpoint_seconds=1000)
    worker = start("worker", slow)
    wait_until(lambda: ledger_of(slow).live.get("leased", 0) == 4, 30, worker)
    worker.popen.send_signal(signal.SIGTERM)
    assert worker.wait(10) == 0, str(worker)
    leases = ReplayBuffer(config.buffer).lease("other", 4)
    assert [lease.tries for lease in leases] == [1] * 4
    assert all(lease.partial and lease.partial.state["turns"] >= 1 for lease in leases)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("env", ["arena:Fickle", "arena:Fleeting"])
def test_an_environment_that_answers_otherwise_starts_over(config, start, env):
    stuck = changed(config, env=env, kwargs={"turn": 4}, segment_tokens=None if env == "arena:Fickle" else 16)
    if env == "arena:Fickle":
        killed = start_and_wait(start, stuck, 3)
    else:
        killed = start("worker", stuck)  # stores nothing but with its segments
        wait_until(lambda: len(partials(stuck)) == 4, 40, killed)
    left = partials(stuck)
    killed.popen.send_signal(signal.SIGKILL)
    killed.wait(5)
    free = changed(stuck, env=env)
    again = start("worker", free)
    wait_until(lambda: ledger_of(free).live.get("ready", 0) >= 40, 60, again)
    for attempt in left:
        assert "starts over: what there was cannot be continued" in events(free, attempt)
    assert last_line(free, free.name)["resumed"] == 0
    reason = "turn 1 differs: it was" if env == "arena:Fickle" else "cannot be replayed"
    assert str(again).count(reason) == 4, str(again)
    assert ledger_of(free).balanced


@pytest.mark.timeout(120)
def test_segments_come_home_before_the_end_and_every_token_once(config, start):
    """Also when the worker is killed between two of them."""
    cutting = changed(config, env="arena:Stuck", kwargs={"turn": 5}, segment_tokens=20)
    killed = start("worker", cutting)
    wait_until(lambda: ledger_of(cutting).live.get("ready", 0) == 4, 40, killed)
    wait_until(lambda: [p.state["turns"] for p in partials(cutting).values()] == [4] * 4, 20, killed)
    killed.popen.send_signal(signal.SIGKILL)
    killed.wait(5)
    assert ledger_of(cutting).live["leased"] == 4  # and four segments of them can be trained on
    left = partials(cutting)
    free = changed(cutting, env="arena:Stuck")
    worker = run_worker(free, 5)
    assert worker.counters.resumed == 4 and worker.counters.segments > 0
    home = ready(free)
    assert set(left) <= set(finished(home)) and all(len(pieces_of(home, attempt)) > 1 for attempt in left)
    check_every_token(home)
    by_the_killed = sum(pieces_of(home, attempt)[0].n_sampled for attempt in left)
    assert worker.counters.sampled_tokens == sum(trajectory.n_sampled for trajectory in home) - by_the_killed
    assert ledger_of(free).balanced and not partials(free)


@pytest.mark.timeout(180)
def test_workers_are_killed_again_and_again_and_every_token_comes_home_once(config, start):
    rng = random.Random(7)
    tough = {"max_tries": 100, "batch_size": 4, "lease_seconds": 1000}
    mine = config.model_copy(update={"buffer": config.buffer.model_copy(update=tough)})
    mine = changed(mine, env="arena:Stuck", kwargs={"pause": 0.2}, segment_tokens=20)
    for _ in range(6):
        worker = start("worker", mine)
        wait_until(functools.partial(progress, mine, turns_of(mine)), 30, worker)
        time.sleep(rng.random())
        worker.popen.send_signal(signal.SIGKILL)
        worker.wait(5)
    last = start("worker", mine)
    wait_until(lambda: ledger_of(mine).live.get("leased", 0) + ledger_of(mine).live.get("queued", 0) == 0, 90, last)
    home = ready(mine)
    stories = {attempt: events(mine, attempt) for attempt in finished(home)}
    assert len(stories) == 20 and sum(story.count("its worker is gone") for story in stories.values()) > 10
    started_over = [attempt for attempt, story in stories.items() if any("starts over" in event for event in story)]
    assert len(started_over) <= 2  # a kill between Redis' receiving a checkpoint and its counting it
    check_every_token([t for t in home if f"{t.group.partition(':')[0]}/0" not in started_over])
    wait_until(lambda: last_line(mine, mine.name)["resumed"] > 0, 5, last)  # it reports once a second
    assert ledger_of(mine).balanced


def turns_of(config):
    return {(attempt, partial.state["turns"]) for attempt, partial in partials(config).items()}


def progress(config, before):
    return turns_of(config) - before


def finished(home):
    return {trajectory.attempt: trajectory for trajectory in home if trajectory.status != "segment"}


def pieces_of(home, attempt):
    return [trajectory for trajectory in home if trajectory.group.startswith(f"{attempt.partition('/')[0]}:")]


def check_every_token(home):
    """What the policy said in each episode came home in its pieces, each token once, and so did what it earned."""
    for attempt, final in finished(home).items():
        pieces = pieces_of(home, attempt)
        assert [piece.attempt for piece in pieces] == [final.group + f":{n}/0" for n in range(1, len(pieces) + 1)]
        (whole,) = final.traces
        said = np.zeros(len(whole), int)
        for trajectory in (*pieces, final):
            (trace,) = trajectory.traces
            assert np.array_equal(trace.tokens, whole.tokens[: len(trace)])
            said[: len(trace)] += trace.sampled
        turns = [turn for turn in whole.turns if turn.role == "assistant"]
        expected = np.zeros(len(whole), int)
        for turn in turns:
            expected[turn.start : turn.end] = 1
        assert np.array_equal(said, expected) and all(piece.n_sampled >= 20 for piece in pieces) and final.n_sampled
        rewards = [value for trajectory in (*pieces, final) for _, value in trajectory.traces[0].rewards]
        assert rewards == [0.25] * (len(turns) > 1)  # the second turn's
        assert all((piece.status, piece.reward, piece.reward_parts) == ("segment", 0.0, {}) for piece in pieces)


@pytest.mark.timeout(60)
def test_an_episode_that_is_too_old_is_given_up(config):
    """Heartbeats say which weights sampled its first token; the buffer says which is too old."""
    strict = config.buffer.model_copy(update={"eta": 0, "too_old": "cancel", "lease_seconds": 1.5})
    stuck = changed(
        config.model_copy(update={"buffer": strict}), env="arena:Stuck", kwargs={"turn": 3}, drain_seconds=0
    )
    buffer = ReplayBuffer(strict)

    async def run():
        worker = Worker(stuck)
        running = asyncio.create_task(worker.run())
        while len(await asyncio.to_thread(partials, stuck)) < 4:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(buffer.publish, buffer.next_version(at_least=10), 0)
        while worker.counters.late < 4:
            await asyncio.sleep(0.05)
        worker.stop()
        await running

    asyncio.run(asyncio.wait_for(run(), 40))
    ledger = buffer.ledger()
    assert ledger.balanced and ledger.dropped["cancelled"] >= 4
