"""An engine core behind a socket: ``pipe_core.py ADDRESS DEPTH``, run by test_pipe in another process."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Connection

from slotline import EngineConfig
from slotline.errors import SlotlineError
from slotline.loop import EngineCore
from slotline.plugins.echo import VOCAB, open_model
from slotline.testing.sim import SimBackend

CONFIG = EngineConfig(
    model="sim", max_slots=4, max_queue=40, max_model_len=128, kv_cache_tokens=256, block_size=4, max_batch_tokens=24
)


async def serve(pipe: Connection, depth: int) -> None:
    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(1)
    backend = SimBackend(depth, VOCAB)
    info = backend.load(CONFIG, open_model(CONFIG))
    core = EngineCore(CONFIG, backend, info, thread, lambda: backend)

    async def outputs() -> None:
        while True:
            pipe.send(("outputs", await core.next_outputs()))

    tasks = [asyncio.create_task(core.run()), asyncio.create_task(outputs())]
    while True:
        kind, content = await loop.run_in_executor(None, pipe.recv)
        if kind == "stop":
            break
        if kind == "abort":
            core.abort(content)
        else:
            try:
                core.submit(content)
                pipe.send(("accepted", None))
            except SlotlineError as error:
                pipe.send(("accepted", error))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await core.close()
    core.scheduler.check_integrity()
    pipe.send(("stopped", (core.scheduler.idle, core.stats())))


if __name__ == "__main__":
    with Client(sys.argv[1]) as pipe:
        asyncio.run(serve(pipe, int(sys.argv[2])))
