"""Files of the sandbox: one at a time, as a tar, and all of them gone.

Invariant: `take` and `put` follow no link, wherever in a path it stands, and stay on the sandbox's own file system.
What is a mount (all that comes from the host) is never taken, replaced or removed.
"""

# ruff: noqa: PTH101, PTH103, PTH106, PTH108, PTH116, PTH118, PTH119, PTH120, PTH123, PTH208, SIM105, SIM115

import errno
import io
import os
import re
import stat

_NO_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_SKELETON = {"/dev/shm": 0o1777, "/home": 0o755, "/root": 0o755, "/run": 0o755}
_SKELETON |= {"/tmp": 0o1777, "/var": 0o755, "/var/tmp": 0o1777}


def load(path, most):
    """A regular file of bounded size; anything else (a fifo would block us) is refused."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"larger than {most} bytes")
    return content


def store(path, content, executable=False):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o644)
    with open(fd, "wb") as file:
        if executable:
            os.fchmod(fd, os.fstat(fd).st_mode | 0o111)
        file.write(content)


# Tars.


def take(workdir, paths, exclude, most, write):
    """Write a tar of `paths` in pieces; `exclude` is a regular expression or None. Missing paths are passed over."""
    import tarfile  # seldom needed, and not small

    left_out = re.compile(exclude).fullmatch if exclude else lambda name: None
    device = os.stat("/").st_dev
    size = 0
    archive = tarfile.open(fileobj=_Writer(write), mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 20)

    def add(folder, base, path):
        nonlocal size
        found = os.stat(base, dir_fd=folder, follow_symlinks=False)
        name = os.path.relpath(path, workdir) if (path + "/").startswith(workdir + "/") else path
        if found.st_dev != device or left_out(name):
            return
        member = tarfile.TarInfo(name if name != "/" else "/.")
        member.mode, member.mtime = found.st_mode & 0o1777, int(found.st_mtime)
        content = b""
        if stat.S_ISDIR(found.st_mode):
            member.type = tarfile.DIRTYPE
        elif stat.S_ISLNK(found.st_mode):
            member.type, member.linkname = tarfile.SYMTYPE, os.readlink(base, dir_fd=folder)
        elif stat.S_ISREG(found.st_mode):
            fd, mode = _open(folder, base, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, 0o400)
            try:
                with open(fd, "rb", closefd=False) as file:
                    content = file.read(most - size + 1)
            finally:
                _close(fd, mode)
        else:
            return
        member.size = len(content)
        size += len(content) + 1024
        if size > most:
            raise OSError(errno.EFBIG, f"the files come to more than {most} bytes")
        archive.addfile(member, io.BytesIO(content))
        if member.isdir():
            fd, mode = _open(folder, base, _FOLDER, 0o500)
            try:
                for entry in sorted(os.listdir(fd)):
                    add_if_there(fd, entry, os.path.join(path, entry))
            finally:
                _close(fd, mode)

    def add_if_there(*place):
        try:
            add(*place)
        except FileNotFoundError:  # or it vanished meanwhile
            pass

    for path in paths:
        path = os.path.normpath(os.path.join(workdir, path))
        try:
            folder = _walk(os.path.dirname(path))
        except OSError as error:
            if error.errno in _NO_FOLDER:
                continue
            raise
        try:
            add_if_there(folder, os.path.basename(path) or ".", path)
        finally:
            os.close(folder)
    archive.close()


def put(workdir, tar):
    """Unpack what `take` made (the owner has checked that). What is in the way is replaced."""
    import tarfile

    archive = tarfile.open(fileobj=io.BytesIO(tar), mode="r:")
    folders = []
    for member in archive:
        path = os.path.normpath(os.path.join(workdir, member.name))
        if member.isdir():
            fd = _walk(path, make=True)
            os.fchmod(fd, 0o700)
            os.close(fd)
            folders.append((path, member))
            continue
        parent, base = _walk(os.path.dirname(path), make=True), os.path.basename(path)
        try:
            _remove(parent, base)
            if member.issym():
                os.symlink(member.linkname, base, dir_fd=parent)
                os.utime(base, (member.mtime, member.mtime), dir_fd=parent, follow_symlinks=False)
                continue
            fd = os.open(base, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=parent)
            with open(fd, "wb") as file:
                content = archive.extractfile(member)
                assert content is not None
                file.write(content.read())
                file.flush()
                os.fchmod(fd, member.mode)
                os.utime(fd, (member.mtime, member.mtime))
        finally:
            os.close(parent)
    for path, member in reversed(folders):  # last, because a folder may be read-only
        fd = _walk(path)
        os.utime(fd, (member.mtime, member.mtime))
        os.fchmod(fd, member.mode)
        os.close(fd)


class _Writer(io.RawIOBase):
    def __init__(self, function):
        self._function = function

    def write(self, part):
        self._function(part)


def _walk(path, make=False):
    """A descriptor of a folder, reached without following a link; `make` replaces what is no folder."""
    fd = os.open("/", _FOLDER)
    for name in path.split("/"):
        if not name:
            continue
        try:
            inner, _ = _open(fd, name, _FOLDER, 0o500)
        except OSError as error:
            if not make or error.errno not in _NO_FOLDER:
                os.close(fd)
                raise
            _remove(fd, name)
            os.mkdir(name, 0o755, dir_fd=fd)
            inner = os.open(name, _FOLDER, dir_fd=fd)
        os.close(fd)
        fd = inner
    return fd


def _open(folder, base, flags, needed):
    """A descriptor, and the mode to put back when it is closed: what we own, we may read whatever its mode."""
    mode = stat.S_IMODE(os.stat(base, dir_fd=folder, follow_symlinks=False).st_mode)
    if mode & needed == needed:
        return os.open(base, flags, dir_fd=folder), None
    os.chmod(base, mode | needed, dir_fd=folder)
    return os.open(base, flags, dir_fd=folder), mode


def _close(fd, mode):
    if mode is not None:
        os.fchmod(fd, mode)
    os.close(fd)


def _remove(folder, base):
    """Whatever it is, if it is there at all."""
    try:
        if not stat.S_ISDIR(os.stat(base, dir_fd=folder, follow_symlinks=False).st_mode):
            os.unlink(base, dir_fd=folder)
            return
    except FileNotFoundError:
        return
    fd, _ = _open(folder, base, _FOLDER, 0o700)
    try:
        for entry in os.listdir(fd):
            _remove(fd, entry)
    finally:
        os.close(fd)
    os.rmdir(base, dir_fd=folder)


# All of it.


def clear(workdir):
    """Back to the state at start, once no process is left; OSError or RecursionError where that cannot be."""
    kept = _mounts()
    os.chmod("/", 0o755)
    for folder in ("/", "/dev/shm"):
        for name in os.listxattr(folder):
            os.removexattr(folder, name)
        _wipe(folder, kept)
    furnish(workdir)


def furnish(workdir):
    for path, mode in {workdir: 0o755, **_SKELETON}.items():
        os.makedirs(path, exist_ok=True)
        os.chmod(path, mode)


def _mounts():
    with open("/proc/self/mountinfo") as file:
        return {line.split()[4] for line in file}


def _wipe(folder, kept):
    for entry in list(os.scandir(folder)):
        if entry.path in kept:
            continue
        if entry.is_dir(follow_symlinks=False):
            os.chmod(entry.path, 0o700)
            _wipe(entry.path, kept)
            os.rmdir(entry.path)
        else:
            os.unlink(entry.path)
