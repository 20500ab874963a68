"""The core in one process, text in another: the messages between them are plain data."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path

import pytest

from slotline import EngineConfig, SamplingParams
from slotline.errors import QueueFull, SlotlineError
from slotline.handle import RequestHandle
from slotline.intake import Intake
from slotline.output import OutputProcessor
from slotline.outputs import OutputBatch
from slotline.plugins.echo import VOCAB, open_model
from slotline.request import SequenceRequest
from slotline.testing.sim import SimBackend, sim_answer
from slotline.text import Vocabulary
from slotline.turns import Bell

CONFIG = EngineConfig(
    model="sim", max_slots=4, max_queue=40, max_model_len=128, kv_cache_tokens=256, block_size=4, max_batch_tokens=24
)


class PipeClient:
    """An EngineClient whose core is on the other end of a pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._news: asyncio.Queue[OutputBatch] = asyncio.Queue()
        self._accepted: asyncio.Queue[SlotlineError | None] = asyncio.Queue()
        self.stopped: asyncio.Future = asyncio.get_running_loop().create_future()

    async def listen(self) -> None:
        while not self.stopped.done():
            kind, content = await asyncio.to_thread(self._pipe.recv)
            if kind == "outputs":
                self._news.put_nowait(content)
            elif kind == "accepted":
                self._accepted.put_nowait(content)
            else:
                self.stopped.set_result(content)

    async def submit(self, requests: Sequence[SequenceRequest]) -> None:
        self._pipe.send(("submit", list(requests)))
        error = await self._accepted.get()
        if error is not None:
            raise error

    def abort(self, seq_ids: Sequence[int]) -> None:
        self._pipe.send(("abort", list(seq_ids)))

    async def next_outputs(self) -> OutputBatch:
        return await self._news.get()


@pytest.mark.parametrize("depth", [1, 2])
async def test_output_processor_and_core_speak_over_a_pipe(depth: int, tmp_path: Path) -> None:
    address = str(tmp_path / "core")
    with Listener(address) as listening:
        script = Path(__file__).with_name("pipe_core.py")
        process = subprocess.Popen([sys.executable, str(script), address, str(depth)])  # noqa: ASYNC220 - it returns at once
        here = await asyncio.to_thread(listening.accept)
    with here, process:
        client = PipeClient(here)
        listener = asyncio.create_task(client.listen())
        model = open_model(CONFIG)
        vocabulary = Vocabulary(model.tokenizer)
        intake = Intake(CONFIG, model, SimBackend(depth, VOCAB).capabilities, 128, VOCAB)
        processor = OutputProcessor(client.abort, lambda *_: None, lambda *_: None)

        async def pump() -> None:
            while True:
                processor.process(await client.next_outputs())
                bell.wake(len(bell))

        pumping = asyncio.create_task(pump())
        next_id, bell = 0, Bell()

        async def ask(prompt: bytes, params: SamplingParams) -> RequestHandle:
            nonlocal next_id
            resolved = intake.resolve(params)
            (sequence,) = intake.sequences(next_id, [list(prompt)], resolved)
            next_id += 1
            handle = RequestHandle(str(next_id), resolved.params, [list(prompt)], vocabulary, [], bell)
            handle.attach([sequence], lambda _: None)
            processor.register(handle)
            await client.submit([sequence])
            return handle

        whole = [sim_answer(list(b"prompt %d" % i), i, 40, VOCAB) for i in range(20)]
        texts = [vocabulary.decode(ids) for ids in whole]
        stops = [text[9:11] if i % 3 == 0 and len(text) > 12 else None for i, text in enumerate(texts)]
        handles = [
            await ask(b"prompt %d" % i, SamplingParams(seed=i, max_tokens=40, stop=stop))
            for i, stop in enumerate(stops)
        ]
        done = [(await h.completions())[0] for h in handles]
        for completion, ids, text, stop in zip(done, whole, texts, stops, strict=True):
            if stop is None:
                assert completion.token_ids == ids and completion.text == text
            else:
                assert completion.text == text[: text.index(stop)] and completion.stop_reason == stop
                assert completion.token_ids == ids[: len(completion.token_ids)]
        with pytest.raises(QueueFull, match="the limit is 44"):
            sequences = intake.sequences(1000, [[1]] * 45, intake.resolve(SamplingParams(max_tokens=1)))
            await client.submit(sequences)
        here.send(("stop", None))
        idle, stats = await asyncio.wait_for(client.stopped, 30)
        assert idle and stats.active_blocks == 0
        pumping.cancel()
        await listener
    assert process.returncode == 0
