"""Real servers over real pipes: the example's, made with the `mcp` package, and one that misbehaves."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from argosy.envs import Grade, InfrastructureError, McpEnv, ToolCall, make_env
from argosy.envs.probe import left_open

ROOT = Path(__file__).parents[2]
NAUGHTY = '''
"""An MCP server by hand, which starts in milliseconds and does what no server should."""
import json, os, sys, time

def text(content, is_error=False):
    return {"result": {"content": [{"type": "text", "text": content}], "isError": is_error}}

def call(name):
    if name == "die":
        print("out of memory, or so", file=sys.stderr, flush=True)
        os._exit(3)
    if name == "hang":
        time.sleep(1000)
    if name == "refuse":
        return {"error": {"code": -32602, "message": "no such hour"}}
    return text("that was wrong" if name == "wrong" else os.environ["GREETING"], name == "wrong")

def answer(method, params):
    if method == "initialize":
        server = {"serverInfo": {"name": "naughty", "version": "1"}, "capabilities": {"tools": {}}}
        return {"result": {"protocolVersion": params["protocolVersion"], **server}}
    if method == "tools/list":
        names = ("greet", "wrong", "refuse", "die", "hang")
        schema = {"type": "object", "properties": {"tool": {"type": "string"}}}
        return {"result": {"tools": [{"name": n, "description": n, "inputSchema": schema} for n in names]}}
    if method == "tools/call":
        return call(params["name"])
    return {"error": {"code": -32601, "message": "no such method"}}

for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        found = answer(request["method"], request.get("params"))
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **found}), flush=True)
'''


class Naughty(McpEnv):
    environment = {"GREETING": "hello"}
    call_seconds = 1.0

    def __init__(self, server: Path, *arguments: str):
        self.command = ("python", str(server), *arguments)

    async def setup(self, seed: int, options: dict[str, Any]) -> str:
        await self.connect()
        return "go"

    def grade(self) -> Grade:
        return Grade(0.0)


@pytest.fixture(scope="session")
def naughty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("mcp") / "naughty.py"
    file.write_text(NAUGHTY)
    return file


def test_the_servers_tools_are_the_environments(naughty: Path, run: Any, processes_with: Any) -> None:
    async def body() -> None:
        env = Naughty(naughty)
        assert [schema["function"]["name"] for schema in env.tool_schemas()][:2] == ["greet", "wrong"]
        before = left_open(1000)
        assert await env.start(0) == [{"role": "user", "content": "go"}]
        assert len(processes_with(str(naughty))) == 1
        calls = [
            ToolCall("greet", {"tool": "x"}),
            ToolCall("wrong", {}),
            ToolCall("refuse", {}),
            ToolCall("nothing", {}),
        ]
        step = await env.act(calls)
        texts = [message["content"] for message in step.messages]
        assert texts[:3] == ["hello", "Error: that was wrong", "Error: no such hour"]
        assert texts[3].startswith("Error: no tool 'nothing'. Tools: greet(tool: string), wrong(")
        await env.stop()
        await env.stop()
        assert left_open(1000) == before

    run(body())
    assert not processes_with(str(naughty))


def test_a_server_that_dies_or_hangs_is_no_answer_and_is_gone(naughty: Path, run: Any, processes_with: Any) -> None:
    async def body() -> None:
        for tool, why in (("die", "out of memory, or so"), ("hang", "did not answer hang within 1 s")):
            env = Naughty(naughty)
            await env.start(0)
            with pytest.raises(InfrastructureError, match=why):
                await env.act([ToolCall(tool, {})])
            assert not processes_with(str(naughty))
            await env.stop()

    run(body())


def test_a_server_that_does_not_start_says_why(naughty: Path, run: Any, tmp_path: Path) -> None:
    silent = tmp_path / "silent.py"
    silent.write_text("import sys; sys.stdin.read()")
    crashing = tmp_path / "crashing.py"
    crashing.write_text("raise SystemExit('no database')")

    async def body() -> None:
        with pytest.raises(InfrastructureError, match=r"crashing.py does not start: .* It said: no database"):
            Naughty(crashing).tool_schemas()
        env = Naughty(silent)
        env.start_seconds = 0.5
        with pytest.raises(InfrastructureError, match=r"does not start: no answer within 0\.5 s"):
            await env.start(0)
        env = Naughty(naughty)
        env.offered = ("greet", "great")
        with pytest.raises(ValueError, match="the server has no great; it has greet, wrong"):
            env.tool_schemas()
        with pytest.raises(RuntimeError, match="no server"):
            await Naughty(naughty).call("greet")
        with pytest.raises(InfrastructureError, match="no-such-program"):
            env.command = ("no-such-program",)
            await env.connect()

    run(body())


def test_stepped_by_hand_and_cut_short(naughty: Path, processes_with: Any) -> None:
    env = Naughty(naughty)
    env.reset(seed=0)
    assert env.step('{"name": "greet", "arguments": {}}')[0] == "hello"
    env.close()
    env.reset(seed=1)

    async def cut_short() -> None:
        other = Naughty(naughty)
        await other.start(0)
        async with asyncio.timeout(0.3):
            await other.act([ToolCall("hang", {})])

    with pytest.raises(TimeoutError), asyncio.Runner() as runner:
        runner.run(cut_short())
    env.close()
    assert not processes_with(str(naughty)), "an event loop that ends takes its servers with it"


def test_the_example_with_the_real_package(run: Any, processes_with: Any) -> None:
    async def body() -> None:
        env = make_env(str(ROOT / "examples" / "meetings" / "meetings.py"))
        names = [schema["function"]["name"] for schema in env.tool_schemas()]
        assert names == ["agenda", "book"], "what grading needs is not offered"
        (opening,) = (await env.start(3))[1:]
        person = opening["content"].split()[0]
        step = await env.act([ToolCall("agenda", {"person": person}), ToolCall("book", {"hour": 99})])
        assert step.messages[0]["content"].split()[0].isdigit()
        assert "hours are 9 to 16" in step.messages[1]["content"]
        step = await env.act([ToolCall("book", {"hour": "soon"}), ToolCall("book", {"hour": env.free[0]})])  # type: ignore[attr-defined]
        assert "valid integer" in step.messages[0]["content"] and step.messages[1]["content"] == "booked"
        assert (await env.act([], "Done.")).done
        assert (await env.score()).reward == 1.0
        await env.stop()

    run(body())
    assert not processes_with("meetings/server.py") and "mcp" in sys.modules
