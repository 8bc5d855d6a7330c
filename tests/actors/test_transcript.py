import shutil
import time

import numpy as np
import pytest
from arena import Guess
from argosy.actors.chat import Chat
from argosy.actors.engine import Generation
from argosy.actors.transcript import Transcript

OPENING = [{"role": "system", "content": "Guess the number."}, {"role": "user", "content": "It is below 10."}]
CALL = '<tool_call>\n{"name": "guess", "arguments": {"number": 5}}\n</tool_call>'
HIGHER = [{"role": "tool", "name": "guess", "content": "higher"}]


@pytest.fixture(scope="module")
def chat(model):
    return Chat(model)


def say(ids, version=1):
    return Generation(ids, [-0.5] * len(ids), [version] * len(ids), "stop")


def test_the_record_is_exactly_what_was_sent_and_sampled(chat):
    transcript = Transcript(chat, Guess.tool_schemas())
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
            chat.opening([*OPENING, {"role": "assistant", "content": CALL}, *HIGHER], Guess.tool_schemas()).ids
        )
        + "7<|im_end|>"
    )


def test_turns_hold_content_and_nothing_of_the_template(chat):
    transcript = Transcript(chat, Guess.tool_schemas())
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


def test_a_template_that_rewrites_the_past_starts_a_new_trace(chat, model, tmp_path):
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    # drops what assistants said before the last tool answer, as templates that strip earlier thoughts do
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    transcript = Transcript(Chat(tmp_path), [])
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
    transcript = Transcript(chat, Guess.tool_schemas())
    transcript.open([*OPENING[:1], {"role": "user", "content": content}])
    transcript.say(say([chat.stop_id]))
    transcript.hear([{"role": "tool", "content": content}, {"role": "tool", "content": "end"}])
    (trace,) = transcript.traces()
    texts = [chat.decode(trace.tokens[turn.start : turn.end].tolist()) for turn in trace.turns]
    assert [texts[1], *texts[3:]] == [content, content, "end"]


def test_it_is_quick_enough(chat):
    """The demonstration takes some 400 turns a second on one busy core."""
    started = time.process_time()
    for _ in range(200):
        transcript = Transcript(chat, Guess.tool_schemas())
        transcript.open(OPENING)
        for _ in range(4):
            transcript.say(say([*chat.encode(CALL), chat.stop_id]))
            transcript.hear(HIGHER)
        transcript.traces()
    per_turn = (time.process_time() - started) / 800
    assert per_turn < 1e-3, f"{per_turn * 1e6:.0f} us a turn"
    print(f"{per_turn * 1e6:.0f} us a turn")
