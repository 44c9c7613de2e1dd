"""lm-eval: a generating task and a choice among answers by their log-probabilities, over /v1/completions."""

import json
import pathlib
import re

from told import MODEL_FOLDER, URL, check, output_of

here = pathlib.Path("tasks").absolute()
here.mkdir(exist_ok=True)
SUMS = ((1, 1), (2, 2), (3, 1))
ROWS = [{"q": f"{a} + {b} =", "answers": [f" {a + b}", f" {a + b + 3}"], "right": 0} for a, b in SUMS]
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


@check("local-completions: a choice by log-probabilities, and texts")
def _():
    arguments = f"model=default,base_url={URL}/v1/completions,tokenizer={MODEL_FOLDER},tokenizer_backend=huggingface"
    arguments += ",num_concurrent=2,max_length=512"
    told = output_of(
        "lm_eval", "run", "--model", "local-completions", "--model_args", arguments,
        "--tasks", "own_choice,own_writing", "--include_path", str(here),
        HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1",
    )  # fmt: skip
    found = re.findall(r"\|\s*(acc|exact_match)\s*\|[^|]*\|\s*([\d.]+)", told)
    assert len(found) == 2, told[-400:]
    return ", ".join(f"{name} {value}" for name, value in found)
