"""The first page of a port, and the list of its routes.

In:   the OpenAPI document of the app that answers
Out:  GET / and GET /docs: HTML for browsers, JSON and text for other clients

The pages need no key, so they have nothing of this server's in them but its version: no names, no
ports, no paths. They load nothing, no script and no style, so they work without internet access.
"""

from html import escape
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

import hone

LINKS = {
    "/docs": "every route of this port, with its description",
    "/openapi.json": "the same for programs: the OpenAPI document",
    "/health": "whether the server and each of its parts work",
    "/metrics": "counters, for Prometheus",
    "/v1/models": "the names that requests can use",
    "/v1/training/models": "the models that are trained here",
    "/v1/training/jobs": "training jobs, the newest first",
}
"""Paths that a reader may start with; a page has those that its port has."""
COMMANDS = {
    "hone finetune --config_file=train.yml": "train the agent of a YAML file",
    "hone models list": "the base models on this machine",
    "hone --help": "every command",
}
METHODS = ("get", "post", "put", "patch", "delete")
_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
_STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}
td{padding:.1em 1em .1em 0;vertical-align:top}code{white-space:nowrap}"""


def routes() -> APIRouter:
    """GET / and GET /docs."""
    router = APIRouter()

    @router.get("/", tags=["vllm"], response_model=None)
    async def root(request: Request) -> Response:
        """The name and version of this server, and where to go on."""
        links = _links(request)
        if _is_browser(request):
            return _html("hone", _first_page(links))
        body = {"name": "hone", "version": hone.__version__, "routes": "/openapi.json"}
        return JSONResponse({**body, "links": links})

    @router.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        listed = _operations(request)
        if _is_browser(request):
            return _html("Routes", _table(listed))
        return PlainTextResponse(
            "".join(f"{route}\n    {what}\n" for route, what in listed.items())
        )

    return router


def _is_browser(request: Request) -> bool:
    return "text/html" in request.headers.get("accept", "")


def _links(request: Request) -> dict[str, str]:
    paths = {*request.app.openapi()["paths"], "/docs", "/openapi.json"}
    return {path: what for path, what in LINKS.items() if path in paths}


def _operations(request: Request) -> dict[str, str]:
    """METHOD PATH of every route, and the first paragraph of its description."""
    document: dict[str, dict[str, Any]] = request.app.openapi()["paths"]
    return {
        f"{method.upper()} {path}": _summary(operations[method])
        for path, operations in document.items()
        for method in METHODS
        if method in operations
    }


def _summary(operation: dict[str, Any]) -> str:
    text = operation.get("description") or operation.get("summary") or ""
    return " ".join(text.partition("\n\n")[0].split())


def _first_page(links: dict[str, str]) -> str:
    rows = {f'<a href="{path}">{path}</a>': what for path, what in links.items()}
    clients = (
        "<p>The base URL for OpenAI clients is this address with <code>/v1</code>; for Anthropic's, "
        "this address. If the server has a key, send it: <code>Authorization: Bearer KEY</code>. "
        "Only <code>/</code>, <code>/docs</code> and <code>/health</code> need none.</p>"
    )
    return f"{_rows(rows)}{clients}<h2>Commands</h2>{_table(COMMANDS)}"


def _table(entries: dict[str, str]) -> str:
    return _rows({f"<code>{escape(name)}</code>": what for name, what in entries.items()})


def _rows(entries: dict[str, str]) -> str:
    rows = (f"<tr><td>{name}</td><td>{escape(what)}</td></tr>" for name, what in entries.items())
    return f"<table>{''.join(rows)}</table>"


def _html(title: str, content: str) -> HTMLResponse:
    head = f'<meta charset="utf-8"><title>{title} - hone</title><style>{_STYLE}</style>'
    text = f"<!doctype html><html lang=en><head>{head}</head><body><h1>{title}</h1>"
    version = f'<p>hone {escape(hone.__version__)} - <a href="/">start</a></p>'
    return HTMLResponse(f"{text}{content}{version}</body></html>", headers=_HEADERS)
