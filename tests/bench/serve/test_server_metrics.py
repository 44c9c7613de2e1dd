"""Speculation figures from servers' /metrics pages."""

import pytest

from bench.serve import server_metrics

VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {drafts}
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{{engine="0",model_name="m"}} 1.76e+09
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {drafted}
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="1"}} {second}
"""


OURS = """\
# TYPE outrider_verification_steps_total counter
outrider_verification_steps_total {steps}
# TYPE outrider_generated_tokens_total counter
outrider_generated_tokens_total {tokens}
# TYPE outrider_verified_draft_tokens_total counter
outrider_verified_draft_tokens_total {verified}
# TYPE outrider_accepted_draft_tokens_total counter
outrider_accepted_draft_tokens_total {accepted}
"""


SGLANG = """\
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{engine_type="unified",model_name="m",tp_rank="0"} 2.5
# TYPE sglang:spec_accept_rate gauge
sglang:spec_accept_rate{engine_type="unified",model_name="m",tp_rank="0"} 0.5
"""


def test_counters_are_read_before_and_after():
    before = server_metrics.read(VLLM.format(drafts=10, drafted=30, accepted=20, first=10, second=10))
    after = server_metrics.read(VLLM.format(drafts=30, drafted=90, accepted=40, first=25, second=15))
    found = server_metrics.speculation(before, after)
    assert found.accept_length == 2.0
    assert found.acceptance_rate == pytest.approx(1 / 3)
    assert found.per_position == (0.75, 0.25)
    assert server_metrics.speculation(after, after) is None, "nothing was drafted in between"
    ours = server_metrics.speculation(
        server_metrics.read(OURS.format(steps=5, tokens=5, verified=0, accepted=0)),
        server_metrics.read(OURS.format(steps=15, tokens=25, verified=40, accepted=10)),
    )
    assert (ours.accept_length, ours.acceptance_rate) == (2.0, 0.25)
    assert server_metrics.speculation({}, server_metrics.read(SGLANG)).accept_length == 2.5
    assert server_metrics.read("<html>not found</html>") == {}
    assert server_metrics.speculation(server_metrics.read(None), server_metrics.read("")) is None


def test_a_restarted_server_has_no_figures():
    full = {"drafts": 10, "drafted": 30, "accepted": 20, "first": 10, "second": 10}
    batch_step = {"steps": 9, "tokens": 90, "verified": 90, "accepted": 81}
    few = {"steps": 8, "tokens": 8, "verified": 0, "accepted": 0}
    for page, more, less in ((VLLM, full, dict.fromkeys(full, 4)), (OURS, batch_step, few)):
        before, after = (server_metrics.read(page.format(**numbers)) for numbers in (more, less))
        assert server_metrics.speculation(before, after) is None
    lower = server_metrics.read(OURS.format(steps=12, tokens=20, verified=95, accepted=4))
    assert server_metrics.speculation(server_metrics.read(OURS.format(**batch_step)), lower) is None


def test_gauges_of_an_earlier_load_are_ignored():
    """SGLang's counter exists and does not grow, while its gauges keep the values of an earlier load."""
    calls = "# TYPE sglang:spec_verify_calls_total counter\nsglang:spec_verify_calls_total{{}} {}\n"
    calls += "# TYPE sglang:generation_tokens_total counter\nsglang:generation_tokens_total{{}} {}\n"
    before, after = (server_metrics.read(SGLANG + calls.format(*counts)) for counts in ((10, 30), (20, 70)))
    assert server_metrics.speculation(before, after).accept_length == 4.0
    assert server_metrics.speculation(after, server_metrics.read(SGLANG + calls.format(20, 90))) is None
    assert server_metrics.speculation(after, before) is None, "the server restarted in between"
