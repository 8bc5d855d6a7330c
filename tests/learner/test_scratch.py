import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from argosy.learner.scratch import SPECIAL_TOKENS, make_tokenizer
from transformers import PreTrainedTokenizerFast

TOOLS = [
    {"type": "function", "function": {"name": "run_tests", "parameters": {"type": "object", "properties": {}}}},
    {
        "type": "function",
        "function": {"name": "edit", "parameters": {"type": "object", "properties": {"line": {}, "number": {}}}},
    },
]
CALL = {"name": "edit", "arguments": {"line": 'return "ü" * 12', "number": 3}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Repair f."},
    {"role": "user", "content": "def f(x):\n    return x + 12\n"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "edit", "content": "ok"},
    {"role": "assistant", "content": "Again.", "tool_calls": [{"type": "function", "function": CALL}, CALL]},
    {"role": "tool", "content": "<ok>\n\n"},
    {"role": "tool", "content": ""},
    {"role": "assistant", "content": "Done & gone"},
]


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(model_dir)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_appending_a_message_never_changes_what_came_before(
    tokenizer: PreTrainedTokenizerFast, first: int, tools: list[Any] | None
) -> None:
    messages = CONVERSATION[first:]
    ids = tokenizer.apply_chat_template(messages, tools=tools, return_dict=False)
    for count in range(1, len(messages)):
        part = tokenizer.apply_chat_template(messages[:count], tools=tools, return_dict=False)
        assert ids[: len(part)] == part
        if messages[count]["role"] == "assistant":
            asked = tokenizer.apply_chat_template(
                messages[:count], tools=tools, return_dict=False, add_generation_prompt=True
            )
            assert ids[: len(asked)] == asked


def test_calls_are_hermes_and_tools_are_one_line_each(tokenizer: PreTrainedTokenizerFast) -> None:
    text = tokenizer.apply_chat_template(CONVERSATION[:4], tools=TOOLS, tokenize=False)
    assert "Repair f.\nTools:\nrun_tests()\nedit(line, number)<|im_end|>\n" in text
    call = text.split("<tool_call>\n")[1].split("\n</tool_call><|im_end|>\n")[0]
    assert json.loads(call) == CALL
    assert text.endswith("<|im_start|>tool\n<tool_response>\nok\n</tool_response><|im_end|>\n")


def test_any_text_survives_and_digits_stay_single(tokenizer: PreTrainedTokenizerFast) -> None:
    generator = random.Random(0)
    for _ in range(200):
        text = "".join(chr(generator.choice([9, 10, *range(32, 127), 0xE9, 0x4E2D, 0x1F600])) for _ in range(40))
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [tokenizer.decode([token]) for token in tokenizer.encode("2026")] == ["2", "0", "2", "6"]


def test_special_tokens_are_single_ids_and_the_reply_ends_with_eos(tokenizer: PreTrainedTokenizerFast) -> None:
    for token in SPECIAL_TOKENS:
        assert len(tokenizer.encode(token)) == 1
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_the_directory_is_complete(model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    assert config["vocab_size"] % 16 == 0 and config["dtype"] == "float32" and not config["tie_word_embeddings"]
    generation = json.loads((model_dir / "generation_config.json").read_text())
    assert generation["eos_token_id"] == config["eos_token_id"]


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 263"):
        make_tokenizer(["x"], vocab=200)


def test_the_command_makes_a_model(tmp_path: Path, reference: Any) -> None:
    corpus = tmp_path / "corpus.jsonl"
    lines: list[Any] = ["plain text", {"messages": CONVERSATION, "tools": TOOLS}]
    corpus.write_text("".join(json.dumps(line) + "\n" for line in lines * 20))
    out = tmp_path / "model"
    command = [sys.executable, "-m", "argosy.learner.scratch", "--corpus", str(corpus), "--out", str(out)]
    subprocess.run([*command, "--vocab", "300", "--hidden", "32", "--layers", "1"], check=True, timeout=60)
    model = reference(out)
    assert model.config.hidden_size == 32 and model.generation_config.eos_token_id == 2
