"""The page at `/docs` works without external resources."""

import re


def test_the_docs_page_has_no_external_resources(gateway):
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


def test_other_files_of_the_docs_page_are_404(gateway):
    assert gateway.client.get("/redoc").status_code == 404
    for name in ("redoc.standalone.js", "..%2Fcore.py", "nothing"):
        assert gateway.client.get(f"/docs/{name}").status_code == 404
