"""The page at /docs: Swagger UI from the package that carries its files, and from nowhere else."""

from __future__ import annotations

from importlib.resources.abc import Traversable

import anyio.to_thread
import swagger_ui_bundle
from starlette.types import Receive, Scope, Send

from slotline.apis.openai.errors import not_found, send_bytes, send_error, wrong_method

# What the page may ask for, by name: nothing else of the package is served, and no path leads out of it.
_FILES = {
    "swagger-ui.css": b"text/css; charset=utf-8",
    "swagger-ui-bundle.js": b"text/javascript; charset=utf-8",
    "favicon-32x32.png": b"image/png",
}
# Its own scripts and styles alone: a document cannot make the page load or send anything elsewhere.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_PAGE = b"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>slotline: HTTP API</title>
<link rel="icon" type="image/png" href="docs/favicon-32x32.png">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
_START = b"""SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#ui",
  deepLinking: true,
  validatorUrl: null,
  presets: [SwaggerUIBundle.presets.apis],
});
"""


class Swagger:
    """GET the page, its script, and the few files of Swagger UI that it needs."""

    def __init__(self) -> None:
        self._read: dict[str, bytes] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["method"] not in ("GET", "HEAD"):
            await send_error(send, wrong_method(scope["method"], ("GET", "HEAD")))
            return
        name = scope["path_params"].get("file")
        if name is None:
            await send_bytes(send, _PAGE, content_type=b"text/html; charset=utf-8", headers=_HEADERS)
        elif name == "start.js":
            await send_bytes(send, _START, content_type=_FILES["swagger-ui-bundle.js"], headers=_HEADERS)
        elif name in _FILES:
            await send_bytes(send, await self._file(name), content_type=_FILES[name], headers=_HEADERS)
        else:
            await send_error(send, not_found(f"/docs/{name}"))

    async def _file(self, name: str) -> bytes:
        """Return one of the files, read once and off the event loop."""
        if name not in self._read:
            root: Traversable = swagger_ui_bundle.swagger_ui_path
            self._read[name] = await anyio.to_thread.run_sync((root / name).read_bytes)
        return self._read[name]
