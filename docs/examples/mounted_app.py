"""Mount the OpenAI routes into an application that has routes of its own.

    pip install slotline uvicorn
    uvicorn mounted_app:app
    curl http://127.0.0.1:8000/llm/v1/models

The engine is opened by the application's lifespan and closed with it. The environment configures it:
SLOTLINE_MODEL, SLOTLINE_BACKEND and so on.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from slotline import EngineConfig, SamplingParams
from slotline.apis.openai import engine_lifespan, routes

engine = engine_lifespan(EngineConfig.from_sources({}))


async def front(request: Request) -> JSONResponse:
    """A route of the application's own; it may use the engine, too."""
    assert engine.engine is not None
    answer = await engine.engine.generate("The sea is", SamplingParams(max_tokens=16))
    return JSONResponse({"the sea is": answer.text})


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    """Start what the application needs. A lifespan of a mounted app would not run: enter the engine's here."""
    async with engine(app):
        yield


app = Starlette(routes=[Route("/", front), Mount("/llm", routes=routes(engine))], lifespan=lifespan)
