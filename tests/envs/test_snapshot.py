"""Tars of sandboxes: what is taken, what comes back, and what an agent cannot make of it."""

import io
import tarfile
from collections.abc import Callable
from typing import Any

import pytest
from argosy.envs import Limits, Sandbox, SandboxSpec
from argosy.envs.sandboxes.archive import sift

LISTING = "find . /out -printf '%P %y %m %l %T@\\n' | sed 's/\\..*//' | sort; cat a/b/c d/secret /out/x"
MESS = """
mkdir -p a/b d tests empty /out; echo c > a/b/c; touch -d @5 a/b/c; chmod 600 a/b/c; ln a/b/c hard; chmod 751 a
ln -s /etc link; ln -s a folder; ln -s nowhere dangling; echo x > /out/x; touch 'a/ b\n\\'$'\\377'
echo s > d/secret; chmod 0 d/secret d; echo t > tests/conftest.py; echo t > a/conftest.py; chmod +x a/conftest.py
"""


def members(tar: bytes) -> list[tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        return archive.getmembers()


def names(tar: bytes) -> list[str]:
    return [member.name for member in members(tar)]


def tar_of(*members: tarfile.TarInfo, content: bytes = b"") -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as tar:
        for member in members:
            member.size = len(content) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(content))
    return output.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, to: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, to
    return made


def test_a_snapshot_comes_back_as_it_was_here_or_elsewhere(run: Any, sandbox: Sandbox) -> None:
    async def body() -> None:
        await sandbox.exec(MESS)
        listing = await sandbox.exec(f"chmod 700 d d/secret; {LISTING}; chmod 0 d/secret d")
        tar = await sandbox.snapshot([".", "/out"])
        await sandbox.exec("mkfifo a/fifo; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"s\")'")
        assert names(await sandbox.snapshot([".", "/out"])) == names(tar), "fifos and sockets are left out"
        other = await Sandbox.open()
        await other.exec(
            "mkdir -p link/full; touch link/full/x; ln -s /tmp a; echo > empty; ln -s /tmp /out; chmod 0 ."
        )
        await other.restore(tar)
        assert (await other.exec("ls d")).exit != 0, "modes are those of the snapshot"
        assert await other.exec(f"cd /workspace; chmod 700 d d/secret; {LISTING}; chmod 0 d/secret d") == listing
        assert listing.output.count("\n") > 15 and (await other.exec("ls -A /tmp")).output == "", "no link was followed"
        await other.close()

    run(body())


def test_what_is_taken(run: Any, sandbox: Sandbox) -> None:
    run(sandbox.exec(MESS + "rm a/' b'*; mkdir -p /usr-like; mkdir -p tests/deep; touch tests/deep/x.pyc b.pyc"))
    take: Callable[..., list[str]] = lambda *arguments: names(run(sandbox.snapshot(*arguments)))  # noqa: E731
    assert take(["tests", "/workspace/a/b/c", "nowhere", "/etc/passwd", "/proc/1", "folder/b", "/dev/shm"]) == [
        *("tests", "tests/conftest.py", "tests/deep", "tests/deep/x.pyc", "a/b/c")
    ]
    assert take(["link", "dangling", "/out/x"]) == ["link", "dangling", "/out/x"]
    assert "tests" not in take(None, ["tests"]) and take(["tests"], ["tests/**"]) == ["tests"]
    everything, without = take(), take(None, ["**/conftest.py", "*.pyc", "a/?", "[dl]i*", "d"])
    assert set(everything) - set(without) == {
        *("a/conftest.py", "tests/conftest.py", "b.pyc", "a/b", "a/b/c", "link", "d", "d/secret")
    }
    assert "/usr/bin" not in take(["/"]) and "/out/x" in take(["/"])


def test_snapshots_are_bounded(run: Any) -> None:
    async def body() -> None:
        sandbox = await Sandbox.open(SandboxSpec(limits=Limits(disk=4 * 2**20)))
        await sandbox.exec("for i in {1..9}; do truncate -s 1M sparse$i; done")
        with pytest.raises(OSError, match="come to more than 4194304 bytes"):
            await sandbox.snapshot()
        assert (await sandbox.exec("rm sparse*; mkdir -p $(printf 'd/%.0s' {1..1500}); ls")).output == "d\n"
        with pytest.raises(OSError):
            await sandbox.snapshot()
        assert (await sandbox.exec("echo lives")).output == "lives\n"
        with pytest.raises(ValueError, match="larger than allowed"):
            await sandbox.restore(tar_of(*map(member, "abcde"), content=b"x" * 2**20))
        await sandbox.close()

    run(body())


@pytest.mark.parametrize(
    "trap, complaint",
    [
        ([member("../x")], "leads out of its folder"),
        ([member("a/../../x")], "leads out of its folder"),
        ([member("pipe", tarfile.FIFOTYPE)], "neither a file, a folder nor a link"),
        ([member("null", tarfile.CHRTYPE)], "neither a file, a folder nor a link"),
        ([member("hard", tarfile.LNKTYPE, "/etc/passwd")], "is a hard link to '/etc/passwd'"),
    ],
)
def test_traps_are_refused_and_nothing_is_written(run: Any, sandbox: Sandbox, trap: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        run(sandbox.restore(tar_of(member("good"), *trap)))
    assert run(sandbox.exec("ls -A")).output == ""
    with pytest.raises(ValueError, match="not a tar"):
        run(sandbox.restore(b"nonsense" * 100))


def test_links_in_a_tar_lead_nowhere(run: Any, sandbox: Sandbox) -> None:
    links = [member("out", tarfile.SYMTYPE, "/tmp"), member("out/x"), member("same", tarfile.SYMTYPE, "/tmp/y")]
    run(sandbox.restore(tar_of(*links, member("same"), content=b"content")))
    assert run(sandbox.exec("ls /tmp; find . -type l; cat out/x same")).output == "contentcontent"
    copied = sift(tar_of(member("a"), member("b", tarfile.LNKTYPE, "a"), content=b"12"), 100)
    assert [m.isreg() and m.size for m in members(copied)] == [2, 2]
    assert names(sift(tar_of(member("p", tarfile.FIFOTYPE), member("a")), 100, drop=True)) == ["a"]
    with pytest.raises(OSError, match="Read-only"):
        run(sandbox.restore(tar_of(member("/etc/x"))))
    with pytest.raises(OSError):
        run(sandbox.restore(tar_of(member("/.sandbox"))))
