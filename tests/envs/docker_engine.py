"""A Docker engine and an image for the tests, from Debian packages alone: no registry, no service manager.

An engine that answers (at DOCKER_HOST, or where Docker usually is) is used. Else, as root, one is started for the
session, and installed first where apt can. The image is what the packages' files make, unpacked without running their
scripts; the tar of it is kept in ~/.cache/argosy, by recipe.
"""

import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

IMAGE = "argosy/tests:debian"
_PACKAGES = ("base-files", "bash", "coreutils", "dash", "diffutils", "findutils", "grep", "gzip", "libc-bin", "sed")
_PACKAGES += ("tar", "util-linux", "python3", "python3-pytest", "git", "procps", "patch")
_LEFT_OUT = ("libperl", "perl", "git-man", "dpkg", "gcc-")  # git works without Perl, for what tests do
_EXCLUDED = ("./usr/share/doc", "./usr/share/man", "./usr/share/locale", "./usr/share/info")
_RECIPE = hashlib.sha256(f"{_PACKAGES}{_LEFT_OUT}{_EXCLUDED}1".encode()).hexdigest()[:16]
_USUAL = "/var/run/docker.sock"
# The tests' containers have no network, so that the engine needs neither a bridge nor iptables.
_WITHOUT_NETWORK = ("--iptables=false", "--ip6tables=false", "--bridge=none", "--ip-forward=false", "--ip-masq=false")


class NoEngine(Exception):
    """The text says why there is none, and how to get one."""


@contextmanager
def engine() -> Iterator[str]:
    """The address of an engine that has the image."""
    found = os.environ.get("DOCKER_HOST") or f"unix://{_USUAL}"
    if _answers(found):
        _import(found)
        yield found
        return
    if os.environ.get("DOCKER_HOST"):
        raise NoEngine(f"no engine answers at DOCKER_HOST={found}: start it, or unset DOCKER_HOST")
    if os.geteuid() != 0:
        raise NoEngine("no Docker engine runs here: start one (sudo systemctl start docker), or run the tests as root")
    if not shutil.which("dockerd") or not shutil.which("containerd"):
        _apt("install", "-y", "--no-install-recommends", "docker.io", seconds=300)
    with started() as address:
        _import(address)
        yield address


@contextmanager
def started(arguments: tuple[str, ...] = ()) -> Iterator[str]:
    """An engine of our own, ended with all its containers."""
    with tempfile.TemporaryDirectory(prefix="argosy-dockerd-") as folder:
        socket, log = f"{folder}/docker.sock", Path(folder, "log")
        command = [
            "setpriv",
            "--pdeathsig",
            "TERM",
            "dockerd",
            "--data-root",
            f"{folder}/data",
            "--exec-root",
            f"{folder}/exec",
            "-H",
            f"unix://{socket}",
        ]
        command += ["--pidfile", f"{folder}/pid", "--oom-score-adjust", "0", *_WITHOUT_NETWORK, *arguments]
        with log.open("wb") as output:
            process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, start_new_session=True)
        try:
            deadline = time.monotonic() + 60
            while not _answers(f"unix://{socket}"):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise NoEngine(f"dockerd does not start here: {log.read_text()[-2000:]}")
                time.sleep(0.1)
            yield f"unix://{socket}"
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _unmount(folder)


def root_tar() -> Path:
    """The image as a tar of its files; made once (20 s, 50 MB to download)."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "argosy")
    tar = cache / f"debian-{_RECIPE}.tar"
    if not tar.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="argosy-image-") as folder:
            _unpack(Path(folder))
            made = tar.with_suffix(f".{os.getpid()}")
            subprocess.run(["tar", "-C", f"{folder}/root", "-cf", made, "."], check=True, timeout=120)
            made.rename(tar)
    return tar


def _unpack(folder: Path) -> None:
    (folder / "none").touch()
    (folder / "debs/partial").mkdir(parents=True)
    (folder / "root").mkdir()
    ours = [f"Dir::State::status={folder}/none", f"Dir::Cache::archives={folder}/debs/", "Debug::NoLocking=1"]
    options = [part for option in (*ours, "APT::Sandbox::User=root") for part in ("-o", option)]
    _apt(*options, "-y", "--no-install-recommends", "--download-only", "install", *_PACKAGES, seconds=300)
    excluded = " ".join(f"--exclude={path}/*" for path in _EXCLUDED)
    unpack = f'dpkg-deb --fsys-tarfile "$1" | tar -x -C {folder}/root --keep-directory-symlink {excluded}'
    debs = [deb for deb in sorted((folder / "debs").glob("*.deb")) if not deb.name.startswith(_LEFT_OUT)]
    subprocess.run(
        ["xargs", "-0", "-P2", "-n1", "sh", "-ec", unpack, "sh"],
        input="\0".join(map(str, debs)),
        text=True,
        check=True,
        timeout=300,
    )
    (folder / "root/etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\nagent:x:1000:1000::/home:/bin/bash\n")
    (folder / "root/etc/group").write_text("root:x:0:\nagent:x:1000:\n")


def _apt(*arguments: str, seconds: float) -> None:
    """With fresh lists where the old ones do not do."""
    if not shutil.which("apt-get"):
        raise NoEngine("neither a Docker engine nor apt is here: install Docker by hand and start it")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    said = ""
    for preparation in (None, ["apt-get", "update", "-qq"]):
        if preparation:
            subprocess.run(preparation, check=False, capture_output=True, env=environment, timeout=seconds)
        done = subprocess.run(
            ["apt-get", "-qq", *arguments], capture_output=True, text=True, env=environment, timeout=seconds
        )
        if done.returncode == 0:
            return
        said = done.stderr[-1000:]
    raise NoEngine(f"apt-get {' '.join(arguments[-3:])} failed: {said}")


def _answers(address: str) -> bool:
    import docker

    try:
        return bool(docker.APIClient(base_url=address, version="auto", timeout=10).ping())
    except (docker.errors.DockerException, OSError):
        return False


def _import(address: str) -> None:
    import docker

    api = docker.APIClient(base_url=address, version="auto", timeout=120)
    if not api.images(IMAGE):
        with root_tar().open("rb") as file:
            api.import_image_from_data(file, repository=IMAGE)


def _unmount(folder: str) -> None:
    """What dockerd leaves mounted when it ends."""
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        if (mount := line.split()[1]).startswith(folder):
            subprocess.run(["umount", "-l", mount], check=False, capture_output=True, timeout=30)


if __name__ == "__main__":  # by hand: DOCKER_HOST for other programs, until Ctrl-C
    with engine() as address:
        print(f"export DOCKER_HOST={address}", flush=True)
        signal.pause()
