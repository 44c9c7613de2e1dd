"""What the self-test of a draft reports."""

import pytest

from gateway.orchestration.self_test import Answers, Finding


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        # All predictions were right, and no step was shorter for it: the line says why both are true.
        (
            Answers(160, 160),
            "verified no draft tokens, which came late or do not pay here at present (accept length 1.00)",
        ),
        (Answers(80, 160, 120, 80), "accepted 80 of 120 draft tokens in 80 steps (accept length 2.00)"),
    ],
)
def test_an_accept_length_is_explained(answers, words):
    assert str(answers) == f"the target {words}"
    finding = Finding("STANDALONE", 13, 13)
    assert str(finding) == "STANDALONE predicted 13 of the 13 tokens that it had time for (100%)"
    assert not finding.broken
