"""Command lines from the documentation of SGLang, SGL-JAX and slime, without their launchers, and their plans."""

import shlex

from outrider.config import ServeConfig, read_flags
from outrider.supervisor.dry_run import make_plan

_LLAMA2 = "--model meta-llama/Llama-2-7b-chat-hf --speculative-algorithm EAGLE"
_LLAMA2 += " --speculative-draft-model-path lmsys/sglang-EAGLE-llama2-chat-7B"
_LLAMA3 = "--model meta-llama/Meta-Llama-3-8B-Instruct --speculative-algorithm EAGLE"
_LLAMA3 += " --speculative-draft-model-path lmsys/sglang-EAGLE-LLaMA3-Instruct-8B"
_EAGLE = f"{_LLAMA2} --speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16"
_EAGLE += " --mem-fraction-static 0.7 --cuda-graph-max-bs 8 --log-level warning"
_QWEN = "--model Qwen/Qwen2.5-7B-Instruct"
_STANDALONE = f"{_QWEN} --speculative-algorithm STANDALONE --speculative-draft-model-path Qwen/Qwen2.5-1.5B-Instruct"
_STANDALONE += " --speculative-num-steps 4 --speculative-eagle-topk {} --speculative-num-draft-tokens {}"
_STANDALONE += " --mem-fraction-static 0.7 --cuda-graph-max-bs 8 --log-level warning"
_SGL_JAX = (
    "--model-path Qwen/Qwen3-32B --trust-remote-code --device=tpu --mem-fraction-static=0.8 --max-prefill-tokens=4096 "
    "--max-running-requests=16 --decode-log-interval=1 --attention-backend=fa --dtype=bfloat16 --port 30000 "
    "--host 0.0.0.0 --disable-overlap-schedule --tp-size 4 --speculative-algorithm EAGLE3 "
    "--speculative-draft-model-path AngelSlim/Qwen3-32B_eagle3 "
    "--speculative-draft-model-revision 67caf31f9062d7ab64872e0a111d499bc16cd205 --page-size 64 "
    "--speculative-eagle-topk 1 --speculative-num-steps 3 --speculative-num-draft-tokens 4"
)
_SLIME = (
    "--rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.8 --sglang-speculative-algorithm EAGLE3 "
    "--sglang-speculative-draft-model-path /models/sglang-EAGLE3-LLaMA3.1-Instruct-8B "
    "--sglang-speculative-num-steps 5 --sglang-speculative-eagle-topk 8 --sglang-speculative-num-draft-tokens 32 "
    "--sglang-max-running-requests {} --sglang-dtype float16 --sglang-context-length 2048 "
    "--sglang-attention-backend fa3"
)
GRAPH_SIZES = (*range(1, 33), *range(40, 65, 8), *range(80, 161, 16))  # $(seq 1 32) $(seq 40 8 64) $(seq 80 16 160)

COMMAND_LINES = {
    "1": _EAGLE,
    "2": f"{_EAGLE} --enable-torch-compile --torch-compile-max-bs 8",
    "3": f"{_LLAMA2} --speculative-num-steps 5 --speculative-eagle-topk 8 --speculative-num-draft-tokens 64 "
    "--mem-fraction 0.6 --enable-torch-compile --cuda-graph-max-bs 2",
    "4": f"{_LLAMA3} --speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16 "
    "--speculative-token-map thunlp/LLaMA3-Instruct-8B-FR-Spec/freq_32768.pt --mem-fraction-static 0.7 "
    "--cuda-graph-max-bs 8 --dtype float16 --log-level warning",
    "5": f"{_LLAMA3} --speculative-num-steps 5 --speculative-eagle-topk 8 --speculative-num-draft-tokens 64 "
    "--speculative-token-map thunlp/LLaMA3-Instruct-8B-FR-Spec/freq_32768.pt --mem-fraction 0.7 "
    "--cuda-graph-max-bs 2 --dtype float16",
    "6": "--model meta-llama/Meta-Llama-3.1-8B-Instruct --speculative-algorithm EAGLE3 --speculative-draft-model-path "
    "jamesliu1/sglang-EAGLE3-Llama-3.1-Instruct-8B --speculative-num-steps 3 --speculative-eagle-topk 4 "
    "--speculative-num-draft-tokens 16 --mem-fraction-static 0.7 --cuda-graph-max-bs 8 --dtype float16 "
    "--log-level warning",
    "7": "--model XiaomiMiMo/MiMo-7B-RL --host 0.0.0.0 --trust-remote-code --speculative-algorithm EAGLE "
    "--speculative-num-steps 1 --speculative-eagle-topk 1 --speculative-num-draft-tokens 2 --mem-fraction-static 0.7 "
    "--cuda-graph-max-bs 8 --log-level warning",
    "8": _STANDALONE.format(2, 7),
    "9": _STANDALONE.format(1, 5),
    "10": f"{_QWEN} --speculative-algorithm NGRAM --speculative-num-draft-tokens 16 "
    "--speculative-ngram-max-match-window-size 12 --speculative-ngram-max-bfs-breadth 10 --mem-fraction-static 0.7 "
    "--cuda-graph-max-bs 8 --log-level warning",
    "11": "--model your/model --speculative-algorithm EAGLE --speculative-draft-model-path your/draft-model "
    "--speculative-num-steps 2 --speculative-eagle-topk 2 --speculative-num-draft-tokens 8 --cuda-graph-max-bs 2 "
    "--mem-fraction-static 0.5 --max-running-requests 4 --dtype float16 --log-level warning",
    "12": _SGL_JAX,
    "12, paddings": f"{_SGL_JAX} --precompile-token-paddings 4096 8192 --precompile-bs-paddings 1 8 16",
    "13": "--sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 3 --sglang-speculative-eagle-topk 1 "
    "--sglang-speculative-num-draft-tokens 4",
    "14": _SLIME.format(48),
    "14, graphs": f"{_SLIME.format(128)} --sglang-cuda-graph-bs {' '.join(map(str, GRAPH_SIZES))} "
    "--sglang-disable-cuda-graph-padding --debug-rollout-only",
    "15, attention mode": "--speculative-attention-mode decode",
    "15, draft triton": "--speculative-draft-attention-backend triton",
    "15, draft flashinfer": "--speculative-draft-attention-backend flashinfer",
    "15, draft fa3": "--speculative-draft-attention-backend fa3",
    "15, moe runner": "--speculative-moe-runner-backend triton",
    "15, moe none": "--speculative-moe-a2a-backend none",
    "15, moe deepep": "--speculative-moe-a2a-backend deepep",
    "15, unquant": "--speculative-draft-model-quantization unquant",
    "15, load auto": "--speculative-draft-load-format auto",
    "15, load safetensors": "--speculative-draft-load-format safetensors",
    "15, load pt": "--speculative-draft-load-format pt",
    "15, load dummy": "--speculative-draft-load-format dummy",
    "15, single": "--speculative-accept-threshold-single 0.9",
    "15, acc": "--speculative-accept-threshold-acc 0.9",
    "15, multi-layer": "--enable-multi-layer-eagle",
    "15, fa": "--attention-backend fa",
    "15, fa3": "--attention-backend fa3",
    "15, flashinfer": "--attention-backend flashinfer",
    "15, triton": "--attention-backend triton",
    "15, torch_native": "--attention-backend torch_native",
    "15, fp8": "--quantization fp8",
}


def words(name: str) -> list[str]:
    """The words of a command line."""
    return shlex.split(COMMAND_LINES[name])


def prefixed(line: list[str]) -> list[str]:
    """The same with slime's prefix on every flag."""
    return [f"--sglang-{word[2:]}" if word.startswith("--") and "sglang" not in word else word for word in line]


def plan(*flags):
    config, notes = read_flags(ServeConfig, list(flags), "outrider serve")
    return make_plan(config, notes)


def values(process):
    return {setting.flag: setting.value for setting in process.settings}


def warned(made, text):
    return sum(text in warning for warning in made.warnings)
