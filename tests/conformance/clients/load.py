"""aiperf: load whose lengths are asked for, requests that it cancels, and whether its counts are the server's."""

import json
import pathlib
import re
import urllib.request

from checks import MODEL_FOLDER, URL, check, output_of

COUNT, PROMPT, ANSWER = 16, 64, 24


def profile(folder: str, *options: str) -> dict:
    """The report of a run. Without the chat template, aiperf's prompts would have fewer than `PROMPT` tokens."""
    output_of(
        "aiperf", "profile", "--model", "default", "--url", URL, "--streaming", "--ui", "none",
        "--tokenizer", MODEL_FOLDER, "--apply-chat-template", "--artifact-dir", folder, "--random-seed", "1",
        "--request-count", str(COUNT), "--concurrency", "4", "--synthetic-input-tokens-mean", str(PROMPT),
        "--extra-inputs", "ignore_eos:true", *options,
    )  # fmt: skip
    return json.loads(pathlib.Path(folder, "profile_export_aiperf.json").read_text())


def counted(name: str) -> float:
    """A counter of the server, over all its labels."""
    text = urllib.request.urlopen(f"{URL}/metrics", timeout=30).read().decode()
    return sum(float(number) for number in re.findall(rf"^{name}(?:{{.*}})? (\S+)", text, re.MULTILINE))


# Names of the same thing in its report and in the server's /metrics.
SPECULATION = {
    "total_spec_decode_steps": "vllm:spec_decode_num_drafts_total",
    "total_draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "total_accepted_draft_tokens": "vllm:spec_decode_num_accepted_tokens_total",
}


@check("a load of chats: no errors, lengths as asked for, speculation as the server counted it")
def _():
    before = {theirs: counted(ours) for theirs, ours in SPECULATION.items()}
    report = profile("chats", "--endpoint-type", "chat", "--output-tokens-mean", str(ANSWER))
    assert report["error_summary"] == [], report["error_summary"]
    assert report["request_count"]["avg"] == COUNT
    prompt = report["usage_prompt_tokens"]
    assert prompt["min"] == prompt["max"] == PROMPT, prompt
    assert report["total_usage_completion_tokens"]["avg"] == COUNT * ANSWER
    found = {theirs: counted(ours) - before[theirs] for theirs, ours in SPECULATION.items()}
    reported = {theirs: report[theirs]["avg"] if theirs in report else 0 for theirs in SPECULATION}
    assert found == reported, f"{found}, not {reported}"
    drafts, _, accepted = found.values()
    return f"{COUNT} requests of {PROMPT} and {ANSWER} tokens, {accepted:.0f} accepted in {drafts:.0f} drafts"


@check("requests that are cancelled on the way disturb no others")
def _():
    report = profile("cancelled", "--endpoint-type", "completions", "--output-tokens-mean", "64",
                   "--request-cancellation-rate", "50", "--request-cancellation-delay", "0.1")  # fmt: skip
    kinds = {row["error_details"]["type"]: row["count"] for row in report["error_summary"]}
    assert set(kinds) == {"RequestCancellationError"}, kinds
    assert report["request_count"]["avg"] + sum(kinds.values()) == COUNT
    assert report["usage_completion_tokens"]["min"] == 64
    assert counted("outrider_running_requests") == 0
    return f"{sum(kinds.values())} of {COUNT} were cancelled"
