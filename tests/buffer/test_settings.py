"""A remote Redis that anyone could write to is refused before anything starts."""

import pytest
from argosy.buffer import BufferSettings
from pydantic import ValidationError


def make(url: str, **more: object) -> BufferSettings:
    return BufferSettings.model_validate({"run": "r", "url": url, "batch_size": 1} | more)


@pytest.mark.parametrize(
    "url",
    [
        "unix:///tmp/redis.sock",
        "redis://localhost:6379/0",
        "redis://127.0.0.1:6379",
        "redis://[::1]:6379",
        "rediss://user:secret@redis.example.org:6380",
    ],
)
def test_local_or_protected_is_fine(url: str) -> None:
    assert make(url).url == url


@pytest.mark.parametrize(
    ("url", "lacks"),
    [
        ("redis://redis.example.org:6379", "TLS"),
        ("redis://user:secret@redis.example.org", "TLS"),
        ("rediss://redis.example.org:6380", "a password"),
        ("redis://10.0.0.7:6379", "TLS"),
        ("http://localhost", "must begin with"),
    ],
)
def test_an_open_remote_is_refused(url: str, lacks: str) -> None:
    with pytest.raises(ValidationError, match=lacks) as refusal:
        make(url)
    assert "secret" not in str(refusal.value)


def test_the_user_may_insist() -> None:
    assert make("redis://10.0.0.7:6379", insecure=True).insecure


def test_unknown_keys_are_errors() -> None:
    with pytest.raises(ValidationError, match="etta"):
        make("unix:///tmp/redis.sock", etta=3)
