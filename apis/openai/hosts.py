"""Against DNS rebinding: a server on the loopback address answers for loopback names only."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from slotline.apis.openai.errors import ApiError, send_error, shorten


class LocalNamesOnly:
    """Refuse requests whose Host header names another machine.

    A web page can point a name of its own at 127.0.0.1, and a browser then takes this server for
    the page's own; only the Host header tells.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what is meant for this machine."""
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host", "")
            if not is_loopback(_name_of(host)):
                message = f"this server answers for localhost only; the Host header names {shorten(repr(host))}"
                await send_error(send, ApiError(421, message, code="wrong_host"))
                return
        await self._app(scope, receive, send)


def is_loopback(name: str) -> bool:
    """Tell whether a host name or address is this machine's loopback interface."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _name_of(host: str) -> str:
    """Return the host of ``host:port``."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
