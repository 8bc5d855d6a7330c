"""Versions only grow, engines are known while they live, and a wait names who did not answer."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from argosy.buffer import BufferSettings, WeightLedger, WeightVersion
from argosy.buffer.errors import VersionNotNewer


@pytest.fixture
def ledger(make_settings: Callable[..., BufferSettings]) -> Iterator[WeightLedger]:
    ledger = WeightLedger(make_settings())
    yield ledger
    ledger.close()


def version(number: int) -> WeightVersion:
    return WeightVersion(number, f"weights/v{number:06d}", step=number, checksum="c", created=1.0)


def test_publish_and_wait(ledger: WeightLedger) -> None:
    assert ledger.latest() is None
    assert ledger.wait(after=-1, timeout=0.05) is None
    ledger.publish(version(1))
    ledger.publish(version(3))
    assert ledger.latest() == version(3)
    assert ledger.wait(after=1, timeout=5) == version(3)
    timer = threading.Timer(0.1, ledger.publish, [version(4)])
    timer.start()
    started = time.monotonic()
    assert ledger.wait(after=3, timeout=20) == version(4)
    assert time.monotonic() - started < 5
    timer.join()
    assert ledger.wait(after=4, timeout=0.05) is None


def test_versions_only_grow(ledger: WeightLedger) -> None:
    ledger.publish(version(0))
    ledger.publish(version(2))
    ledger.publish(version(2))  # a retry
    with pytest.raises(VersionNotNewer, match="version 1 is not above"):
        ledger.publish(version(1))
    with pytest.raises(VersionNotNewer):
        ledger.publish(WeightVersion(2, "elsewhere", 2, "other", 1.0))
    assert ledger.latest() == version(2)


def test_engines_are_known_while_they_live(ledger: WeightLedger) -> None:
    assert ledger.engines() == {}
    ledger.register_engine("engine-0", "http://127.0.0.1:1", ttl=30, version=2)
    ledger.register_engine("engine-1", "http://127.0.0.1:2", ttl=0.2)
    assert {name: (e.url, e.version) for name, e in ledger.engines().items()} == {
        "engine-0": ("http://127.0.0.1:1", 2),
        "engine-1": ("http://127.0.0.1:2", 0),
    }
    ledger.confirm("engine-0", 3)
    ledger.register_engine("engine-0", "http://127.0.0.1:1", ttl=30)  # a heartbeat keeps what was confirmed
    time.sleep(0.3)
    assert {name: e.version for name, e in ledger.engines().items()} == {"engine-0": 3}
    ledger.unregister_engine("engine-0")
    assert ledger.engines() == {}


def test_wait_confirmed(ledger: WeightLedger) -> None:
    assert ledger.wait_confirmed(1, timeout=5) == []  # nobody to wait for
    for name in ("engine-0", "engine-1", "dying"):
        ledger.register_engine(name, "http://127.0.0.1:1", ttl=30)
    ledger.register_engine("dying", "http://127.0.0.1:1", ttl=0.5)
    ledger.confirm("engine-0", 2)
    assert ledger.wait_confirmed(1, timeout=0.05) == ["dying", "engine-1"]
    timer = threading.Timer(0.1, ledger.confirm, ["engine-1", 1])
    timer.start()
    assert ledger.wait_confirmed(1, timeout=20) == []  # also because one died
    timer.join()
