"""The shell that lives as long as its sandbox: what one command sets, the next finds.

Invariant: the end of a command is either told by the shell itself, over a pipe of which the commands hold no end and
with a number that the command could not know, or it is the shell's death. Output cannot imitate it. The shell is run
from a file that nobody may read, so the kernel lets no other process look into it or reach its descriptors.
"""

# ruff: noqa: SIM105

import os
import signal

from .processes import abandon, spawn, supervise

SHELL = "/.sandbox/bash"
_WAKE, _REPORT, _COMMAND = 249, 250, 251  # its descriptors; high, so that nobody takes them by accident

# Waits for a line, evaluates what the file holds up to a NUL, and answers with the status and the number that was sent
# along. The inner loop keeps `break` and `continue` from ending the outer one. It is one line, so that messages name
# the command's. If anything fails here, the shell ends, which is an answer too.
_DRIVER = (
    f"while read -r -u {_WAKE} && IFS= read -r -d '' -u {_COMMAND}; do "
    f'for REPLY in "$REPLY"; do eval "$REPLY"; done {_WAKE}<&- {_REPORT}>&- {_COMMAND}<&-; '
    f"{{ printf '%s ' $? >&{_REPORT} && read -r -u {_WAKE} && printf '%s\\n' \"$REPLY\" >&{_REPORT}; }} 2>/dev/null "
    f"|| exit; done"
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
        os.ftruncate(self._command, 0)
        os.pwrite(self._command, command + b"\0", 0)
        os.lseek(self._command, 0, os.SEEK_SET)  # where the shell reads on: it shares this descriptor
        try:
            os.write(self._wake, b"\n" + token + b"\n")
        except BrokenPipeError:
            pass  # it was killed just now, as `supervise` will tell
        answer = bytearray()

        def reported(chunk):
            """Lines with an older token are of commands that pretended to be over."""
            answer.extend(chunk)
            while b"\n" in answer and not answer.partition(b"\n")[0].endswith(token):
                del answer[: answer.index(b"\n") + 1]
            return b"\n" in answer

        status, reason = supervise(self.pid, self.output, seconds, self._limits["memory"], sink, self._report, reported)
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
        self._command = os.memfd_create("command")
        wake, self._wake = os.pipe()
        self._report, report = os.pipe()
        self.output, output = os.pipe()
        theirs = ((_WAKE, wake), (_REPORT, report), (_COMMAND, self._command))
        self.pid = spawn(self._limits, output, self._become, theirs)
        for fd in (wake, report, output):
            os.close(fd)

    def _become(self):
        os.chdir(self._folder)
        os.execve(SHELL, ["bash", "--norc", "--noprofile", "-c", _DRIVER], self._environment)

    def _forget(self):
        self.pid = None
        for fd in (self._command, self._wake, self._report):
            os.close(fd)
        abandon(self.output)
        self.output = None
