"""Runs a package's tests in a sandbox, once for each variant of its source: `python3 -S run_mutants.py JOB RESULT`.

Job: {"path": where imports start, "sources": files to trace, "each": processor seconds per test, "memory": bytes,
"runs": [{"write": {file: text}, "files": of tests, "only": [ids] or null, "trace": bool, "seconds": for all}]}.
Result: one record per run, see `Report.record`; `ended` is "done", "hang" (a test or import took too long) or "died".

Invariant: every run is a fork that has imported pytest but nothing of the package, and ends by its deadline; files that
a run changes are restored after it. Standard library and pytest only, and no import of argosy: this file is copied
into the sandbox.
"""

# ruff: noqa: PTH100, PTH108, PTH109, PTH118, PTH123, PTH207

import contextlib
import glob
import json
import os
import resource
import select
import signal
import sys
import time

import pytest

IMPORT_SECONDS = 20  # of the processor, to collect all tests
LONGEST_TEXT = 2000


class Report:
    """A pytest plugin: what became of each test, and which lines of the package it ran."""

    def __init__(self, job, run):
        self.each, self.only, self.trace = job["each"], run["only"] and set(run["only"]), run["trace"]
        self.sources = {os.path.abspath(file): file for file in job["sources"]}
        self.outcomes, self.seconds, self.failures, self.errors = {}, {}, {}, {}
        self.lines = {}
        self.ran = set()

    def record(self):
        return {
            "ended": "done",
            "outcomes": self.outcomes,
            "seconds": self.seconds,
            "failures": self.failures,
            "errors": self.errors,
            "lines": {file: {line: sorted(tests) for line, tests in at.items()} for file, at in self.lines.items()},
        }

    def pytest_collectreport(self, report):
        if report.failed:
            self.errors[report.nodeid] = str(report.longrepr).strip()[-LONGEST_TEXT:]

    def pytest_collection_modifyitems(self, items):
        if self.only is not None:
            items[:] = [item for item in items if item.nodeid in self.only]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.ran = set()
        signal.setitimer(signal.ITIMER_PROF, self.each)  # ends this process: no code can swallow that
        if self.trace:
            sys.settrace(self._enter)
        started = time.process_time()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = round(time.process_time() - started, 4)
            sys.settrace(None)
            signal.setitimer(signal.ITIMER_PROF, 0)
            for file, line in self.ran:
                self.lines.setdefault(file, {}).setdefault(line, set()).add(item.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if hasattr(report, "wasxfail") or report.skipped:
            self.outcomes[item.nodeid] = "skipped"
        elif report.failed:
            self.outcomes[item.nodeid] = "failed"
            self.failures.setdefault(item.nodeid, [_statement(item, call.excinfo), _message(report)])
        elif report.when == "call":
            self.outcomes.setdefault(item.nodeid, "passed")
        return report

    def _enter(self, frame, event, argument):
        file = self.sources.get(frame.f_code.co_filename)
        if file is None:
            return None
        ran = self.ran

        def line(frame, event, argument):
            ran.add((file, frame.f_lineno))
            return line

        ran.add((file, frame.f_lineno))
        return line


def _statement(item, error):
    """The test up to the statement that failed, without its head."""
    for entry in reversed(error.traceback):
        if os.path.abspath(str(entry.path)) == os.path.abspath(str(item.path)):
            lines = str(entry.getsource() or "").splitlines()
            while lines and lines[0].lstrip().startswith(("@", "def ", "async def ")):
                lines.pop(0)
            return "\n".join(lines)[-LONGEST_TEXT:]
    return ""


def _message(report):
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else str(report.longrepr))[:LONGEST_TEXT]


def main(job, result):
    with open(job) as file:
        job = json.load(file)
    answers = []
    for run in job["runs"]:
        kept = {}
        for name, text in run["write"].items():
            with open(name, "rb") as file:
                kept[name] = file.read()
            replace(name, text.encode())
        try:
            answers.append(fork(job, run))
        finally:
            for name, content in kept.items():
                replace(name, content)
    with open(result, "w") as file:
        json.dump(answers, file)


def replace(name, content):
    """With its compiled form, which would be taken for this one's if the size and the second are the same."""
    folder, base = os.path.split(name)
    for stale in glob.glob(os.path.join(glob.escape(folder), "__pycache__", glob.escape(base[:-3]) + ".*.pyc")):
        os.unlink(stale)
    with open(name, "wb") as file:
        file.write(content)


def fork(job, run):
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        child(job, run, writer)
    os.close(writer)
    received, deadline = b"", time.monotonic() + run["seconds"]
    while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
        chunk = os.read(reader, 1 << 16)
        if not chunk:
            break
        received += chunk
    late = time.monotonic() >= deadline
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    if received.endswith(b"\n"):
        return json.loads(received)
    hung = late or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGXCPU))
    return {"ended": "hang" if hung else "died"}


def child(job, run, writer):
    try:
        os.setpgid(0, 0)
        null = os.open("/dev/null", os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        resource.setrlimit(resource.RLIMIT_DATA, (job["memory"], job["memory"]))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, IMPORT_SECONDS)
        sys.path[:] = [os.path.abspath(job["path"]), os.getcwd(), *sys.path[1:]]  # without the folder of this file
        report = Report(job, run)
        options = ["-c", "/dev/null", "--rootdir=.", "-p", "no:cacheprovider", "-q", "--continue-on-collection-errors"]
        pytest.main([*options, *run["files"]], plugins=[report])
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer = json.dumps(report.record()).encode() + b"\n"
        while answer:
            answer = answer[os.write(writer, answer) :]
    finally:
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
