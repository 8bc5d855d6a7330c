"""The shell that lives as long as its sandbox: what one command sets, the next finds.

Invariant: the end of a command is either told by the shell itself, over a socket that its commands do not hold and with
a number that they could not know, or it is the shell's death. Output cannot imitate it. The shell is run from a file
that nobody may read, so the kernel lets no other process look into it or reach its descriptors.
"""

# ruff: noqa: SIM105

import _socket  # the half of `socket` that is enough here; the other takes 4 ms
import os
import signal

from .processes import abandon, spawn, supervise

SHELL = "/.sandbox/bash"
_TALK, _TEXT = 250, 251  # its descriptors; high, so that nobody takes them by accident

# Waits for a line, evaluates the text up to a NUL, and answers with the status and what follows in the text, which
# nobody read before. The inner loop keeps `break` and `continue` from ending the outer one. It is one line, so that
# messages name the command's. If anything fails here, the shell ends, which is an answer too.
_DRIVER = (
    f"while builtin read -r -u {_TALK} && IFS= builtin read -r -d '' -u {_TEXT}; do "
    f'for REPLY in "$REPLY"; do builtin eval "$REPLY"; done {_TALK}>&- {_TEXT}<&-; '
    f"{{ _status=$?; IFS= builtin read -r -d '' -u {_TEXT} && "
    f'builtin printf \'%s %s\\n\' "$_status" "$REPLY" >&{_TALK}; }} 2>/dev/null || exit; done'
)


class Shell:
    def __init__(self, limits, folder, environment):
        self._limits, self._folder, self._environment = limits, folder, environment
        self.pid: int | None = None
        self.output: int | None = None

    def run(self, command, seconds, sink):
        """Its exit status as a shell tells it, and why it ended if not by itself."""
        if b"\0" in command:
            sink(b"bash: the command contains a null byte\n")
            return 2, None
        if not self._lives():
            self._start()
        token = os.urandom(8).hex().encode()
        os.ftruncate(self._writing, 0)
        os.pwrite(self._writing, command + b"\0" + token + b"\0", 0)
        os.lseek(self._text, 0, os.SEEK_SET)  # where the shell reads on: it shares this descriptor
        try:
            os.write(self._talk, b"\n")
        except BrokenPipeError:
            pass  # it was killed just now, as `supervise` will tell
        answer = bytearray()

        def reported(chunk):
            """Lines with an older token are of commands that pretended to be over."""
            answer.extend(chunk)
            while b"\n" in answer and not answer.partition(b"\n")[0].endswith(token):
                del answer[: answer.index(b"\n") + 1]
            return b"\n" in answer

        status, reason = supervise(
            self.pid, self._ended, self.output, seconds, self._limits["memory"], sink, self._talk, reported
        )
        if status is None:
            return int(answer.split()[0]), None
        self._forget()
        code = os.waitstatus_to_exitcode(status)
        return (code, reason) if code >= 0 else (128 - code, reason or "killed")

    def end(self):
        """The next command gets another shell; what this one left in the background lives on."""
        if self._lives():
            assert self.pid is not None
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self._forget()

    def _lives(self):
        if self.pid is not None:
            try:
                if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG) is None:
                    return True
            except ChildProcessError:
                pass  # collected with all that were killed
            self._forget()
        return False

    def _start(self):
        self._writing = os.memfd_create("command")
        self._text = os.open(f"/proc/self/fd/{self._writing}", os.O_RDONLY)
        self._talk, theirs = (end.detach() for end in _socket.socketpair())
        self.output, output = os.pipe()
        self.pid = spawn(self._limits, output, self._become, ((_TALK, theirs), (_TEXT, self._text)))
        self._ended = os.pidfd_open(self.pid)
        for fd in (theirs, output):
            os.close(fd)

    def _become(self):
        os.chdir(self._folder)
        os.execve(SHELL, ["bash", "--norc", "--noprofile", "-c", _DRIVER], self._environment)

    def _forget(self):
        self.pid = None
        for fd in (self._writing, self._text, self._talk, self._ended):
            os.close(fd)
        abandon(self.output)
        self.output = None
