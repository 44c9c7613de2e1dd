"""lm-eval: a generating task and a choice among answers by their log-probabilities, over /v1/completions."""

import json
import pathlib
import re
import shutil
import urllib.request

from checks import MODEL_FOLDER, URL, check, output_of

here = pathlib.Path("tasks").absolute()
here.mkdir(exist_ok=True)
SUMS = ((1, 1), (2, 2), (3, 1))
ROWS = [{"q": f"{a} + {b} =", "answers": [f" {a + b}", f" {a + b + 3}"], "right": 0} for a, b in SUMS]
# After some of these answers the model ends at once.
ASKED = "<|im_start|>user\nWhat is the capital of France? Answer with one word.<|im_end|>\n<|im_start|>assistant\n"
ROWS.append({"q": ASKED, "answers": ["Paris", "The capital of France is Paris.", "London"], "right": 0})
(here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
FILES = {"data_files": {"test": str(here / "rows.jsonl")}}
DATA = {"dataset_path": "json", "dataset_kwargs": FILES, "test_split": "test"}
CHOICE = {
    "task": "own_choice", "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "{{answers}}",
    "doc_to_target": "{{right}}", "target_delimiter": "", "metric_list": [{"metric": "acc"}],
}  # fmt: skip
WRITE = {
    "task": "own_writing", "output_type": "generate_until", "doc_to_text": "{{q}}", "doc_to_target": "{{answers[0]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8}, "metric_list": [{"metric": "exact_match"}],
}  # fmt: skip
for task in (CHOICE, WRITE):
    (here / f"{task['task']}.yaml").write_text(json.dumps({**DATA, **task}))  # YAML, too


def asked(route, **body):
    request = urllib.request.Request(URL + route, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=60))


def tokens_of(text):
    return asked("/tokenize", prompt=text, add_special_tokens=False)["tokens"]


def scored(context, continuation):
    """Sum of a continuation's log-probabilities as a prompt, and whether the model ends after it."""
    whole, start = tokens_of(context + continuation), len(tokens_of(context))
    answer = asked("/v1/completions", prompt=whole, max_tokens=1, temperature=0, prompt_logprobs=0)["choices"][0]
    scored = zip(whole[start:], answer["prompt_logprobs"][start:], strict=True)
    return sum(entry[str(token)]["logprob"] for token, entry in scored), answer["finish_reason"] == "stop"


def samples(folder):
    """Of every answer of the task of choices: its question, itself, and the sum that lm-eval found."""
    for file in folder.rglob("samples_own_choice_*.jsonl"):
        for row in map(json.loads, file.read_text().splitlines()):
            for arguments, found in zip(row["arguments"].values(), row["filtered_resps"], strict=True):
                yield arguments["arg_0"], arguments["arg_1"], float(found[0])


@check("local-completions: a choice by log-probabilities, and texts")
def _():
    shutil.rmtree("results", ignore_errors=True)
    arguments = f"model=default,base_url={URL}/v1/completions,tokenizer={MODEL_FOLDER},tokenizer_backend=huggingface"
    arguments += ",num_concurrent=2,max_length=512"
    output = output_of(
        "lm_eval", "run", "--model", "local-completions", "--model_args", arguments,
        "--tasks", "own_choice,own_writing", "--include_path", str(here), "--log_samples", "--output_path", "results",
        HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1",
    )  # fmt: skip
    found = re.findall(r"\|\s*(acc|exact_match)\s*\|[^|]*\|\s*([\d.]+)", output)
    assert len(found) == 2, output[-400:]
    return ", ".join(f"{name} {value}" for name, value in found)


@check("each answer's sum is that of its log-probabilities, also where the model ends behind it")
def _():
    ends = []
    for context, continuation, found in samples(pathlib.Path("results")):
        # Blanks at the end of a question count as part of the answer there.
        blanks = context[len(context.rstrip()) :]
        wanted, last = scored(context.rstrip(), blanks + continuation)
        assert abs(found - wanted) < 1e-3, f"{continuation!r}: {found}, not {wanted}"
        ends.append(last)
    assert any(ends), "the model ends behind none of them"
    return f"{len(ends)} answers, of which {sum(ends)} end"
