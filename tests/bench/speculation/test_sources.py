"""The program `bench sources`, with a simulated system."""

import contextlib
import json
import sys

from bench.speculation.sources import main
from tests.support.bench.server import Server, in_a_thread


def test_sides_alternate_in_one_system(report_folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["outrider", "bench", "sources", "x"])
    file = report_folder / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"number {i}"}) for i in range(4)))
    served, server = [], Server()

    @contextlib.contextmanager
    def serve(model, flags, dtype, most):
        served.append((model, flags))
        with in_a_thread(server) as url:
            yield url

    main([str(file), "--formats", "int8", "--rounds", "2", "--num-prompts", "4", "--concurrency", "2"], serve)
    assert served == [("default", ("--quantization", "int8"))]
    rows = json.loads((report_folder / "sources.json").read_text())["rows"]
    assert [(row["sources"], row["over"], row["same_text"]) for row in rows] == [
        ("all", "own sources", "4/4"), ("draft service", "none", "4/4"),
    ]  # fmt: skip
    measured = [body for body in server.requests if body["messages"][-1]["content"].startswith("number")]
    kinds = [(body["cache_salt"], json.dumps(body.get("speculation"))) for body in measured]
    own = '{"sources": ["lookup", "head", "quantized"]}'
    assert kinds[:8:2] == [("all", "null"), ("baseline", own), ("baseline", own), ("all", "null")]
    assert set(kinds[8:]) == {("all", '{"sources": ["draft"]}'), ("baseline", '"off"')}
