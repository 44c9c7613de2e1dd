"""The page at `/docs` works where nothing else can be reached."""

import re


def test_everything_that_it_needs_comes_from_here(gateway):
    page = gateway.client.get("/docs")
    assert page.status_code == 200
    assert "http" not in re.sub(r"<!--.*?-->", "", page.text), "an address of somewhere else"
    assert page.headers["content-security-policy"].startswith("default-src 'self'")
    wanted = re.findall(r"(?:src|href)=\"([^\"]+)\"", page.text) + re.findall(r"url: '([^']+)'", page.text)
    kinds = {gateway.client.get(path).headers["content-type"].partition(";")[0] for path in wanted}
    assert kinds == {"text/javascript", "text/css", "image/png", "application/json"}
    script = gateway.client.get(next(path for path in wanted if path.endswith(".js")))
    assert "SwaggerUIBundle" in script.text
    assert "/v1/chat/completions" in gateway.client.get("/openapi.json").json()["paths"]


def test_there_is_nothing_else(gateway):
    assert gateway.client.get("/redoc").status_code == 404
    for name in ("redoc.standalone.js", "..%2Fcore.py", "nothing"):
        assert gateway.client.get(f"/docs/{name}").status_code == 404
