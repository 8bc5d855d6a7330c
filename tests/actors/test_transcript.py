import itertools
import random
import shutil
import time

import numpy as np
import pytest
from arena import Guess
from argosy.actors.chat import Chat
from argosy.actors.engine import Generation
from argosy.actors.transcript import Transcript
from argosy.buffer import Task, Trajectory, pack, unpack
from argosy.learner.advantages import gae
from argosy.learner.packing import flatten

OPENING = [{"role": "system", "content": "Guess the number."}, {"role": "user", "content": "It is below 10."}]
CALL = '<tool_call>\n{"name": "guess", "arguments": {"number": 5}}\n</tool_call>'
HIGHER = [{"role": "tool", "name": "guess", "content": "higher"}]


def say(ids, version=1):
    return Generation(ids, [-0.5] * len(ids), [version] * len(ids), "stop")


def test_the_record_is_exactly_what_was_sent_and_sampled(chat):
    transcript = Transcript(chat, Guess().tool_schemas())
    transcript.open(OPENING)
    prompt = list(transcript.ids)
    first = [*chat.encode(CALL), chat.stop_id]
    assert transcript.say(say(first)) == CALL
    transcript.hear(HIGHER, seconds=0.25)
    answer = transcript.ids[len(prompt) + len(first) :]
    second = [*chat.encode("7"), chat.stop_id]
    transcript.say(say(second, version=2))
    (trace,) = transcript.traces()
    assert trace.tokens.tolist() == [*prompt, *first, *answer, *second]
    where = np.flatnonzero(trace.sampled)
    assert trace.tokens[where].tolist() == first + second
    assert trace.versions[where].tolist() == [1] * len(first) + [2] * len(second)
    assert (
        chat.decode(trace.tokens.tolist())
        == chat.decode(
            chat.opening([*OPENING, {"role": "assistant", "content": CALL}, *HIGHER], Guess().tool_schemas()).ids
        )
        + "7<|im_end|>"
    )


def test_turns_hold_content_and_nothing_of_the_template(chat):
    transcript = Transcript(chat, Guess().tool_schemas())
    transcript.open(OPENING)
    transcript.say(say([*chat.encode(CALL), chat.stop_id]))
    transcript.hear(HIGHER, seconds=0.25)
    (trace,) = transcript.traces()
    texts = [chat.decode(trace.tokens[turn.start : turn.end].tolist()) for turn in trace.turns]
    assert texts.pop() == "higher\n"  # this tokenizer has one token for the answer's end and the template's newline
    texts.append("higher")
    spans = [(turn.role, turn.tool, text) for turn, text in zip(trace.turns, texts)]
    assert spans == [
        ("system", None, "Guess the number."),
        ("user", None, "It is below 10."),
        ("assistant", None, CALL + "<|im_end|>"),
        ("tool", "guess", "higher"),
    ]
    assert trace.turns[-1].seconds == 0.25


def test_sampled_ids_are_never_encoded_again(chat):
    """The ids that a policy happened to sample for a text stay, though the tokenizer would write others."""
    spelled = [chat.encode(letter)[0] for letter in "guess"]
    assert chat.decode(spelled) == "guess" and spelled != chat.encode("guess")
    transcript = Transcript(chat, [])
    transcript.open(OPENING)
    transcript.say(say(spelled))
    transcript.hear(HIGHER)
    assert transcript.traces()[0].tokens[transcript.traces()[0].sampled].tolist() == spelled


def test_a_message_that_was_cut_off_is_closed_by_the_template(chat):
    ends = []
    for ids in ([*chat.encode("7"), chat.stop_id], chat.encode("7")):
        transcript = Transcript(chat, [])
        transcript.open(OPENING)
        transcript.say(say(ids))
        transcript.hear(HIGHER)
        (trace,) = transcript.traces()
        ends.append((trace.tokens.tolist(), int(trace.sampled.sum())))
    (closed, n_closed), (cut, n_cut) = ends
    assert closed == cut  # the same text either way ...
    assert n_closed == n_cut + 1  # ... but only a sampled closing token is trained


def test_a_template_that_rewrites_the_past_starts_a_new_trace(chat, forgetful):
    transcript = Transcript(forgetful, [])
    transcript.open(OPENING)
    transcript.say(say([*chat.encode("7"), chat.stop_id]))
    transcript.reward(0.5)
    transcript.hear(HIGHER)
    transcript.say(say([*chat.encode("8"), chat.stop_id]))
    transcript.reward(1.0)
    first, second = transcript.traces()
    assert (first.parent, second.parent) == (None, 0)
    assert first.rewards == [(len(first) - 1, 0.5)] and second.rewards == [(len(second) - 1, 1.0)]
    assert "7" not in chat.decode(second.tokens.tolist())
    assert chat.decode(second.tokens[second.sampled].tolist()) == "8<|im_end|>"


def test_the_template_may_trim_contents(chat, model, tmp_path):
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    template = (model / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").write_text(
        template.replace("message.content or ''", "(message.content or '') | trim")
    )
    transcript = Transcript(Chat(tmp_path), [])
    transcript.open([{"role": "user", "content": "  seven \n"}])
    (trace,) = transcript.traces()
    assert chat.decode(trace.tokens[trace.turns[0].start : trace.turns[0].end].tolist()) == "seven"


@pytest.mark.parametrize(
    "content", ["", "é😀", "<|im_end|>\n<|im_start|>user\n", "a\ue0000\ue001b", "{{ 1 }}", "x" * 5000]
)
def test_any_content_keeps_its_place(chat, content):
    transcript = Transcript(chat, Guess().tool_schemas())
    transcript.open([*OPENING[:1], {"role": "user", "content": content}])
    transcript.say(say([chat.stop_id]))
    transcript.hear([{"role": "tool", "content": content}, {"role": "tool", "content": "end"}])
    (trace,) = transcript.traces()
    texts = [chat.decode(trace.tokens[turn.start : turn.end].tolist()) for turn in trace.turns]
    assert [texts[1], *texts[3:]] == [content, content, "end"]


class Walk:
    """A conversation by chance: messages of any length, closed or cut off, some of them empty, some rewarded."""

    def __init__(self, seed, chat):
        self.rng, self.chat, self.version = random.Random(seed), chat, 0

    def turn(self, *transcripts):
        """The same turn for each, up to where the policy is to speak again."""
        n = self.rng.choice([0, 1, 3, 8])
        self.version += self.rng.random() < 0.3
        ids = [self.rng.randrange(self.chat.vocab_size) for _ in range(n)]
        ids += [self.chat.stop_id] * (self.rng.random() < 0.7)
        said = Generation(
            ids, [-self.rng.random() for _ in ids], [self.version + (i > 2) for i in range(len(ids))], "stop"
        )
        reward = self.rng.choice([0.0, 0.0, 1.0, -0.5])
        heard = [{"role": "tool", "content": self.rng.choice(["higher", "lower " * 5])}] * self.rng.choice([1, 2])
        for transcript in transcripts:
            transcript.say(said, 0.5)
            transcript.reward(reward)
            transcript.hear(heard, 0.25)


def as_trajectory(traces, status="segment", reward=0.0):
    task = Task("guess/0", "guess", 0)
    sampling = {"temperature": 1.0}
    return Trajectory("0/0", "0/0", task, "0", 1, 0, "arena:Guess", status, reward, {}, traces, sampling=sampling)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("template", ["chat", "forgetful"])
def test_a_restored_transcript_is_the_same_and_goes_on_the_same(template, seed, request):
    chat = request.getfixturevalue(template)
    walk = Walk(seed, chat)
    transcript = Transcript(chat, Guess().tool_schemas())
    transcript.open(OPENING)
    for _ in range(walk.rng.randrange(5)):
        walk.turn(transcript)
        if transcript.n_before_last and walk.rng.random() < 0.3:
            transcript.cut()
    stored = unpack(pack(as_trajectory(transcript.traces())))
    assert stored.traces == transcript.traces()
    restored = Transcript(chat, Guess().tool_schemas())
    restored.restore(list(transcript.messages), stored.traces)
    for _ in range(4):
        assert restored.traces() == transcript.traces() and restored.ids == transcript.ids
        assert restored.messages == transcript.messages and restored.oldest_version == transcript.oldest_version
        walk.turn(transcript, restored)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("template", ["chat", "forgetful"])
def test_segments_are_the_episode_in_parts(template, seed, request):
    """Every sampled token once, in order, with its mu, version and reward; and a critic sees the same before each."""
    chat = request.getfixturevalue(template)
    walk = Walk(seed, chat)
    whole, cut = Transcript(chat, []), Transcript(chat, [])
    whole.open(OPENING)
    cut.open(OPENING)
    pieces = []
    for _ in range(12):
        walk.turn(whole, cut)
        if cut.n_before_last >= 6:
            waiting = cut.n_before_last
            pieces.append(as_trajectory(cut.cut()))
            assert pieces[-1].n_sampled == waiting and cut.n_before_last == 0 < cut.n_sampled
        assert whole.ids == cut.ids
    pieces.append(as_trajectory(cut.traces(), "truncated", reward=1.0))
    one, parts = flatten([as_trajectory(whole.traces(), "truncated", reward=1.0)]), flatten(pieces)
    assert len(pieces) > 2
    for column in ("targets", "mu", "versions", "rewards", "temperature"):
        assert np.array_equal(getattr(one, column), getattr(parts, column)), column
    # What precedes an action, and so its value, is the same in its part; so are its TD errors (GAE at lambda 0).
    contexts = [prefixes(batch) for batch in (one, parts)]
    assert [contexts[0][i] for i in one.actions] == [contexts[1][i] for i in parts.actions]
    errors = []
    for batch, context in zip((one, parts), contexts):
        values = np.array([random.Random(repr(prefix)).random() for prefix in context])
        continues = np.array([t.status == "segment" for t in batch.trajectories])
        bootstrap = np.where(continues, values[batch.ends], 0.0)
        errors.append(gae(batch.rewards, values[batch.actions], bootstrap, batch.boundaries, gamma=0.9, lam=0.0))
    assert np.allclose(*errors)


def prefixes(batch):
    """For each position the tokens up to there: all that a model could know."""
    return [
        tuple(batch.tokens[start : at + 1])
        for start, end in itertools.pairwise(batch.starts)
        for at in range(start, end)
    ]


def test_what_is_left_after_a_cut_can_be_rewarded(chat):
    """The last message stays behind, so a grade never lacks a token, whatever ends the episode next."""
    transcript = Transcript(chat, [])
    transcript.open(OPENING)
    for text in ("4", "7"):
        transcript.say(say([*chat.encode(text), chat.stop_id]))
        transcript.reward(1.0)
        transcript.hear(HIGHER)
    (piece,) = transcript.cut()
    assert chat.decode(piece.tokens[piece.sampled].tolist()) == "4<|im_end|>"
    assert len(piece.rewards) == 1 and chat.decode(piece.tokens[-1:].tolist()).endswith("\n")
    transcript.say(say([]))  # an empty message, and yet a reward for it
    transcript.reward(0.5)
    (rest,) = transcript.traces()
    assert chat.decode(rest.tokens[rest.sampled].tolist()) == "7<|im_end|>"
    assert [value for _, value in rest.rewards] == [1.0, 0.5]
    assert transcript.n_before_last == 0


def test_it_is_quick_enough(chat):
    """The demonstration takes some 400 turns a second on one busy core."""
    started = time.process_time()
    for _ in range(200):
        transcript = Transcript(chat, Guess().tool_schemas())
        transcript.open(OPENING)
        for _ in range(4):
            transcript.say(say([*chat.encode(CALL), chat.stop_id]))
            transcript.hear(HIGHER)
        transcript.traces()
    per_turn = (time.process_time() - started) / 800
    assert per_turn < 1e-3, f"{per_turn * 1e6:.0f} us a turn"
    print(f"{per_turn * 1e6:.0f} us a turn")
