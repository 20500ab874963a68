"""/v1/embeddings: prompts as vectors, where the backend gives its hidden states."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from slotline.apis.openai.answers import notices_body
from slotline.apis.openai.errors import ApiError
from slotline.apis.openai.exchange import Exchange
from slotline.apis.openai.jobs import Job, prompts_of
from slotline.apis.openai.models import Body, parse
from slotline.apis.openai.post import Asked, Post
from slotline.embedding import EMBED_ONLY, embedding_of
from slotline.errors import InvalidParameter
from slotline.handle import RequestHandle
from slotline.plan import FloatArray
from slotline.request import Completion, Output, Usage


class EmbeddingBody(Body):
    """Body of POST /v1/embeddings."""

    model: str
    input: str | list[Any]
    cache_salt: str | None = None
    dimensions: int | None = None
    encoding_format: str | None = None
    priority: int | None = None

    renamed: ClassVar[Mapping[str, str]] = {"prompt": "input"}


class Embeddings(Post):
    """Embed texts or token ids: the last layer's output at the last token, scaled to length 1."""

    prefix = "embd-"
    renamed = EmbeddingBody.renamed

    async def reply(self, asked: Asked) -> Exchange:
        """Read the body and ask the engine."""
        body = parse(EmbeddingBody, asked.data)
        self.service.check_model(body.model)
        form = body.encoding_format or "float"
        if form not in ("float", "base64"):
            raise InvalidParameter.of("encoding_format", form, "float or base64")
        job = Job(
            model=body.model,
            prompts=prompts_of(body.input, "input"),
            params=EMBED_ONLY,
            stream=False,
            include_usage=False,
            cache_salt=body.cache_salt,
            priority=body.priority or 0,
            embed=True,
            renamed=body.renamed,
        )
        return Exchange(self.service, asked, job, partial(EmbeddingAnswer, body, form))


class EmbeddingAnswer:
    """The vectors in OpenAI's shape; they are never streamed."""

    stream_headers: Sequence[tuple[bytes, bytes]] = ()

    def __init__(self, body: EmbeddingBody, form: str, handle: RequestHandle) -> None:
        self._body = body
        self._form = form
        self._warnings = notices_body(handle.warnings)

    def whole(self, completions: Sequence[Completion], usage: Usage) -> dict[str, Any]:
        """Return the body."""
        vectors = [embedding_of(completion) for completion in completions]
        self._check_dimensions(len(vectors[0]))
        body = {
            "object": "list",
            "data": [{"object": "embedding", "index": i, "embedding": self._spelt(v)} for i, v in enumerate(vectors)],
            "model": self._body.model,
            "usage": {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens},
        }
        return {**body, "warnings": self._warnings} if self._warnings else body

    def piece(self, output: Output) -> bytes:
        """Return nothing: vectors come whole."""
        return b""

    def end(self, usage: Usage) -> bytes:
        """Return nothing: vectors come whole."""
        return b""

    def failed(self, error: ApiError) -> bytes:
        """Return nothing: vectors come whole."""
        return b""

    def _check_dimensions(self, own: int) -> None:
        """Refuse to cut a vector: what is left means something only for models made so."""
        wanted = self._body.dimensions
        if wanted is not None and wanted != own:
            raise InvalidParameter.of("dimensions", wanted, f"{own}, which this model has")

    def _spelt(self, vector: FloatArray) -> list[float] | str:
        if self._form == "base64":  # little-endian float32, which OpenAI's client asks for by itself
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        values: list[float] = vector.tolist()
        return values
