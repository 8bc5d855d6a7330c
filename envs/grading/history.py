"""A repository without its future: what lies before HEAD stays, what an agent could find the fix in does not.

Invariant: after `STRIP` every object in .git is reachable from HEAD. Branches, tags, remotes, notes, stashes, other
worktrees, reflogs, half-done merges, what the index held, kept packs and what alternates lent are gone with all objects
that only they held. The files of the work tree are not touched.
"""

import subprocess
from pathlib import Path

from ..errors import EnvError

STRIP = r"""
set -e
cd "$(git rev-parse --show-toplevel)"
git=$(git rev-parse --absolute-git-dir)
head=$(git rev-parse --verify HEAD^{commit})
rm -rf "$git/worktrees" "$git"/rebase-* "$git/sequencer" "$git/lost-found" "$git/logs" "$git"/hooks/*
find "$git" -maxdepth 1 '(' -name '*_HEAD' -o -name '*_MSG' -o -name '*_EDITMSG' ')' -delete
printf '%s\n' "$head" > "$git/HEAD"
git reset -q
git for-each-ref --format='delete %(refname)' | git update-ref --no-deref --stdin
git remote | while read -r name; do git remote remove "$name"; done
rm -f "$git"/objects/pack/*.keep "$git"/objects/pack/*.promisor
rm -rf "$git/objects/info/commit-graph" "$git/objects/info/commit-graphs"
git repack -q -a -d -F --depth=50 --window=10
rm -rf "$git/objects/info/alternates" "$git/info/refs" "$git/packed-refs"
git prune --expire=now
git update-ref refs/heads/main "$head"
git symbolic-ref HEAD refs/heads/main
rm -rf "$git/logs"
"""
"""A shell script (sh, git 2.20 or newer) for a work tree, to run in a sandbox before the agent does."""


def strip_history(worktree: Path) -> None:
    """`STRIP` on this machine; `EnvError` with what git says when it cannot be done."""
    done = subprocess.run(["sh", "-c", STRIP], cwd=worktree, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise EnvError(f"the history of {worktree} cannot be stripped: {done.stderr.strip()[-500:]}")
