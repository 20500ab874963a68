"""The two generation routes: which body they read, and how the answer looks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Generic, TypeVar

from slotline.apis.openai.answers import Answer, ChatAnswer, CompletionAnswer
from slotline.apis.openai.exchange import Exchange
from slotline.apis.openai.jobs import Job, chat_job, completion_job
from slotline.apis.openai.models import ChatBody, CompletionBody, GenerationBody, parse
from slotline.apis.openai.post import Asked, Post
from slotline.apis.openai.service import logprob_cap
from slotline.engine import Engine
from slotline.errors import UnsupportedParameter
from slotline.handle import RequestHandle

Body = TypeVar("Body", bound=GenerationBody)


class Generation(Post, Generic[Body]):
    """POST a body, get generated text. Subclasses say which body, and how the answer looks."""

    body: type[Body]

    async def reply(self, asked: Asked) -> Exchange:
        """Read the body and ask the engine."""
        body = parse(self.body, asked.data)
        self.service.check_model(body.model)
        job = self.to_job(body, asked.engine)
        return Exchange(self.service, asked, job, partial(self.to_answer, job, asked.engine))

    @abstractmethod
    def to_job(self, body: Body, engine: Engine) -> Job:
        """Translate a body."""

    @abstractmethod
    def to_answer(self, job: Job, engine: Engine, handle: RequestHandle) -> Answer:
        """Build what shapes the answer."""


class Completions(Generation[CompletionBody]):
    """/v1/completions."""

    body = CompletionBody
    prefix = "cmpl-"

    def to_job(self, body: CompletionBody, engine: Engine) -> Job:
        """Translate a body."""
        job = completion_job(body, logprob_cap(engine))
        if job.params.n > job.shown and not engine.capabilities.logprobs:
            message = "best_of is more than n, and this backend has no logprobs to pick the best by; leave it out"
            raise UnsupportedParameter(message, param="best_of")
        return job

    def to_answer(self, job: Job, engine: Engine, handle: RequestHandle) -> Answer:
        """Build what shapes the answer."""
        ids = handle.prompt_token_ids
        return CompletionAnswer(
            job,
            handle.request_id,
            int(handle.created),
            handle.warnings,
            vocabulary=engine.vocabulary,
            echoes=_echoes(job, engine, ids) if job.echo else (),
            prompt_ids=ids,
        )


class ChatCompletions(Generation[ChatBody]):
    """/v1/chat/completions."""

    body = ChatBody
    prefix = "chatcmpl-"

    def to_job(self, body: ChatBody, engine: Engine) -> Job:
        """Translate a body."""
        return chat_job(body, logprob_cap(engine))

    def to_answer(self, job: Job, engine: Engine, handle: RequestHandle) -> Answer:
        """Build what shapes the answer."""
        return ChatAnswer(job, handle.request_id, int(handle.created), handle.warnings)


def _echoes(job: Job, engine: Engine, ids: Sequence[Sequence[int]]) -> list[str]:
    """Return the text of each prompt: as it came, or decoded with its special tokens."""
    whole = job.params.truncate_prompt_tokens is None
    return [
        prompt if isinstance(prompt, str) and whole else engine.vocabulary.decode(prompt_ids, skip_special_tokens=False)
        for prompt, prompt_ids in zip(job.prompts, ids, strict=True)
    ]
