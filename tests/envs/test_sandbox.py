"""What code of others can do in a sandbox, and what it cannot: on real bubblewrap."""

import asyncio
import os
import resource
import signal
import socket
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from argosy.envs import Limits, Outcome, Result, Sandbox, SandboxGone, SandboxSpec
from argosy.envs.sandboxes import seccomp

TIMEOUT = Result(137, "", reason="timeout")


def test_exec_tells_how_a_command_ended(run: Any, sandbox: Sandbox) -> None:
    assert run(sandbox.exec("echo out; echo err >&2; exit 3")) == Result(3, "out\nerr\n")
    assert run(sandbox.exec("kill -9 $$")) == Result(137, "", reason="killed")
    assert run(sandbox.exec("cat; pwd; id -u")).output == f"/workspace\n{os.geteuid() or 65534}\n", "stdin is empty"
    assert run(sandbox.exec("printf '\\377\\n'")).output == "\ufffd\n"


def test_files(run: Any, sandbox: Sandbox) -> None:
    run(sandbox.write("a/b.txt", "höhe"))
    run(sandbox.write("/tmp/c", b"\0\1"))
    assert run(sandbox.read("a/b.txt")) == "höhe".encode()
    assert run(sandbox.exec("cat a/b.txt; stat -c %s /tmp/c")).output == "höhe2\n"
    run(sandbox.exec("mkfifo fifo; mkdir folder"))
    with pytest.raises(FileNotFoundError):
        run(sandbox.read("none"))
    with pytest.raises(OSError, match="regular"):
        run(sandbox.read("fifo"))
    with pytest.raises(IsADirectoryError):
        run(sandbox.write("folder", "x"))
    with pytest.raises(OSError, match="Read-only"):
        run(sandbox.write("/usr/lib/x", "x"))
    for path in ("a\0b", "\ud800"):
        with pytest.raises(OSError):
            run(sandbox.read(path))
        with pytest.raises(OSError):
            run(sandbox.write(path, ""))
    run(sandbox.write("half", "\ud800"))
    assert run(sandbox.exec("cat half; echo '\ud800'")).output == "??\n"
    assert "null byte" in run(sandbox.exec("echo \0")).output


def test_the_deadline_kills_what_left_its_session(run: Any, sandbox: Sandbox, processes_with: Any) -> None:
    mark = f"{300 + uuid.uuid4().int % 10**9 / 1e9:.9f}"
    began = time.monotonic()
    result = run(sandbox.exec(f"(setsid sh -c 'sleep {mark} & sleep {mark}' &) ; sleep {mark}", timeout=0.5))
    assert result == TIMEOUT and time.monotonic() - began < 5
    assert processes_with(mark) == []
    assert run(sandbox.exec("echo alive")).output == "alive\n"


def test_a_background_child_that_holds_stdout_delays_nothing(run: Any, sandbox: Sandbox) -> None:
    began = time.monotonic()
    assert run(sandbox.exec("sleep 60 & (yes > /dev/null) & echo started", timeout=30)) == Result(0, "started\n")
    assert time.monotonic() - began < 5
    assert "sleep" in run(sandbox.exec("cat /proc/[0-9]*/comm")).output, "and it lives on"


def test_a_fork_bomb_is_contained(run: Any, sandbox: Sandbox) -> None:
    bomb = "import os, time\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(0.01)"

    async def body() -> tuple[Result, int]:
        exploding = asyncio.create_task(sandbox.exec(f'python3 -c "{bomb}"', timeout=1.5))
        await asyncio.sleep(1)
        most = sum(1 for _ in descendants(sandbox._process.pid))
        return await exploding, most

    result, most = run(body())
    assert result.reason == "timeout"
    assert most <= Limits().processes + 2, "and bubblewrap and the guest"
    assert run(sandbox.exec("echo /proc/[0-9]*")).output.count("/proc/") <= 2


def descendants(pid: int) -> Any:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield child
        try:
            yield from descendants(int(child))
        except FileNotFoundError:
            continue


def test_many_short_lived_orphans_do_not_use_up_the_process_limit(run: Any, sandbox: Sandbox) -> None:
    command = "for i in $(seq 200); do (true &); [ $((i % 20)) = 0 ] && sleep 0.1; done; echo done"
    assert run(sandbox.exec(command)).output == "done\n"


def test_a_memory_hog_is_told_apart(run: Any) -> None:
    hog = "x = []\nwhile True: x.append(bytearray(2**20))"

    async def body() -> None:
        sandbox = await Sandbox.open(SandboxSpec(limits=Limits(memory=100 * 2**20)))
        assert (await sandbox.exec(f'python3 -c "{hog}"')).reason == "oom"
        assert (await sandbox.exec(f'python3 -c "{hog}" & python3 -c "{hog}" & wait')).reason == "oom"
        refused = await sandbox.exec("python3 -c 'bytearray(2**40)'")
        assert refused.reason is None and refused.exit == 1 and "MemoryError" in refused.output
        sharing = "import os, time\nx = b'1' * 60_000_000\nos.fork() and os.fork()\ntime.sleep(0.3)"
        assert (await sandbox.exec(f'python3 -c "{sharing}"')) == Result(0, ""), "shared pages count once"
        outcomes = await sandbox.run_python(
            f"def f(x):\n    {hog.splitlines()[0]}\n    while True: x.append(' ' * 9999)", "f", [[1]]
        )
        assert outcomes == [Outcome(error="OutOfMemory: too much memory was used")]
        await sandbox.close()

    run(body())


def test_memory_is_watched_between_calls_too(run: Any) -> None:
    async def body() -> None:
        sandbox = await Sandbox.open(SandboxSpec(limits=Limits(memory=50 * 2**20)))
        hog = "x = []\nwhile True: x.append(bytearray(2**20))"
        assert await sandbox.exec(f"(sleep 0.3; exec python3 -c '{hog}') &") == Result(0, "")
        for _ in range(200):
            await asyncio.sleep(0.05)
            if not list(descendants(int(next(descendants(sandbox._process.pid))))):
                break
        else:
            pytest.fail("the hog lives on")
        assert await sandbox.exec("echo alive") == Result(0, "alive\n")
        await sandbox.close()

    run(body())


def test_other_limits(run: Any) -> None:
    async def body() -> None:
        sandbox = await Sandbox.open(SandboxSpec(limits=Limits(file_size=2**20, disk=4 * 2**20)))
        assert (await sandbox.exec("head -c 2000000 /dev/zero > big")).reason is None
        assert (await sandbox.exec("stat -c %s big")).output == "1048576\n"
        for folder in (".", "/tmp", "/dev/shm"):
            filled = await sandbox.exec(f"for i in 1 2 3 4 5 6; do head -c 1000000 /dev/zero > {folder}/$i; done")
            assert "No space left" in filled.output
        with pytest.raises(OSError, match="larger than"):
            await sandbox.exec("ln -s /dev/../usr/bin/python3 link")
            await sandbox.read("link")
        await sandbox.close()

    run(body())


def test_much_output_is_capped_and_not_held(run: Any, sandbox: Sandbox) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = run(sandbox.exec("echo first; head -c 200000000 /dev/zero | tr '\\0' x; echo; echo last", timeout=60))
    assert result.exit == 0 and result.truncated
    assert result.output.startswith("first\nxxx") and result.output.endswith("xxx\nlast\n")
    assert "bytes cut] ..." in result.output and len(result.output) < Limits().output + 100
    guest = Path(f"/proc/{next(descendants(sandbox._process.pid))}/status").read_text()
    peak = int(guest.split("VmHWM:")[1].split()[0])
    assert peak < 40_000, "the guest held it (KiB)"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000, "we held it (KiB)"


def test_the_network_is_off(run: Any, sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert run(sandbox.exec(f"exec 3<>/dev/tcp/127.0.0.1/{port}")).exit != 0
    assert "unreachable" in run(sandbox.exec("exec 3<>/dev/tcp/192.0.2.1/80")).output


def test_the_host_is_neither_visible_nor_writable(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes_with: Any
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    monkeypatch.setenv("ARGOSY_SECRET", "s3cret")

    async def body() -> None:
        sandbox = await Sandbox.open()
        look = (
            f"cat {secret}; ls /root /home /work {tmp_path}; env; cat /proc/1/environ /proc/*/cmdline; cat /etc/shadow"
        )
        assert "s3cret" not in (await sandbox.exec(look)).output
        assert (await sandbox.exec("ls /")).output.split() == sorted(
            {
                "bin",
                "dev",
                "etc",
                "home",
                "lib",
                "lib64",
                "proc",
                "root",
                "run",
                "sbin",
                "tmp",
                "usr",
                "var",
                "workspace",
            }
            | {name for name in ("lib32", "libx32") if Path("/", name).exists()}
        )
        for path in ("/usr", "/usr/bin", "/bin", "/etc", "/.sandbox", "/dev", "/proc", "/proc/sys/kernel"):
            assert (await sandbox.exec(f"touch {path}/x")).exit != 0, path
        assert (await sandbox.exec("unshare --user true")).exit != 0
        assert "CapEff:\t0000000000000000" in (await sandbox.exec("cat /proc/self/status")).output
        await sandbox.close()

    run(body())


def test_reset_leaves_nothing_behind(run: Any, sandbox: Sandbox) -> None:
    run(sandbox.exec("mkdir -p a/b; echo x > a/b/c; chmod 0 a/b a; ln -s /usr d; touch /tmp/.e /dev/shm/f"))
    run(sandbox.exec("chmod 0 .; sleep 99 & true"))
    run(sandbox.reset())
    left = "find /workspace /tmp /dev/shm -mindepth 1; stat -c %a . /tmp; ls /usr | head -1; echo /proc/[0-9]*/comm"
    assert run(sandbox.exec(left)).output.startswith("755\n1777\nbin\n/proc/1/comm ")
    assert "sleep" not in run(sandbox.exec("cat /proc/[0-9]*/comm")).output


def test_any_place_may_be_written_and_reset_cleans_it(run: Any, sandbox: Sandbox) -> None:
    def listing() -> str:
        attributes = "python3 -c 'import os; print(os.listxattr(chr(47)))'"
        found = "find / -xdev -printf '%p %y %m %l\\n' | grep -v /.sandbox"
        return run(sandbox.exec(f"{found}; {attributes}")).output

    before = listing()
    for path in ("/app/x", "/tests/test.sh", "/solution/solve.sh", "/logs/verifier/reward.txt", "/root/.x", "/opt/a/b"):
        run(sandbox.write(path, "echo $0", executable=True))
        assert run(sandbox.exec(path)) == Result(0, f"{path}\n")
    run(sandbox.exec("mv /home /gone; rm -rf /var; ln -s /usr /var; mkdir -p /a/b; chmod 0 /a/b /a; chmod 777 /"))
    run(sandbox.exec("mv /root /tmp; ln -s /etc /root; mkfifo /run/f; rm -rf /workspace; touch /dev/shm/x"))
    run(sandbox.exec("python3 -c 'import os; os.setxattr(chr(47), \"user.x\", bytes(9))'"))
    assert run(sandbox.exec("mv /etc /e; mv /usr /u; mv /.sandbox /s; rm -rf /bin; rm /lib64; echo > /etc/passwd")).exit
    run(sandbox.reset())
    assert listing() == before
    assert (
        run(sandbox.exec("rm -rf --one-file-system --no-preserve-root / 2>/dev/null; /bin/echo still here")).output
        == "still here\n"
    )
    run(sandbox.reset())
    assert listing() == before


def test_git_and_python_find_what_they_need(run: Any, sandbox: Sandbox) -> None:
    commands = "git init -q; touch a; git add a; git commit -qm first; git log --format='%an %ae %s'; git status -s"
    assert run(sandbox.exec(commands)) == Result(0, "agent agent@sandbox first\n")
    python = "import getpass, os, pathlib, socket, ssl, tempfile; print(getpass.getuser(), pathlib.Path.home(), "
    python += "socket.gethostname(), socket.gethostbyname('localhost'), tempfile.gettempdir(), os.access('/etc', 2))"
    assert run(sandbox.exec(f'python3 -c "{python}"')).output == "agent /root sandbox 127.0.0.1 /tmp False\n"
    assert run(sandbox.exec("id -un; echo ~ ~agent; whoami")).output == "agent\n/root /root\nagent\n"


WAYS_OUT = """
import ctypes, errno, platform, socket
libc = ctypes.CDLL(None, use_errno=True)
for family in ("AF_VSOCK", "AF_ALG", "AF_BLUETOOTH", "AF_PACKET"):
    try: socket.socket(getattr(socket, family), socket.SOCK_STREAM); print(family)
    except OSError as error: assert error.errno == errno.EAFNOSUPPORT, error
add_key, keyctl = (248, 250) if platform.machine() == "x86_64" else (217, 219)
for call in (add_key, keyctl, 425, 0x40000000 + 41):
    if libc.syscall(call, 0, 0, 0) != -1 or ctypes.get_errno() != errno.ENOSYS: print(call)
for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6): socket.socket(family).close()
"""


@pytest.mark.skipif(seccomp.program() is None, reason="no filter for this machine's architecture")
def test_calls_that_no_namespace_contains_are_closed(run: Any, sandbox: Sandbox) -> None:
    run(sandbox.write("out.py", WAYS_OUT))
    assert run(sandbox.exec("python3 out.py")) == Result(0, "")


@pytest.mark.parametrize("moment", ["idle", "busy"])
def test_a_sandbox_that_is_gone_is_told_at_once(run: Any, sandbox: Any, moment: str) -> None:
    async def body() -> float:
        await sandbox.exec("true")
        call = asyncio.create_task(sandbox.exec("sleep 60", timeout=60)) if moment == "busy" else None
        await asyncio.sleep(0.2)
        os.kill(sandbox._process.pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(SandboxGone):
            await call if call else [await sandbox.exec("true") for _ in range(10**6)]  # it takes a moment to die
        assert not sandbox.alive
        with pytest.raises(SandboxGone):
            await sandbox.read("x")
        return time.monotonic() - began

    assert run(body()) < 1


def test_processors_are_limited(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> Result:
        sandbox = await Sandbox.open(SandboxSpec(limits=Limits(cpus=0.25)))
        spin = "import time; a = time.monotonic()\nwhile time.monotonic() - a < 1: pass\nprint(time.process_time())"
        await sandbox.write("spin.py", spin)
        result = await sandbox.exec("python3 spin.py & python3 spin.py & wait; nproc")
        await sandbox.close()
        return result

    first, second, processors = run(body()).output.split()
    if os.geteuid() == 0 and not caplog.messages:
        assert float(first) + float(second) < 0.5
    else:
        assert "cpus" in caplog.text
    assert processors == "1"


@pytest.mark.parametrize(
    "harm",
    [
        "import resource; resource.prlimit(1, resource.RLIMIT_FSIZE, (0, 0))",
        "import os; os.setpriority(os.PRIO_PROCESS, 1, 19)",
        "import ctypes; ctypes.CDLL(None).shmget(4711, 4096, 0o1666)",
        "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')",
    ],
)
def test_what_reset_cannot_undo_ends_the_sandbox(run: Any, sandbox: Sandbox, harm: str) -> None:
    run(sandbox.run_python(harm, "f", []))
    with pytest.raises(SandboxGone, match="could not be made clean"):
        run(sandbox.reset())
    assert not sandbox.alive
    with pytest.raises(SandboxGone, match="closed"):
        run(sandbox.exec("true"))


def test_a_cancelled_call_ends_the_sandbox(run: Any, sandbox: Sandbox, eventually: Any, processes_with: Any) -> None:
    mark = f"{300 + uuid.uuid4().int % 10**9 / 1e9:.9f}"
    with pytest.raises(TimeoutError):
        run(asyncio.wait_for(sandbox.exec(f"sleep {mark}"), 0.2))
    assert not sandbox.alive
    eventually(lambda: not processes_with(mark))


def test_concurrent_callers_get_their_own_answers(run: Any, sandbox: Sandbox) -> None:
    async def body() -> list[Result]:
        return await asyncio.gather(*(sandbox.exec(f"echo {i}") for i in range(20)))

    assert [r.output for r in run(body())] == [f"{i}\n" for i in range(20)]
