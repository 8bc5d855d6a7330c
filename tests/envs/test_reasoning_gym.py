"""Real puzzles of reasoning-gym."""

import json
from typing import Any

import pytest
from argosy.envs import make_env
from argosy.envs.sources.reasoning_gym import ReasoningGym


def test_a_puzzle_is_played_and_judged_by_its_own_scorer(run: Any) -> None:
    async def body() -> None:
        env = make_env("argosy/reasoning-gym", dataset="chain_sum", config={"max_terms": 2})
        opening = await env.start(7)
        assert opening == await make_env("argosy/reasoning-gym", dataset="chain_sum", config={"max_terms": 2}).start(7)
        assert [message["role"] for message in opening] == ["system", "user"] and "<answer>" in opening[0]["content"]
        a, b = (int(word) for word in opening[1]["content"].replace("- ", "-").split() if word.lstrip("-").isdigit())
        rewards = {}
        for text in (
            f"{a} and {b}: <answer>{a + b}</answer>",
            f"<answer>{a + b + 1}</answer>",
            "",
            "<answer></answer>",
        ):
            await env.start(7)
            assert (await env.act(None, text)).done
            rewards[text] = (await env.score()).reward
        assert list(rewards.values()) == [1.0, 0.0, 0.0, 0.0]

    run(body())


def test_splits_share_no_question(run: Any) -> None:
    async def body() -> None:
        seen = {}
        for split in ("train", "held_out"):
            env = ReasoningGym("simple_equations", split=split)
            seen[split] = {(await env.start(seed))[1]["content"] for seed in range(60)}
        assert len(seen["train"]) > 50 and len(seen["held_out"]) > 50 and not seen["train"] & seen["held_out"]
        complaints = []
        for split in ("train", "held_out"):
            try:
                await ReasoningGym("chain_sum", split=split, size=1).start(0)
            except ValueError as error:
                complaints.append(str(error))
        assert len(complaints) == 1 and "chain_sum has no puzzle for split" in complaints[0]

    run(body())


@pytest.mark.parametrize(
    "dataset", ["leg_counting", "countdown", "sudoku", "word_ladder", "mini_sudoku", "game_of_life"]
)
def test_references_of_many_kinds_pass_and_nothing_earns_nothing(run: Any, dataset: str) -> None:
    async def checks() -> list[str | None]:
        return [check.problem async for check in ReasoningGym(dataset, size=100).validate(5)]

    assert run(checks()) == [None] * 5


def test_an_answer_that_breaks_a_scorer_earns_nothing(run: Any) -> None:
    async def body() -> None:
        env = ReasoningGym("rearc")
        for text in ("<answer>[[</answer>", "x", json.dumps({"a": 1})):
            await env.start(0)
            await env.act(None, text)
            assert (await env.score()).reward < 0.1

    run(body())


def test_complaints_name_what_there_is(run: Any) -> None:
    with pytest.raises(ValueError, match=r"no dataset 'chain_sums'; it has .*chain_sum"):
        run(ReasoningGym("chain_sums").start(0))
    with pytest.raises(ValueError, match=r"chain_sum does not take {'terms': 3}: .*'terms'"):
        run(ReasoningGym("chain_sum", {"terms": 3}).start(0))
    with pytest.raises(ValueError, match=r"does not take {'min_terms': 9}"):
        run(ReasoningGym("chain_sum", {"min_terms": 9}).start(0))
