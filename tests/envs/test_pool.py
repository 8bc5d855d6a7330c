"""Many episodes, few sandboxes."""

import asyncio
from typing import Any

import pytest
from argosy.envs import Outcome, Sandbox, SandboxPool, SandboxUnavailable, close_shared_pools


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
