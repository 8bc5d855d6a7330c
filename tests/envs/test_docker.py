"""Sandboxes of Docker: on a real engine, with an image made of Debian's packages."""

import asyncio
import io
import os
import re
import resource
import signal
import tarfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from argosy.envs import Limits, Result, Sandbox, SandboxGone, SandboxPool, SandboxSpec, SandboxUnavailable
from argosy.envs.sandboxes import docker_images

from . import docker_engine

LIMITS = Limits(memory=200 * 2**20, processes=50, disk=32 * 2**20, file_size=4 * 2**20)
TIMEOUT = Result(137, "", reason="timeout")
HOG = "python3 -c 'x = []\nwhile True: x.append(bytearray(2**20))'"
BOMB = "import os, time\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(0.01)"


@pytest.fixture(scope="module")
def run() -> Iterator[Any]:
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def spec(docker_image: str) -> SandboxSpec:
    return SandboxSpec("docker", docker_image, limits=LIMITS)


@pytest.fixture(scope="module")
def box(run: Any, spec: SandboxSpec) -> Iterator[Sandbox]:
    """Shared: whatever a test does to it, the next finds a sandbox that works."""
    sandbox = run(Sandbox.open(spec))
    yield sandbox
    run(sandbox.close())


@pytest.fixture
def api(docker_image: str) -> Any:
    return docker.APIClient(base_url=os.environ["DOCKER_HOST"], version="auto")


def mark() -> str:
    return f"{300 + uuid.uuid4().int % 10**9 / 1e9:.9f}"


def test_exec_tells_how_a_command_ended(run: Any, box: Sandbox) -> None:
    assert run(box.exec("echo out; echo err >&2; exit 3")) == Result(3, "out\nerr\n")
    assert run(box.exec("kill -9 $$")) == Result(137, "", reason="killed")
    assert run(box.exec("cat; pwd")) == Result(0, "/workspace\n"), "stdin is empty"
    assert run(box.exec("printf '\\377\\n'")).output == "\ufffd\n"
    assert run(box.exec("for")).exit == 2
    assert "null byte" in run(box.exec("echo \0")).output
    assert run(box.exec("sh -c 'kill -9 $$'")).exit == 137
    assert run(box.exec(f"# {'x' * 300_000}\necho 'it'\"'\"'s long'")) == Result(0, "it's long\n")


def test_the_shell_persists(run: Any, box: Sandbox) -> None:
    run(box.exec("cd /tmp; export A=5; b=6; f() { echo $A $b; }; false"))
    assert run(box.exec("echo $?; pwd; f")) == Result(0, "1\n/tmp\n5 6\n")
    assert run(box.exec("exec >/dev/null; echo lost")) == Result(0, "")
    assert run(box.exec("f; sleep 77 &")) == Result(0, "5 6\n")
    assert run(box.exec("echo $A; pwd; ps x", fresh=True)).output.startswith("\n/workspace\n")
    assert "sleep 77" in run(box.exec("ps x")).output, "a fresh shell leaves the background alone"


@pytest.mark.parametrize(
    "how", ["setsid {}", "nohup {} >/dev/null", "(setsid sh -c '{} & {}' &)", "trap '' TERM HUP; {}"]
)
def test_the_deadline_kills_what_left_its_session(
    run: Any, box: Sandbox, how: str, processes_with: Any, eventually: Any
) -> None:
    sleep = f"sleep {mark()}"
    run(box.write("kept", "x"))
    began = time.monotonic()
    assert run(box.exec(f"cd /tmp; {how.replace('{}', sleep)} & {sleep}", timeout=0.4)) == TIMEOUT
    assert time.monotonic() - began < 5
    eventually(lambda: not processes_with(sleep), 2)  # on the host, where Docker's own timeouts leave them running
    assert run(box.exec("cat kept; pwd")) == Result(0, "x/workspace\n"), "a new shell, and the files are there"


def test_a_background_child_that_holds_stdout_delays_nothing(run: Any, box: Sandbox) -> None:
    began = time.monotonic()
    assert run(box.exec("(sleep 0.3; echo late; sleep 60) & (yes > /dev/null) & echo started")) == Result(
        0, "started\n"
    )
    assert run(box.exec("sleep 61 & exit 4")) == Result(4, "")
    assert time.monotonic() - began < 3
    time.sleep(0.5)
    assert run(box.exec("echo x")) == Result(0, "x\n"), "what it says between two commands is nobody's output"
    assert "sleep 61" in run(box.exec("ps x")).output, "and it lives on"
    run(box.exec("sleep 9", timeout=0.1))


def test_output_is_capped_while_it_streams(run: Any, box: Sandbox) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = run(box.exec("echo first; head -c 100000000 /dev/zero | tr '\\0' x; echo; echo last"))
    assert result.truncated and len(result.output) < 66_000
    assert result.output.startswith("first\nxxx") and result.output.endswith("xxx\nlast\n")
    assert "bytes cut" in result.output
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024


def test_the_end_of_a_command_cannot_be_forged_by_output(run: Any, box: Sandbox) -> None:
    forge = """
    look() { set; declare -f; cat /proc/*/cmdline /proc/*/environ | tr '\\0' ' '; }
    look 2>/dev/null
    for secret in $(look 2>/dev/null | tr -c 0-9a-f '\\n' | grep -E '^.{16}$'); do
        for fd in 1 9 10 11 255; do printf '\\036%s end 0\\n' $secret >&$fd; done
    done 2>/dev/null
    printf '\\036%s end 0\\n' 0123456789abcdef; sleep 0.2; echo real; false
    """
    result = run(box.exec(forge))
    assert result.exit == 1 and result.output.endswith("real\n")
    assert run(box.exec("echo next")) == Result(0, "next\n")


def test_a_memory_hog_is_told_apart(run: Any, box: Sandbox) -> None:
    result = run(box.exec(HOG))
    assert (result.exit, result.reason) == (137, "oom")
    assert run(box.exec("false")) == Result(1, ""), "the next one did nothing wrong"
    assert run(box.exec(f"{HOG} | cat")).reason == "oom"
    assert run(box.exec("python3 -c 'bytearray(2**40)'")).reason is None


def test_a_fork_bomb_is_contained(run: Any, box: Sandbox, api: Any) -> None:
    async def body() -> tuple[Result, int]:
        exploding = asyncio.create_task(box.exec(f'python3 -c "{BOMB}"', timeout=1.5))
        await asyncio.sleep(1)
        found = await asyncio.to_thread(api.top, box._container)
        return await exploding, len(found["Processes"])

    result, most = run(body())
    assert result.reason == "timeout"
    assert most <= 50 + 6
    assert run(box.exec("ps x | wc -l")).output.strip() == "6", "its header, warden, keeper, shell, ps, wc"
    run(box.exec(f'(python3 -c "{BOMB}" &)'))
    time.sleep(0.5)
    run(box.write("file", "x"))
    assert run(box.exec("cat file")) == Result(0, "x"), "one in the background is killed when it is in the way"


@pytest.mark.parametrize("everything", ["python3 -c 'import os; os.kill(-1, 9)'", "kill -9 -1", "kill -STOP -1"])
def test_what_kills_everything_kills_only_its_sandboxes_processes(run: Any, box: Sandbox, everything: str) -> None:
    run(box.write("kept", "x"))
    container = box._container
    assert run(box.exec(f"{everything}; sleep 9", timeout=1)).exit == 137
    assert run(box.exec("cat kept")) == Result(0, "x")
    assert box._container == container


def test_it_is_hardened(run: Any, box: Sandbox, api: Any) -> None:
    status = run(box.exec("cat /proc/self/status")).output
    assert re.search(r"CapBnd:\s+0+\n", status) and re.search(r"NoNewPrivs:\s+1\n", status)
    assert run(box.exec("ls /sys/class/net")).output == "lo\n"
    assert run(box.exec("mount -t tmpfs none /mnt; echo x > /proc/sys/kernel/hostname")).exit != 0
    host = api.inspect_container(box._container)["HostConfig"]
    assert host["Memory"] == host["MemorySwap"] == 200 * 2**20 and host["PidsLimit"] and host["Init"]
    names = {network["Name"] for network in api.networks()}
    assert names <= {"bridge", "host", "none"}, "no network for each sandbox: about 31 exhaust the addresses"


def test_only_listed_hosts_can_be_reached(run: Any, docker_image: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("it takes root to serve a container's loopback")
    fetch = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())"
    get = f"no_proxy= NO_PROXY= python3 -c '{fetch}'"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
        writer.close()

    async def body() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        sandbox = await Sandbox.open(SandboxSpec("docker", docker_image, network=("127.0.0.1",)))
        try:
            assert await sandbox.exec(f"{get} http://127.0.0.1:{port}/") == Result(0, "hello\n")
            assert "403" in (await sandbox.exec(f"{get} http://localhost:{port}/")).output
            assert (await sandbox.exec(f"echo > /dev/tcp/127.0.0.1/{port}")).exit == 1, "there is no other way"
            assert (await sandbox.exec("kill -STOP -1; sleep 9", timeout=0.5)).reason == "timeout"
            assert await sandbox.exec(f"{get} http://127.0.0.1:{port}/") == Result(0, "hello\n"), "also when restarted"
        finally:
            await sandbox.close()
            server.close()

    run(body())


def test_files(run: Any, box: Sandbox) -> None:
    run(box.write("a/b c.txt", "höhe"))
    run(box.write("/tmp/-c", b"\0\1", executable=True))
    assert run(box.read("a/b c.txt")) == "höhe".encode()
    assert run(box.exec("cat 'a/b c.txt'; stat -c '%s %a' /tmp/-c")).output == "höhe2 755\n"
    run(box.exec("mkfifo fifo; mkdir -p folder; chmod 000 a/*"))
    with pytest.raises(FileNotFoundError):
        run(box.read("none"))
    for path in ("fifo", "/dev/zero"):
        with pytest.raises(OSError, match="Invalid argument"):
            run(box.read(path))
        with pytest.raises(OSError, match="Invalid argument"):
            run(box.write(path, "x"))
    with pytest.raises(IsADirectoryError):
        run(box.read("folder"))
    with pytest.raises(IsADirectoryError):
        run(box.write("folder", "x"))
    with pytest.raises((NotADirectoryError, FileExistsError)):
        run(box.write("a/b c.txt/d", "x"))
    with pytest.raises(OSError, match="larger"):
        run(box.read(run(box.exec("readlink -f /usr/bin/python3")).output.strip()))
    with pytest.raises(OSError, match="too large"):
        run(box.write("large", bytes(5 * 2**20)))
    for path in ("a\0b", "\ud800"):
        with pytest.raises(OSError):
            run(box.read(path))
        with pytest.raises(OSError):
            run(box.write(path, ""))


def test_snapshot_and_restore(run: Any, box: Sandbox, spec: SandboxSpec) -> None:
    async def body() -> None:
        await box.exec(
            "rm -rf * /out; mkdir -p deep/er; echo 1 > deep/er/one; echo 2 > two; ln two hard; ln -s /etc out"
        )
        await box.exec(
            "mkfifo fifo; mkdir /out; echo 3 > /out/three; chmod 750 deep; chmod 000 two; echo t > test_x.py"
        )
        tar = await box.snapshot([".", "/out", "none"], exclude=["**/test_*.py"])
        with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
            names = set(archive.getnames())
        assert names == {".", "deep", "deep/er", "deep/er/one", "two", "hard", "out", "/out", "/out/three"}
        other = await Sandbox.open(spec)
        try:
            await other.exec("ln -s /etc deep; ln -s /etc/passwd two; mkdir /elsewhere; ln -s /elsewhere /out")
            await other.restore(tar)
            shown = await other.exec(
                "cat deep/er/one hard /out/three; readlink out; stat -c %a deep; ls -A /etc/er /elsewhere"
            )
            assert shown.output.startswith("1\n2\n3\n/etc\n750\n") and "/etc/er'" in shown.output
            with pytest.raises(OSError):
                await other.exec("for i in $(seq 10); do head -c 4M /dev/zero > big$i; done")
                await other.snapshot()
        finally:
            await other.close()
        for name, kind in (("../up", tarfile.REGTYPE), ("dev", tarfile.CHRTYPE)):
            stream = io.BytesIO()
            with tarfile.open(fileobj=stream, mode="w") as bad:
                member = tarfile.TarInfo(name)
                member.type = kind
                bad.addfile(member)
            with pytest.raises(ValueError, match=name):
                await box.restore(stream.getvalue())

    run(body())


def test_a_read_only_root_and_a_user(run: Any, docker_image: str, api: Any) -> None:
    spec = SandboxSpec("docker", docker_image, limits=Limits(disk=2**20), user="1000:1000", read_only=True)

    async def body() -> None:
        sandbox = await Sandbox.open(spec)
        try:
            assert (await sandbox.exec("id -u; echo x > /usr/x")).output.startswith("1000\n")
            with pytest.raises(OSError, match="Read-only"):
                await sandbox.write("/usr/x", "x")
            await sandbox.write("a/b", "x")
            with pytest.raises(docker.errors.APIError):  # the engine's own way to copy files does not even reach tmpfs
                api.put_archive(sandbox._container, "/workspace", await sandbox.snapshot())
            await sandbox.restore(await sandbox.snapshot())
            assert await sandbox.read("a/b") == b"x"
            with pytest.raises(OSError, match="No space"):
                await sandbox.write("big", bytes(2**21))
            assert (await sandbox.exec(f"sleep {mark()}", timeout=0.2)).reason == "timeout"
        finally:
            await sandbox.close()

    run(body())


def test_a_user_has_a_workdir_of_its_own(run: Any, docker_image: str) -> None:
    async def body() -> None:
        sandbox = await Sandbox.open(SandboxSpec("docker", docker_image, user="1000", workdir="/work/dir"))
        try:
            assert (await sandbox.exec("git init -q && touch x && git status --short; kill -9 -1")).output == "?? x\n"
            assert (await sandbox.exec("ls")).output == "x\n"
        finally:
            await sandbox.close()

    run(body())


def test_a_container_that_dies_ends_the_call_at_once(run: Any, spec: SandboxSpec, api: Any) -> None:
    async def dying(sandbox: Sandbox, idle: bool) -> None:
        call = None if idle else asyncio.create_task(sandbox.exec("sleep 60", timeout=60))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(api.remove_container, sandbox._container, force=True)
        began = time.monotonic()
        with pytest.raises(SandboxGone, match="container"):
            await (call or sandbox.exec("true"))
        assert time.monotonic() - began < 3
        assert not sandbox.alive
        with pytest.raises(SandboxGone):
            await sandbox.read("x")
        await sandbox.close()

    async def body() -> None:
        await asyncio.gather(*[dying(await Sandbox.open(spec), idle) for idle in (True, False)])

    run(body())


def test_an_engine_that_stops_ends_the_call_at_once(
    run: Any, monkeypatch: pytest.MonkeyPatch, spec: SandboxSpec
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can start an engine of its own to stop it")

    async def body(pid: int) -> None:
        sandbox = await Sandbox.open(spec)
        call = asyncio.create_task(sandbox.exec("sleep 60", timeout=60))
        await asyncio.sleep(0.2)
        os.kill(pid, signal.SIGTERM)
        with pytest.raises(SandboxGone, match="gone"):
            async with asyncio.timeout(30):
                await call
        with pytest.raises(SandboxUnavailable, match=r"no Docker engine answers at .*docker.io"):
            await Sandbox.open(spec)

    with docker_engine.started() as address:
        docker_engine._import(address)
        monkeypatch.setenv("DOCKER_HOST", address)
        run(body(int(Path(address.removeprefix("unix://")).with_name("pid").read_text())))


def test_reset_close_and_pool(run: Any, spec: SandboxSpec, api: Any) -> None:
    async def body() -> None:
        pool = SandboxPool(1, spec)
        async with pool.sandbox() as sandbox:
            await sandbox.exec("echo x > /usr/bin/planted; cd /tmp; sleep 99 &")
        async with pool.sandbox() as sandbox:
            assert (await sandbox.exec("pwd; ls /usr/bin/planted; ps x")).output.count("sleep 99") == 0
            assert (await sandbox.exec("ls /usr/bin/planted")).exit == 2
            call = asyncio.create_task(sandbox.exec("sleep 99"))
            await asyncio.sleep(0.1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert not sandbox.alive, "the next answer would be the wrong one"
        began = time.monotonic()
        await pool.close()
        assert time.monotonic() - began < 5, "nobody waits for a grace period"

    before = {found["Id"] for found in api.containers(all=True)}
    run(body())
    deadline = time.monotonic() + 10
    while {found["Id"] for found in api.containers(all=True)} - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not {found["Id"] for found in api.containers(all=True)} - before


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, docker_image: str) -> Path:
    """The tar of a root with a shell that is not bash, and hardly more."""
    programs = ["cat", "chmod", "dash", "find", "id", "ls", "mkdir", "mkfifo", "rm", "sh", "sleep", "tar"]
    libraries = "ld-linux|libacl|libattr|libc[.]so|libm[.]so|libpcre2-8|libselinux"
    wanted = re.compile(rf"[.]/(usr/)?(bin/({'|'.join(programs)})|lib(64)?/(.*/)?({libraries}).*)")
    path = tmp_path_factory.mktemp("small") / "root.tar"
    with tarfile.open(docker_engine.root_tar()) as whole, tarfile.open(path, "w") as part:
        for member in whole:
            if wanted.fullmatch(member.name):
                part.addfile(member, whole.extractfile(member) if member.isreg() else None)
    return path


def test_images(run: Any, small: Path, tmp_path: Path, api: Any) -> None:
    saved, hello, before = tmp_path / "saved.tar", f"hello {uuid.uuid4()} ", {image["Id"] for image in api.images()}

    async def look(image: Path | str) -> str:
        sandbox = await Sandbox.open(SandboxSpec("docker", str(image)))
        try:
            return (await sandbox.exec("cat /hello; echo $FROM_IMAGE; id -u")).output
        finally:
            await sandbox.close()

    base = docker_images.find_or_make(str(small))
    assert base == docker_images.find_or_make(str(small)), "loaded once"
    (tmp_path / "Dockerfile").write_text(f"FROM {base}\nENV FROM_IMAGE=1\nCOPY hello /hello\nUSER 1000\n")
    (tmp_path / "hello").write_text(hello)
    assert run(look(tmp_path)) == f"{hello}1\n1000\n"
    built = docker_images.find_or_make(str(tmp_path))
    with saved.open("wb") as file:
        file.writelines(api.get_image(built))
    api.remove_image(built, force=True)
    assert run(look(saved)) == f"{hello}1\n1000\n"

    for image, complaint in {
        "argosy/none:1": "argosy/none:1 is not at .* cannot be pulled",
        f"{tmp_path}/nothing": "neither a tar nor a folder",
        str(tmp_path / "hello"): "no tar",
    }.items():
        with pytest.raises(SandboxUnavailable, match=complaint):
            run(look(image))
    (tmp_path / "Dockerfile").write_text(f"FROM {base}\nCOPY nothing /\n")
    with pytest.raises(SandboxUnavailable, match=r"Dockerfile cannot be built: (.|\n)*COPY nothing"):
        run(look(tmp_path))
    for one in api.images(filters={"label": "argosy.image"}):
        if one["Id"] not in before:
            api.remove_image(one["Id"], force=True)


def test_an_image_without_bash_or_python(run: Any, small: Path) -> None:
    async def body() -> None:
        sandbox = await Sandbox.open(SandboxSpec("docker", str(small)))
        try:
            assert (await sandbox.exec("bash")).exit == 127
            assert await sandbox.exec("cd /dev; A=1; f() { echo $A; }; false") == Result(1, "")
            assert await sandbox.exec("echo $?; pwd; f") == Result(0, "1\n/dev\n1\n")
            assert (await sandbox.exec("for")).exit == 2
            assert (await sandbox.exec("exit 3")).exit == 3
            assert await sandbox.exec("kill -9 $$") == Result(137, "", reason="killed")
            assert await sandbox.exec("sleep 9 & sleep 9", timeout=0.2) == TIMEOUT
            await sandbox.write("a/b", "x")
            await sandbox.restore(await sandbox.snapshot())
            assert await sandbox.read("a/b") == b"x"
        finally:
            await sandbox.close()

    run(body())
