"""Requests to a system whose drafter is a head, and what it accepted."""

import concurrent.futures

VERIFY_ALL = {"speculative_num_draft_tokens": 8}  # the target verifies draft tokens whatever they cost
PROMPTS = ["hello there", "so so so", "a b a b a b", "x"]


def ask_all(gateway, **options):
    def ask(prompt):
        answer = gateway.complete(prompt, ignore_eos=True, return_token_ids=True, **options)
        return answer["choices"][0]["token_ids"]

    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(ask, PROMPTS))


def accepted(gateway):
    return gateway.metric("outrider_accepted_draft_tokens_total")
