"""An installable environment with a dependency of its own: `regex`, which can give up on a pattern that is too slow."""

from argosy.envs import register


def register_all() -> None:
    register("regexes/easy", "argosy_regexes.env:Regexes", pieces=1)
    register("regexes/hard", "argosy_regexes.env:Regexes", pieces=3)
