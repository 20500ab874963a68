"""Embed an engine in an async application: many requests at once, one of them given up.

python embed_async.py [MODEL] [BACKEND]
"""

import asyncio
import sys

import slotline

QUESTIONS = ["The capital of France is", "The sea is", "Two and two make"]


async def ask(engine: slotline.Engine, prompt: str) -> str:
    """Collect one answer; leaving the loop would abort it."""
    pieces = []
    async for out in engine.stream(prompt, slotline.SamplingParams(max_tokens=12, temperature=0)):
        pieces.append(out.text)
    return "".join(pieces)


async def main(model: str, backend: str) -> None:
    """Open the engine, use it from several tasks, close it."""
    async with slotline.Engine.open(model, backend=backend, max_slots=4) as engine:
        async with asyncio.TaskGroup() as group:
            asked = {prompt: group.create_task(ask(engine, prompt)) for prompt in QUESTIONS}
        for prompt, task in asked.items():
            print(f"{prompt!r} -> {task.result()!r}")

        # A task that is cancelled frees its slot and its memory at once.
        forgotten = asyncio.create_task(ask(engine, "Once upon a time"))
        await asyncio.sleep(0)
        forgotten.cancel()
        await asyncio.wait([forgotten])

        done = await engine.generate([{"role": "user", "content": "Say hello."}], slotline.SamplingParams(max_tokens=8))
        print(f"chat -> {done.text!r} ({done.finish_reason}, {done.usage.completion_tokens} tokens)")


if __name__ == "__main__":
    asyncio.run(main(*(sys.argv[1:] + ["smollm2-135m", "auto"][len(sys.argv) - 1 :])))
