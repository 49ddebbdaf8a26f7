# SPDX-License-Identifier: Apache-2.0
"""The web page: static files that scripts/setup builds from web/ into the folder `static`."""

from __future__ import annotations

import html
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Route

STATIC = Path(__file__).with_name("static")
POLICY = (  # Content-Security-Policy
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; font-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Connection": "close",  # nobody has shown a token: the place is for others
}
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_FOREVER = "public, max-age=31536000, immutable"
"""Names of built files hold a hash of their content."""
_MISSING = (
    "<!doctype html><html lang=en><meta charset=utf-8><title>Sonde</title>"
    "<h1>The web page is not built</h1><p>This server answers questions at <code>/v1/…</code>, as"
    " <a href=/openapi.json>/openapi.json</a> describes. To build the page, run"
    " <code>scripts/setup build</code> in the source tree ({why}), then load this page again."
)


def routes(static: Path = STATIC) -> list[Route]:
    """The routes of `/` and of the files that it loads."""
    files = {path.name: path for path in sorted(static.glob("assets/*")) if path.is_file()}

    async def page(_request: Request) -> Response:
        index = static / "index.html"
        if not index.is_file():
            text = _MISSING.format(why=html.escape("Node.js and npm are needed"))
            return HTMLResponse(text, 503, HEADERS)
        return FileResponse(
            index, media_type="text/html", headers=HEADERS | {"Cache-Control": "no-cache"}
        )

    async def asset(request: Request) -> Response:
        # Looked up among the names of the folder, so that no path of a request is opened.
        name = request.path_params["name"]
        path = files.get(name) or {one.name: one for one in static.glob("assets/*")}.get(name)
        if path is None or not path.is_file() or path.suffix not in _TYPES:
            return Response("no such file\n", 404, HEADERS, "text/plain")
        packed = path.with_name(f"{path.name}.gz")
        headers = HEADERS | {"Cache-Control": _FOREVER, "Vary": "Accept-Encoding"}
        if packed.is_file() and _takes_gzip(request.headers):
            headers["Content-Encoding"] = "gzip"
            path = packed
        return FileResponse(path, media_type=_TYPES[Path(name).suffix], headers=headers)

    return [Route("/", page), Route("/assets/{name}", asset)]


def _takes_gzip(headers: Headers) -> bool:
    named = (part.split(";")[0].strip() for part in headers.get("accept-encoding", "").split(","))
    return "gzip" in named
