"""What a browser and curl see at / and /docs: links, and nothing about this server's models."""

import re
from pathlib import Path

import httpx
import pytest
from tests.server.conftest import MakeState

from hone.server.http.app import create_apps
from hone.types import ModelSpec

BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
KEY = {"Authorization": "Bearer secret"}


@pytest.mark.parametrize("port", [0, 1], ids=["control", "inference"])
async def test_every_link_of_the_first_page_leads_somewhere(make_state: MakeState, port: int):
    state = make_state(api_key="secret")
    transport = httpx.ASGITransport(create_apps(state)[port])
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        page = (await http.get("/", headers=BROWSER)).text
        links = re.findall(r'href="([^"]+)"', page)
        assert {"/docs", "/health", "/openapi.json", "/v1/models"} < set(links)
        assert ("/metrics" in links) == ("/v1/training/jobs" in links) == (port == 0)
        answers = [await http.get(link, headers=BROWSER | KEY) for link in links]
        assert [answer.status_code for answer in answers] == [200] * len(links)
        body = (await http.get("/")).json()
        assert {*body["links"], "/"} == set(links)
        assert (body["name"], body["routes"]) == ("hone", "/openapi.json")
    state.store.close()


async def test_the_pages_need_no_key_and_tell_nothing_of_the_server(
    make_state: MakeState, tiny_model: Path
):
    state = make_state(api_key="secret", port=7001, inference_port=8001)
    state.models.register(ModelSpec(name="payroll", project="acme", base_model=str(tiny_model)))
    for app in create_apps(state):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            for headers in ({}, BROWSER):
                for path in ("/", "/docs"):
                    answer = await http.get(path, headers=headers)
                    assert answer.status_code == 200
                    for own in ("payroll", "acme", tiny_model.name, "7001", "8001", "secret"):
                        assert own not in answer.text
                    # Without internet access a page that loads something stays blank.
                    assert "<script" not in answer.text and "http" not in answer.text
            assert (await http.get("/v1/models")).status_code == 401
            assert (await http.get("/openapi.json")).status_code == 401
    state.store.close()


async def test_docs_lists_every_route_of_the_port(make_state: MakeState):
    state = make_state()
    for app in create_apps(state):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            document = (await http.get("/openapi.json")).json()
            listed = (await http.get("/docs")).text.splitlines()[::2]
            assert sorted(listed) == sorted(
                f"{method.upper()} {path}"
                for path, operations in document["paths"].items()
                for method in operations
            )
            page = (await http.get("/docs", headers=BROWSER)).text
            assert all(f"<code>{route}</code>" in page for route in listed)
            missing = (await http.get("/nothing")).json()["error"]["message"]
            assert "GET /docs lists those of this port" in missing
    state.store.close()
