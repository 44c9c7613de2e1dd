"""Round trips of bare frames."""

from concurrent.futures import ThreadPoolExecutor

from bench.streams import pingpong


def test_echo_ends_with_its_connection(tmp_path):
    with ThreadPoolExecutor() as pool:
        echo = pool.submit(pingpong.serve, str(tmp_path / "echo"))
        assert pingpong.measure_frames(str(tmp_path / "echo"), [16], rounds=3)[0] > 0
        assert echo.result(20) is None
