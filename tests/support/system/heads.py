"""Prompts for services with heads, their answers, and counts of accepted draft tokens."""

from __future__ import annotations

import concurrent.futures

HINTED = {"speculative_num_draft_tokens": 8}  # verify draft tokens whatever they cost
PROMPTS = ["hello there", "so so so", "a b a b a b", "x"]


def ask_all(gateway, **options):
    """Token ids of the answers to all prompts, asked at the same time."""

    def ask(prompt):
        answer = gateway.complete(prompt, ignore_eos=True, return_token_ids=True, **options)
        return answer["choices"][0]["token_ids"]

    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(ask, PROMPTS))


def accepted(gateway):
    """Draft tokens that were accepted so far."""
    return gateway.metric("outrider_accepted_draft_tokens_total")
