"""Numbers of requests, and archives of files, as the facades convert them."""

import pytest
from smg_grpc_proto import vllm_engine_pb2

from gateway.facade.bundle import bundle
from gateway.facade.requests import number


@pytest.mark.parametrize("value", [0.7, 0.1, 1.0, 0.0, 1e-7, 0.999999])
def test_floats_are_converted_to_the_shortest_decimal(value):
    sent = vllm_engine_pb2.SamplingParams(top_p=value).top_p
    assert number(sent) == value


def test_an_archive_depends_on_its_files_only():
    files = {"b": b"2" * 200_000, "a": b"1"}
    assert bundle(files) == bundle(dict(reversed(files.items())))
    assert bundle(files)[1] != bundle({"a": b"1"})[1]
