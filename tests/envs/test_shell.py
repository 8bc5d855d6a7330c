"""The persistent shell of a bubblewrap sandbox: what carries over, what ends it, and what cannot be forged."""

import time
from typing import Any

import pytest
from argosy.envs import Limits, Result, Sandbox, SandboxSpec


def script(run: Any, sandbox: Sandbox, commands: list[tuple[str, int, str]]) -> None:
    """Each command in turn, with the exit status and the output that it must have."""

    async def body() -> None:
        for command, code, output in commands:
            result = await sandbox.exec(command, timeout=20)
            assert (result.exit, result.output, result.reason) == (code, output, None), command

    run(body())


def test_what_one_command_sets_the_next_finds(run: Any, sandbox: Sandbox) -> None:
    commands = [
        ("mkdir -p a/b; cd a/b; export X='1 2'; Y=3; f() { echo f $1; }; set -- p q", 0, ""),
        ('pwd; echo "$X" $Y $@; f 4; sh -c \'echo "$X" $Y\'', 0, "/workspace/a/b\n1 2 3 p q\nf 4\n1 2\n"),
        ("declare -A map=([k]=v); shopt -s extglob; umask 077", 0, ""),
        ("echo ${map[k]}; umask; touch x; ls", 0, "v\n0077\nx\n"),
        ("cd /nowhere", 1, "bash: line 1: cd: /nowhere: No such file or directory\n"),
        ("exec 7>&1 2>/dev/null; ls /nowhere; (exit 9)", 9, ""),
        ("pwd; ls /nowhere || echo quiet >&7", 0, "/workspace/a/b\nquiet\n"),
        ("sleep 99 & disown; sleep 0.01 & wait $!", 0, ""),
        ("read line; cat; echo $?-$line", 0, "0-\n"),
    ]
    script(run, sandbox, commands)
    run(sandbox.reset())
    script(run, sandbox, [("pwd; echo $X $Y; f", 127, "/workspace\n\nbash: line 1: f: command not found\n")])


def test_whatever_the_syntax_the_shell_goes_on(run: Any, sandbox: Sandbox) -> None:
    eof = "unexpected EOF while looking for matching"
    commands = [
        ("kept=yes", 0, ""),
        ("echo 'half", 2, f"bash: eval: line 1: {eof} `''\n"),
        ('\n\necho "half', 2, f"bash: eval: line 3: {eof} `\"'\n"),
        ("for x in 1", 2, "bash: eval: line 2: syntax error: unexpected end of file\n"),
        (")", 2, "bash: eval: line 1: syntax error near unexpected token `)'\nbash: eval: line 1: `)'\n"),
        ("cat <<E\n$kept\nE\ncat <<'E'\n$kept\nE", 0, "yes\n$kept\n"),
        (
            "cat <<E\nopen",
            0,
            "bash: line 2: warning: here-document at line 1 delimited by end-of-file (wanted `E')\nopen\n",
        ),
        ("\n\nnothing", 127, "bash: line 3: nothing: command not found\n"),
        ("break", 0, ""),
        ("continue; echo not reached", 0, ""),
        ("return 3", 2, "bash: line 1: return: can only `return' from a function or sourced script\n"),
        ("echo $((1/0))", 1, 'bash: line 1: 1/0: division by 0 (error token is "0")\n'),
        ("trap 'echo trapped' EXIT USR1; kill -USR1 $$", 0, "trapped\n"),
        ("printf '%s' 'no newline'", 0, "no newline"),
        ("echo \\", 0, "\\\n"),
        ("# only a comment", 0, ""),
        ("", 0, ""),
        ("echo 'a\r\nb' | od -c | head -1; echo $kept", 0, "0000000   a  \\r  \\n   b  \\n\nyes\n"),
        ("echo " + "x" * 300_000 + " | wc -c", 0, "300001\n"),
        ("printf() { echo mine; }; read() { echo mine; }; eval() { echo mine; }", 0, ""),
        ("printf x; read; eval x; unset -f printf read eval", 0, "mine\nmine\nmine\n"),
        ("exit 4", 4, "trapped\n"),
        ("echo $kept.", 0, ".\n"),
    ]
    script(run, sandbox, commands)


def test_a_command_may_end_the_shell_and_the_next_gets_another(run: Any, sandbox: Sandbox) -> None:
    commands = [
        ("x=1; exit 3", 3, ""),
        ("echo $x; cd /tmp; set -e; false; echo not reached", 1, "\n"),
        ("pwd; exec sh -c 'echo new; exit 5'", 5, "/workspace\nnew\n"),
        ("set -eu; echo $unset", 1, "bash: line 1: unset: unbound variable\n"),
        ("break 9; echo no", 0, ""),
        ("false; echo $-", 0, "hBc\n"),
    ]
    script(run, sandbox, commands)
    assert run(sandbox.exec("kill -9 $$")) == Result(137, "", reason="killed")
    assert run(sandbox.exec("kill -SEGV $$")) == Result(139, "", reason="killed")
    assert run(sandbox.exec("sh -c 'kill -9 $$'; echo $?")).output.endswith("137\n")
    began = time.monotonic()
    assert run(sandbox.exec("x=1; set -n; echo", timeout=0.5)).exit in (0, 137), "a shell that reads but does not obey"
    assert run(sandbox.exec("exec sleep 60", timeout=0.5)).reason == "timeout"
    assert run(sandbox.exec("echo $x back")).output == "back\n" and time.monotonic() - began < 10


def test_a_fresh_shell_knows_nothing_of_the_old(run: Any, sandbox: Sandbox) -> None:
    poison = "exit() { :; }; kill() { :; }; printf() { :; }; test() { return 0; }; trap 'echo no' EXIT"
    run(sandbox.exec(poison + "; (while sleep 0.1; do echo noise; done) & sleep 99 & PATH=/tmp; cd /tmp"))
    assert run(sandbox.exec("pwd; test a = b; echo $?; sleep 0.4", fresh=True)) == Result(0, "/workspace\n1\n")
    assert "sleep" in run(sandbox.exec("cat /proc/[0-9]*/comm")).output, "what runs in the background goes on"


FORGERY = """
import glob, os
for fd in range(3, 300):
    try: os.write(fd, b"0 x\\n"); print("wrote to", fd)
    except OSError: pass
for path in [*glob.glob("/proc/[0-9]*/fd/*"), *(f"/proc/{os.getppid()}/fd/{n}" for n in range(300))]:
    if not path.startswith(f"/proc/{os.getpid()}/"):
        try: os.write(os.open(path, os.O_WRONLY), b"0 x\\n"); print("wrote to", path)
        except OSError: pass
for pid in (os.getppid(), 1):
    try: open(f"/proc/{pid}/mem", "r+b"); print("opened the memory of", pid)
    except OSError: pass
print("0 0123456789abcdef", flush=True)
raise SystemExit(7)
"""


def test_the_end_of_a_command_cannot_be_forged(run: Any, sandbox: Sandbox) -> None:
    run(sandbox.write("forge.py", FORGERY))
    assert run(sandbox.exec("python3 forge.py")) == Result(7, "0 0123456789abcdef\n")
    assert run(sandbox.exec("echo own")) == Result(0, "own\n")
    in_shell = "for fd in {3..300}; do echo 0 x >&$fd; done 2>/dev/null; sleep 0.3; echo late; false"
    result = run(sandbox.exec(in_shell))
    assert result.exit == 1 and result.output.endswith("late\n"), "nor by the shell's own code"
    assert run(sandbox.exec("echo own")) == Result(0, "own\n")


def test_a_deadline_leaves_nothing_and_says_so(run: Any, sandbox: Sandbox) -> None:
    double = "python3 -c 'import os, time; os.fork() or (os.setsid(), os.fork() or time.sleep(99))'"
    began = time.monotonic()
    result = run(sandbox.exec(f"x=1; nohup sleep 99 & setsid sleep 99 & {double}; echo on; sleep 99", timeout=1.0))
    assert (result.exit, result.reason) == (137, "timeout") and "on\n" in result.output
    assert run(sandbox.exec("echo $x /proc/[0-9]*")).output.count("/proc/") == 2, "the guest and the new shell"
    assert time.monotonic() - began < 8


def test_output_is_capped_while_it_streams_and_cut_where_it_was_cut(run: Any) -> None:
    async def body() -> None:
        sandbox = await Sandbox.open(SandboxSpec(limits=Limits(output=1000)))
        endless = await sandbox.exec("echo first; yes", timeout=0.5)
        assert endless.reason == "timeout" and endless.truncated
        assert endless.output.startswith("first\ny\n") and " bytes cut] ...\n" in endless.output
        assert len(endless.output) < 1100
        assert await sandbox.exec("echo after") == Result(0, "after\n")
        await sandbox.close()

    run(body())


def test_the_background_neither_blocks_nor_dies_of_its_output(run: Any, sandbox: Sandbox) -> None:
    run(
        sandbox.exec("(for i in {1..40}; do head -c 9999 /dev/zero; sleep 0.005; done; echo done > finished) & cd /tmp")
    )
    run(sandbox.exec("exit 1"))
    for _ in range(200):
        if run(sandbox.exec("cat /workspace/finished; sleep 0.05")).output.startswith("done"):
            break
    else:
        pytest.fail("it was blocked or killed")


def test_variables_of_the_spec(run: Any) -> None:
    async def body() -> None:
        spec = SandboxSpec(workdir="/app/src", environment=(("TOKEN", "a b"), ("HOME", "/app")))
        sandbox = await Sandbox.open(spec)
        assert (await sandbox.exec("pwd; echo $TOKEN $HOME; cd; pwd")).output == "/app/src\na b /app\n/app\n"
        await sandbox.write("x", "in the workdir")
        assert await sandbox.read("/app/src/x") == b"in the workdir"
        await sandbox.reset()
        assert (await sandbox.exec("ls -A; pwd")).output == "/app/src\n"
        await sandbox.close()
        for wrong in ("relative", "/a/../b", "/", "/usr/src", "/etc"):
            with pytest.raises(ValueError, match="workdir"):
                await Sandbox.open(SandboxSpec(workdir=wrong))

    run(body())
