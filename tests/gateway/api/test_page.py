"""The page at `/`: its files, and a chat in a real browser where one is installed."""

import contextlib
import shutil

import httpx
import pytest

from tests.support.gateway.browser import Browser
from tests.support.gateway.services import Gateway, until

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def page_of(gateway):
    with contextlib.suppress(httpx.TransportError):
        return gateway.client.get("/")
    return None


def test_the_page_requires_no_key_and_no_external_resources(folder, target, draft):
    gateway = Gateway(folder, [target.address], [draft.address], api_key=["secret"]).wait()
    try:
        page = gateway.client.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'self'" in page.headers["content-security-policy"]
        for name, kind in (("page.css", "text/css"), ("page.js", "text/javascript"), ("answer.js", "text/javascript")):
            file = gateway.client.get(f"/page/{name}")
            assert file.headers["content-type"].startswith(kind)
            assert "http://" not in file.text
            assert "https://" not in file.text
        assert gateway.client.get("/v1/models").status_code == 401
        assert gateway.client.get("/page/%2e%2e/app.py").status_code == 404
    finally:
        assert gateway.stop() == 0


def test_the_starting_page_is_served_until_a_target_is_up(folder):
    gateway = Gateway(folder, [f"unix:{folder}/nobody"], [])
    try:
        until(lambda: page_of(gateway) is not None, seconds=60)
        page = page_of(gateway)
        assert page.status_code == 503
        assert page.headers["content-type"].startswith("text/html")
        assert "starting" in page.text
    finally:
        gateway.stop()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.usefixtures("proposals_in_time")
async def test_a_chat_shows_which_tokens_were_drafted(gateway, tmp_path):
    async with Browser(CHROMIUM, tmp_path) as browser:
        await browser.open(f"{gateway.url}/")
        await browser.wait("document.getElementById('model').textContent === 'counting'")
        await browser.run(
            "document.getElementById('compare').checked = true;"
            "document.getElementById('tokens').value = 40;"
            "document.getElementById('prompt').value = 'A';"
            "document.getElementById('ask').requestSubmit()"
        )
        await browser.wait("document.querySelectorAll('.answer[data-done]').length === 2")
        count = "document.querySelectorAll('.answer:nth-child({}) .token.{}').length"
        drafted, rejected = [await browser.run(count.format(1, kind)) for kind in ("accepted", "rejected")]
        assert drafted > 0
        assert rejected > 0, "the third proposed token is always wrong"
        assert await browser.run(count.format(2, "plain")) == 40
        texts = "[...document.querySelectorAll('.answer')].map(a => [...a.querySelectorAll('.token:not(.rejected)')]"
        one, other = await browser.run(f"{texts}.map(t => t.textContent).join(''))")
        assert one == other
        assert "The same text" in await browser.run("document.querySelector('.verdict').textContent")
        assert browser.complaints == []
