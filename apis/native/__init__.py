"""Routes beyond OpenAI's: tokens, aborting, and LMDeploy v0.1's conversations that the server keeps."""

from __future__ import annotations

from starlette.routing import BaseRoute, Route

from slotline.apis.native.abort import Abort
from slotline.apis.native.interactive import Interactive
from slotline.apis.native.sessions import Sessions
from slotline.apis.native.tokens import Detokenize, Tokenize
from slotline.apis.openai.service import Service


def native_routes(service: Service) -> list[BaseRoute]:
    """Return the routes; the two of conversations share what is kept."""
    settings = service.settings
    sessions = Sessions(settings.max_sessions, settings.session_timeout)
    interactive = Interactive(service, sessions)
    return [
        Route("/tokenize", Tokenize(service), name="tokenize"),
        Route("/detokenize", Detokenize(service), name="detokenize"),
        Route("/abort", Abort(service, sessions), name="abort"),
        Route("/v1/chat/interactive", interactive, name="interactive"),
        Route("/generate", interactive, name="generate"),
    ]
