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
        for name, kind in (("page.css", "text/css"), ("page.js", "text/javascript"), ("sources.js", "text/javascript")):
            file = gateway.client.get(f"/page/{name}")
            assert file.headers["content-type"].startswith(kind)
            assert "http://" not in file.text
            assert "https://" not in file.text
        assert gateway.client.get("/v1/models").status_code == 401
        assert gateway.client.get("/page/%2e%2e/app.py").status_code == 404
    finally:
        assert gateway.stop() == 0


def test_the_starting_page_is_served_until_a_target_is_up(folder):
    gateway = Gateway(folder, [f"unix:{folder}/absent"], [])
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
async def test_a_prompt_runs_in_three_modes_side_by_side(gateway, tmp_path):
    async with Browser(CHROMIUM, tmp_path) as browser:
        await browser.open(f"{gateway.url}/")
        await browser.wait("document.getElementById('model').textContent === 'counting'")
        await browser.wait("document.getElementById('sources').textContent.includes('COUNTING')")
        await ask(browser, "compare")
        await browser.wait("document.querySelector('.verdict') !== null")
        titles = "[...document.querySelectorAll('.answer h2 span:first-child')].map(one => one.textContent)"
        assert await browser.run(titles) == ["draft service", "self-speculation", "off"]
        count = "document.querySelectorAll('.answer:nth-child({}) .text .token.{}').length"
        drafted, rejected = [await browser.run(count.format(1, kind)) for kind in ("draft", "rejected")]
        assert drafted > 0
        assert rejected > 0, "the third proposed token is always wrong"
        for place in (2, 3):
            assert await browser.run(count.format(place, "plain")) == 40
        texts = (
            "[...document.querySelectorAll('.answer')].map(a => [...a.querySelectorAll('.text .token:not(.rejected)')]"
        )
        assert len(set(await browser.run(f"{texts}.map(t => t.textContent).join(''))"))) == 1
        assert await browser.run("document.querySelectorAll('.same:not(.other)').length") == 2
        assert "The texts are equal" in await browser.run("document.querySelector('.verdict').textContent")
        figures = "document.querySelector('.answer:nth-child({}) .figures').textContent"
        assert f"draft service {drafted} of" in await browser.run(figures.format(1))
        assert "plain steps 40 of 40" in await browser.run(figures.format(2))
        about = "document.querySelector('.answer:nth-child(2) small').textContent"
        assert await browser.run(about) == "not running, so decoding is plain"
        assert browser.complaints == []


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.usefixtures("proposals_in_time")
async def test_one_mode_at_the_width_of_a_phone(gateway, tmp_path):
    async with Browser(CHROMIUM, tmp_path, (400, 800)) as browser:
        await browser.open(f"{gateway.url}/")
        await browser.wait("document.getElementById('model').textContent === 'counting'")
        for mode, kind in (("auto", "draft"), ("off", "plain")):
            await ask(browser, mode)
            await browser.wait("document.querySelectorAll('.answer:not([data-done])').length === 0")
            last = "[...document.querySelectorAll('.turn')].at(-1)"
            await browser.wait(f"{last}.querySelectorAll('.answer[data-done]').length === 1")
            assert await browser.run(f"{last}.querySelectorAll('.text .token.{kind}').length") > 0
        assert await browser.run("document.documentElement.scrollWidth <= window.innerWidth")
        assert await browser.run("document.querySelector('.verdict') === null")
        assert browser.complaints == []


async def ask(browser, mode):
    """Send a prompt whose answer has 40 tokens."""
    await browser.run(
        f"document.getElementById('mode').value = '{mode}';"
        "document.getElementById('tokens').value = 40;"
        "document.getElementById('prompt').value = 'A';"
        "document.getElementById('ask').requestSubmit()"
    )
