"""API keys: who may ask, under which name; nothing here ever shows a key."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from slotline.apis.openai.errors import ApiError, send_error
from slotline.errors import ConfigError

KEY_VARIABLE = "SLOTLINE_API_KEY"
OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})  # whoever restarts a server has no key
CLIENT = "slotline.client"  # where a scope says whose share of the queue a request takes


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as the server keeps it: the name of its holder, and a digest."""

    name: str
    digest: bytes

    @classmethod
    def of(cls, key: str, name: str | None = None) -> ApiKey:
        """Keep a key; a key without a name is called after its digest."""
        digest = hashlib.sha256(key.encode()).digest()
        return cls(name or f"key-{digest.hex()[:8]}", digest)


class ApiKeys:
    """The keys that a server accepts."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    @classmethod
    def from_sources(cls, file: str | None = None, environ: Mapping[str, str] = os.environ) -> ApiKeys:
        """Read keys from a file, and one from SLOTLINE_API_KEY. A command line would show them to other users.

        A line of the file is a key, or a name and a key; empty ones and those that begin with # do not count.

        Raises:
            ConfigError: the file cannot be read, has no key, or has a line that is neither.
        """
        keys = _read(Path(file)) if file is not None else []
        if environ.get(KEY_VARIABLE):
            keys.append(ApiKey.of(environ[KEY_VARIABLE]))
        return cls(keys)

    def holder(self, given: str) -> str | None:
        """Return the name of a key's holder; None if the key is not known.

        Every key is compared, in a time that depends on none of them.
        """
        digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
        found: str | None = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key.name
        return found


class RequireKey:
    """Let only holders of a key pass, on every path but those of health.

    Args:
        app: what is guarded.
        keys: those accepted.
        open_paths: exact paths that need no key.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, *, open_paths: Iterable[str] = OPEN_PATHS) -> None:
        self._app = app
        self._keys = keys
        self._open = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, or note the holder's name in the scope and go on."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in self._open):
            await self._app(scope, receive, send)
            return
        holder = self._keys.holder(_token_of(scope))
        if holder is None:
            message = "no valid API key was given; send the header Authorization: Bearer KEY"
            headers = {"WWW-Authenticate": "Bearer"}
            error = ApiError(401, message, type="authentication_error", code="invalid_api_key", headers=headers)
            await send_error(send, error)
            return
        scope[CLIENT] = holder  # for the log
        await self._app({**scope, "client": (holder, 0)}, receive, send)  # shares of the queue go by the client


def _token_of(scope: Scope) -> str:
    scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _read(file: Path) -> list[ApiKey]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise ConfigError(f"the API key file {file} cannot be read: {reason}") from None
    keys: list[ApiKey] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2:
            raise ConfigError(f"line {number} of the API key file {file} is neither a key nor a name and a key")
        keys.append(ApiKey.of(words[-1], words[0] if len(words) == 2 else None))
    if not keys:
        raise ConfigError(f"the API key file {file} has no key; write one a line")
    names = [key.name for key in keys]
    if len(set(names)) != len(names):
        raise ConfigError(f"the API key file {file} has a name, or a key, twice")
    return keys
