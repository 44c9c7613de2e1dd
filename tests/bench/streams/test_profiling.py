"""Attribution of py-spy samples to components."""

from bench.streams.profiling import shares


def test_samples_belong_to_the_innermost_known_component():
    raw = (
        "main (gateway/process/app.py:1);next (gateway/generation.py:3);split (outrider/wire/arrays.py:30) 3\n"
        "main (gateway/process/app.py:1);send (uvicorn/protocols/http/httptools_impl.py:50);write (asyncio/x.py:1) 5\n"
        "thread (1);run (threading.py:1) 2\n"
    )
    assert shares(raw) == [
        {"part": "uvicorn: HTTP and the clients' sockets", "share": "50%"},
        {"part": "gateway: frames of the services", "share": "30%"},
        {"part": "gRPC: polling thread", "share": "20%"},
    ]
