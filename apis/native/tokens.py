"""/tokenize and /detokenize, with vLLM's fields."""

from __future__ import annotations

from typing import Any

from slotline.apis.openai.conversation import Conversation
from slotline.apis.openai.errors import ApiError
from slotline.apis.openai.models import Body, ConversationBody, parse
from slotline.apis.openai.post import Asked, Post
from slotline.errors import InvalidParameter


class TokenizeBody(ConversationBody):
    """Body of POST /tokenize: a text or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: str | list[Any] | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None


OF_TEXTS = ("add_special_tokens", "parse_special")
OF_MESSAGES = tuple(ConversationBody.model_fields)


class Tokenize(Post):
    """Show the token ids that a text or a conversation becomes."""

    async def reply(self, asked: Asked) -> dict[str, Any]:
        """Return the ids, how many there are, and how many fit."""
        body, engine = parse(TokenizeBody, asked.data), asked.engine
        if body.model is not None:
            self.service.check_model(body.model)
        _check_kind(body)
        if body.messages is not None:
            ids = await Conversation.of(body.messages, body).encode(engine)
        else:
            ids = await engine.tokenize(
                body.prompt or "",
                parse_special=body.parse_special is not False,
                add_special=body.add_special_tokens is not False,
            )
        spelt = [engine.vocabulary.spell(i) for i in ids] if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids, "token_strs": spelt}


def _check_kind(body: TokenizeBody) -> None:
    """Refuse both a text and messages, neither, and options that belong to the other."""
    if (body.prompt is None) == (body.messages is None):
        state = "missing" if body.prompt is None else "given, and so are messages"
        raise ApiError(400, f"prompt is {state}; allowed: either prompt or messages", param="prompt")
    other, names = ("messages", OF_MESSAGES) if body.messages is None else ("prompt", OF_TEXTS)
    for name in names:
        if getattr(body, name) is not None:
            raise ApiError(400, f"{name} is given; allowed: only with {other}", param=name)


class Detokenize(Post):
    """Show the text of token ids; control tokens are spelt out unless that is not wanted."""

    async def reply(self, asked: Asked) -> dict[str, Any]:
        """Return the text."""
        body, engine = parse(DetokenizeBody, asked.data), asked.engine
        if body.model is not None:
            self.service.check_model(body.model)
        most = engine.max_model_len
        if len(body.tokens) > most:
            raise InvalidParameter(f"tokens has {len(body.tokens)} ids; allowed: up to {most}", param="tokens")
        text = await engine.detokenize(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
        return {"prompt": text}
