"""Who may be reached from a sandbox: real servers, real clients, and everybody else is refused."""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from argosy.envs import Sandbox, SandboxSpec
from argosy.envs.sandboxes.network import Proxy, listen_inside

HOST = socket.gethostname()
CURL = "curl -sS --max-time 10 --noproxy ''"


@asynccontextmanager
async def served() -> AsyncIterator[int]:
    """A port on which a server tells what it was asked."""

    async def answer(request: web.Request) -> web.Response:
        text = await request.text()
        return web.Response(text=f"{request.method} {request.path_qs} {request.headers['Host']} {text}\n")

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "0.0.0.0", 0)
    await site.start()
    assert site._server is not None
    try:
        yield site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    finally:
        await runner.cleanup()


def test_listed_hosts_are_reached_and_no_other(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with served() as port:
            sandbox: Any = await Sandbox.open(SandboxSpec(network=(HOST.upper(), "listed.invalid")))

            async def ask(command: str) -> str:
                return (await sandbox.exec(command, timeout=30)).output

            here = f"{HOST}:{port}"
            assert await ask(f"{CURL} http://{here}/a?b=c -d body") == f"POST /a?b=c {here} body\n"
            assert await ask(f"{CURL} -p http://{here}/tunnel") == f"GET /tunnel {here} \n", "CONNECT, as for https"
            python = f"import urllib.request as u; print(u.urlopen('http://{here}/py').read().decode(), end='')"
            assert await ask(f'python3 -c "{python}"') == f"GET /py {here} \n"
            for other in ("elsewhere.org", "127.0.0.1", "2130706433", "0x7f.1", "[::1]", "localhost", f"x.{HOST}"):
                answer = await ask(f"{CURL} http://{other}:{port}/; {CURL} -p http://{other}:{port}/")
                assert "is not on the list of hosts that may be reached" in answer and "403" in answer, answer
            assert "cannot be reached" in await ask(f"{CURL} http://listed.invalid/; {CURL} http://{HOST}:1/")
            assert "403" in await ask("git ls-remote https://elsewhere.org/x")
            raw = "exec 3<>/dev/tcp/127.0.0.1/3128; printf '%s' >&3; cat <&3"
            for head in ("nonsense\\r\\n\\r\\n", "GET / HTTP/1.1\\r\\n\\r\\n", "GET ftp://a/ HTTP/1.1\\r\\n\\r\\n"):
                assert "400 Bad Request" in await ask(raw.replace("%s", head))
            assert sandbox.proxy.refused["elsewhere.org"] == 3 and sandbox.proxy.refused["127.0.0.1"] >= 2
            await sandbox.reset()
            assert await ask(f"{CURL} http://{here}/again") == f"GET /again {here} \n"
            await sandbox.close()

    with caplog.at_level(logging.WARNING):
        run(body())
    assert sum("refused to a sandbox: elsewhere.org" in line for line in caplog.messages) == 1


def test_without_a_list_there_is_no_network(run: Any, sandbox: Sandbox) -> None:
    run(sandbox.write("try.py", "import socket\nsocket.create_connection(('127.0.0.1', 6379), 1)"))
    assert "refused" in run(sandbox.exec("python3 try.py; grep -c : /proc/net/dev; env | grep -i proxy")).output
    assert run(sandbox.exec("grep -c : /proc/net/dev")).output == "1\n", "loopback"


def test_any_host_means_the_public_internet(run: Any) -> None:
    async def body() -> None:
        async with served() as port:
            sandbox = await Sandbox.open(SandboxSpec(network=("*",)))
            for place in ("localhost", "127.0.0.1", "169.254.169.254", "10.0.0.1", "2130706433", "[::ffff:127.0.0.1]"):
                answer = (await sandbox.exec(f"{CURL} http://{place}:{port}/", timeout=30)).output
                assert "is not on the public internet" in answer, answer
            await sandbox.close()

    run(body())


def test_it_serves_a_unix_socket_too_and_bounds_connections(run: Any, tmp_path: Path) -> None:
    async def body() -> None:
        path = str(tmp_path / "proxy")
        proxy = Proxy(["localhost"])
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        await proxy.serve(listener)
        async with served() as port:
            held = [await asyncio.open_unix_connection(path) for _ in range(64)]
            reader, writer = await asyncio.open_unix_connection(path)
            assert (await reader.readline()).startswith(b"HTTP/1.1 503")
            writer.close()
            for _, other in held:
                other.close()
            await asyncio.sleep(0.1)
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(f"GET http://localhost:{port}/x HTTP/1.1\r\nHost: other\r\nProxy-Foo: 1\r\n\r\n".encode())
            assert (await reader.read()).endswith(f"GET /x localhost:{port} \n".encode())
            writer.close()
        proxy.close()
        with pytest.raises(OSError):
            await asyncio.open_unix_connection(path)

    run(body())


@pytest.mark.skipif(os.geteuid() != 0, reason="entering a network takes root")
def test_it_serves_inside_another_network(run: Any, sandbox: Any) -> None:
    async def body() -> None:
        guest = int(Path(f"/proc/{sandbox._process.pid}/task/{sandbox._process.pid}/children").read_text().split()[0])
        proxy = Proxy([HOST])
        await proxy.serve(listen_inside(guest, 4711))
        async with served() as port:
            ask = f"{CURL} -x http://127.0.0.1:4711 http://{HOST}:{port}/in http://elsewhere.org/"
            assert (await sandbox.exec(ask)).output.startswith(
                f"GET /in {HOST}:{port} \nsandbox: elsewhere.org is not on"
            )
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", 4711)
        proxy.close()
        with pytest.raises(OSError):
            listen_inside(2**22 + 1, 1)

    run(body())
