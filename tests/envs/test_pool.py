"""Many episodes, few sandboxes."""

import asyncio
import time
from typing import Any

import pytest
from argosy.envs import Outcome, Sandbox, SandboxPool, SandboxSpec, SandboxUnavailable, close_shared_pools


def test_a_sandbox_comes_back_warm_and_clean(run: Any) -> None:
    async def body() -> None:
        pool = SandboxPool(size=1)
        async with pool.sandbox() as first:
            await first.write("left", "behind")
        async with pool.sandbox() as second:
            assert second is first
            assert (await second.exec("ls")).output == ""
        async with pool.sandbox(fresh=True) as third:
            assert third is not first and not first.alive
        await pool.close()
        assert third.ended and first.ended

    run(body())


def test_at_most_size_live_at_once_and_waiting_has_a_deadline(run: Any) -> None:
    async def body() -> None:
        pool = SandboxPool(size=2)
        held = [await pool.acquire() for _ in range(2)]
        with pytest.raises(SandboxUnavailable, match="all 2 sandboxes of the pool were in use for"):
            await pool.acquire(timeout=0.1)
        waiting = asyncio.create_task(pool.acquire())
        await asyncio.sleep(0.05)
        await pool.release(held[0])
        assert await waiting is held[0]
        await pool.close()
        with pytest.raises(SandboxUnavailable, match="closed"):
            await pool.release(held[1])
            await pool.acquire()

    run(body())


def test_broken_ones_are_replaced(run: Any) -> None:
    async def body() -> None:
        pool = SandboxPool(size=1)
        for harm in (kill, cancel):
            async with pool.sandbox() as sandbox:
                await harm(sandbox)
            assert await pool.run_python("def f(): return 1", "f", [[]]) == [Outcome(1)]
        await pool.close()

    async def kill(sandbox: Sandbox) -> None:
        sandbox._process.kill()
        sandbox._process.wait(5)

    async def cancel(sandbox: Sandbox) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sandbox.exec("sleep 9"), 0.1)

    run(body())


def test_a_run_whose_sandbox_dies_is_tried_once_more(run: Any) -> None:
    async def body() -> None:
        pool = SandboxPool(size=1)
        running = asyncio.create_task(pool.run_python("import time\ntime.sleep(0.5)\ndef f(): return 1", "f", [[]]))
        async with asyncio.timeout(20):
            while not pool._started:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        pool._started[0]._process.kill()
        assert await running == [Outcome(1)]
        await pool.close()

    run(body())


def test_one_that_dies_while_idle_is_not_handed_out(run: Any) -> None:
    async def body() -> None:
        pool = SandboxPool(size=1)
        async with pool.sandbox() as first:
            pass
        first._process.kill()
        first._process.wait(5)
        async with pool.sandbox() as second:
            assert (await second.exec("echo yes")).output == "yes\n"
        await pool.close()

    run(body())


def test_cancelled_episodes_give_their_place_back(run: Any) -> None:
    async def episode(pool: SandboxPool) -> None:
        async with pool.sandbox() as sandbox:
            await sandbox.exec("sleep 9")

    async def body() -> None:
        pool = SandboxPool(size=2)
        for _ in range(3):
            tasks = [asyncio.create_task(episode(pool)) for _ in range(5)]
            await asyncio.sleep(0.2)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        async with pool.sandbox(), pool.sandbox():
            pass
        await pool.close()

    run(body())


def test_many_callers_share_one_pool(run: Any) -> None:
    async def body() -> None:
        pool = SandboxPool.shared(size=2)
        assert SandboxPool.shared(size=2) is pool
        sources = [f"def f(x): return x * {i}" for i in range(60)]
        answers = await asyncio.gather(*(pool.run_python(source, "f", [[1], [2]]) for source in sources))
        assert answers == [[Outcome(i), Outcome(2 * i)] for i in range(60)]
        await close_shared_pools()
        assert SandboxPool.shared(size=2) is not pool

    run(body())


def test_warm_ones_are_there_at_once_and_refilled(run: Any) -> None:
    async def body() -> None:
        pool = SandboxPool(size=3)
        await pool.warm()
        assert len(pool._idle) == 3
        began = time.monotonic()
        held = [await pool.acquire(fresh=True) for _ in range(3)]
        assert time.monotonic() - began < 0.05 and len(pool._started) == 3, "none of them had to start"
        for sandbox in held:
            await pool.release(sandbox)
        used = set(held)
        async with pool.sandbox(fresh=True) as fresh:
            assert fresh not in used and sum(not sandbox.ended for sandbox in pool._started) <= 3
            async with pool.sandbox() as other:
                other.kill()
        for _ in range(6):
            await pool.warm(2)
            assert sum(sandbox.alive for sandbox in pool._idle) >= 2
            began, starts = time.monotonic(), len(pool._refills)
            async with pool.sandbox(fresh=True):
                assert time.monotonic() - began < 0.05 and starts == 0
        await pool.close()
        assert all(sandbox.ended for sandbox in used | {fresh})

    run(body())


def test_never_more_than_size_whatever_happens(run: Any) -> None:
    async def episode(pool: SandboxPool, number: int) -> None:
        async with pool.sandbox(fresh=number % 3 == 0) as sandbox:
            seen.append(sum(not other.ended for other in pool._started))
            assert (await sandbox.exec("ls -A; echo x > x")).output == ""
            if number % 5 == 0:
                sandbox.kill()

    async def body() -> None:
        pool = SandboxPool(size=2)
        await pool.warm(2)
        await asyncio.gather(*(episode(pool, number) for number in range(30)))
        await pool.close()

    seen: list[int] = []
    run(body())
    assert max(seen) <= 2 + 1, "one that was killed may still be on its way out"


def test_pools_are_shared_by_spec(run: Any) -> None:
    async def body() -> None:
        app = SandboxSpec(workdir="/app")
        assert SandboxPool.shared(2, app) is SandboxPool.shared(2, SandboxSpec(workdir="/app"))
        assert SandboxPool.shared(2, app) is not SandboxPool.shared(2)
        async with SandboxPool.shared(2, app).sandbox() as sandbox:
            assert (await sandbox.exec("pwd")).output == "/app\n"
        await close_shared_pools()

    run(body())
