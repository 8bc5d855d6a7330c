"""Harbor task directories: task.toml (schema 1.x), instruction.md, environment/, tests/, solution/, steps/<name>/.

Invariant: tests and solution enter no sandbox before their time; they go to /tests and /solution as Harbor puts them.
What a task asks for and a sandbox here does not have (a GPU, compose services, a secret of this machine) is a
`Problem`, not a task that fails later. Unlike Harbor, the network is off unless the task says that it is on.

With bubblewrap there are no images: a task loads if its Dockerfile only has FROM, WORKDIR, ENV and COPY, which is
enough for tasks in plain Python or shell.
"""

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ..sandboxes import Limits, SandboxSpec
from .dockerfile import WORKDIR, Dockerfile
from .reading import Fields, Problem, files_under, tasks_below, text
from .task import Grading, RewardFile, Solution, Stage, Task

Backend = Literal["bubblewrap", "docker"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])i?B?", re.IGNORECASE)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def load(path: Path, backend: Backend, network: bool) -> Iterator[Task | Problem]:
    """The task in a folder, or all tasks below it, in the order of their paths.

    `network`: whether those that say nothing about it have it.
    """
    return tasks_below(path, "task.toml", lambda folder, id: _task(folder, id, backend, network))


def _task(folder: Path, id: str, backend: Backend, network: bool) -> Task:
    where = folder / "task.toml"
    try:
        config = Fields(where, tomllib.loads(text(where)))
    except tomllib.TOMLDecodeError as error:
        raise Problem(where, "", f"is not TOML: {error}") from None
    version = config.text(config.has("schema_version", "version") or "version", "1.0")
    if version.split(".")[0] != "1":
        raise config.problem("version", f"is {version!r}, and this reads schema 1.x")
    environment = config.table("environment")
    sandbox, files = _sandbox(folder / "environment", environment, backend, network)
    steps = _steps(config)
    stages = [_stage(folder, config, step, sandbox, backend) for step in steps or [Fields(where, {})]]
    stages[0] = replace(stages[0], files=files | dict(stages[0].files))
    seconds = config.table("agent").number("timeout_sec", 600.0)
    return Task(
        id=id,
        stages=tuple(stages),
        sandbox=sandbox,
        combine="final" if config.choice("multi_step_reward_strategy", "mean", "mean", "final") == "final" else "mean",
        seconds=sum(step.table("agent").number("timeout_sec", seconds) for step in steps) or seconds,
        origin=str(where),
    )


def _steps(config: Fields) -> list[Fields]:
    steps = config.any("steps") or []
    if not isinstance(steps, list):
        raise config.problem("steps", "must be [[steps]] tables")
    found = [Fields(config.where, step, f"steps[{number}]") for number, step in enumerate(steps)]
    names = [step.text("name") for step in found]
    for step, name in zip(found, names):
        if not _NAME.fullmatch(name):
            raise step.problem("name", f"{name!r} must be letters, digits, '.', '_' and '-'")
    if len(set(names)) < len(names):
        raise config.problem("steps", f"two of the same name: {', '.join(names)}")
    return found


def _stage(folder: Path, config: Fields, step: Fields, sandbox: SandboxSpec, backend: Backend) -> Stage:
    """One of [[steps]], or the task itself where it has none."""
    here = folder / "steps" / step.text("name") if step.has("name") else folder
    given = files_under(here / "workdir") if here != folder and (here / "workdir").is_dir() else {}
    solution = None
    if (here / "solution").is_dir():
        if not (here / "solution" / "solve.sh").exists():
            raise Problem(here / "solution" / "solve.sh", "", "there is no such file, only others beside it")
        command = _with(config.table("solution").table("env"), "bash /solution/solve.sh")
        solution = Solution(files_under(here / "solution", "/solution/"), command)
    return Stage(
        instruction=text(here / "instruction.md").strip(),
        grading=_grading(folder, here, config, step, sandbox, backend),
        solution=solution,
        files=given,
        setup="bash setup.sh" if "setup.sh" in given else "",
        least=_least(step),
    )


def _grading(
    folder: Path,
    here: Path,
    config: Fields,
    step: Fields,
    sandbox: SandboxSpec,
    backend: Backend,
) -> Grading:
    tests = files_under(folder / "tests", "/tests/") | files_under(here / "tests", "/tests/")
    if "/tests/test.sh" not in tests:
        raise Problem(here / "tests" / "test.sh", "", "there is no such file: a task needs a verifier")
    verifier, own = config.table("verifier"), step.table("verifier")
    mode = own.choice(
        "environment_mode", verifier.choice("environment_mode", "shared", "shared", "separate"), "shared", "separate"
    )
    clean = None
    table = own.table("environment") if own.has("environment") else verifier.table("environment")
    if mode == "separate" and (table.has("docker_image") or "/tests/Dockerfile" in tests):
        if backend != "docker":
            raise table.problem("docker_image", "a verifier with an image of its own needs Docker")
        clean = replace(_sandbox(folder / "tests", table, backend, False)[0], workdir=sandbox.workdir)
    return Grading(
        command=_with(own.table("env") if own.has("env") else verifier.table("env"), "bash /tests/test.sh"),
        files=tests,
        verdict=RewardFile(),
        artefacts=_artefacts(config) or (sandbox.workdir,),
        shared=mode == "shared",
        sandbox=clean,
        seconds=own.number("timeout_sec", verifier.number("timeout_sec", 600.0)),
    )


def _artefacts(config: Fields) -> tuple[str, ...]:
    """Paths, or tables whose source is one."""
    every = config.any("artifacts") or []
    if not isinstance(every, list):
        raise config.problem("artifacts", "must be a list")
    named = [Fields(config.where, {"source": item} if isinstance(item, str) else item, "artifacts") for item in every]
    return tuple(item.text("source") for item in named)


def _least(step: Fields) -> float | None:
    """A number, or a table by the names of rewards, of which only the reward itself is one here."""
    value = step.any("min_reward")
    if isinstance(value, Mapping):
        if set(value) != {"reward"}:
            raise step.problem("min_reward", f"names {', '.join(map(str, value))}; only 'reward' can end a task here")
        value = value["reward"]
    return None if value is None else Fields(step.where, {"min_reward": value}, step.name).number("min_reward", 0.0)


def _with(variables: Fields, command: str) -> str:
    """The command, with its table of environment variables exported before."""
    return "".join(f"export {k}={shlex.quote(v)}; " for k, v in _variables(variables).items()) + command


def _variables(table: Fields) -> dict[str, str]:
    found = {}
    for name, _ in table.items():
        if not name.isidentifier():
            raise table.problem(name, "is no name of a variable")
        found[name] = table.text(name)
        if re.search(r"\$\{\w+", found[name]):
            raise table.problem(name, f"{found[name]} wants a variable of this machine, which sandboxes do not get")
    return found


def _sandbox(
    folder: Path, environment: Fields, backend: Backend, network: bool
) -> tuple[SandboxSpec, dict[str, bytes]]:
    """The sandbox and, where no image brings them, its files."""
    for key in ("gpus", "mcp_servers"):
        if environment.any(key):
            raise environment.problem(key, "is something that sandboxes here do not have")
    if any((folder / f"docker-compose.{ending}").exists() for ending in ("yaml", "yml")):
        raise Problem(folder / "docker-compose.yaml", "", "services beside the sandbox are not supported")
    dockerfile, image = folder / "Dockerfile", environment.text("docker_image", "")
    built = Dockerfile(dockerfile) if dockerfile.exists() else None
    if built is None and not image and backend == "docker":
        raise environment.problem("docker_image", f"is missing, and so is {dockerfile}")
    variables = _variables(environment.table("env"))
    files: dict[str, bytes] = {}
    if backend == "bubblewrap" and built is not None:
        variables = built.variables | variables
        files = built.files()
    disk = _bytes(environment, "storage", 10240) if backend == "docker" else Limits.disk
    limits = Limits(
        memory=_bytes(environment, "memory", 2048),
        processes=256,
        file_size=max(disk // 2, Limits.file_size),
        disk=disk,
        cpus=environment.number("cpus", 1.0, least=0.01),
    )
    spec = SandboxSpec(
        backend=backend,
        image=(image or str(folder)) if backend == "docker" else None,
        workdir=environment.text("workdir", built.workdir if built is not None else WORKDIR),
        limits=limits,
        network=_network(environment, network),
        environment=tuple(sorted(variables.items())),
    )
    return spec, files


def _network(environment: Fields, default: bool) -> tuple[str, ...]:
    if environment.has("network_mode"):
        mode = environment.choice("network_mode", "", "public", "no-network", "allowlist")
        hosts = environment.texts("allowed_hosts")
        if mode == "allowlist" and not hosts:
            raise environment.problem("allowed_hosts", "is missing, and network_mode is allowlist")
        return {"public": ("*",), "no-network": (), "allowlist": hosts}[mode]
    allowed: Any = environment.any("allow_internet")
    if allowed not in (None, True, False):
        raise environment.problem("allow_internet", f"must be true or false, not {allowed!r:.60}")
    return ("*",) if (default if allowed is None else allowed) else ()


def _bytes(environment: Fields, name: str, default: int) -> int:
    """`memory_mb = 2048`, or as before schema 1.1 `memory = "2G"`."""
    if not environment.has(f"{name}_mb") and environment.has(name):
        size = _SIZE.fullmatch(environment.text(name).strip())
        if size is None:
            raise environment.problem(name, f'{environment.any(name)!r} must be a size such as "2G"')
        return int(float(size[1]) * _UNITS[size[2].upper()])
    return int(environment.number(f"{name}_mb", default, least=1) * 2**20)
