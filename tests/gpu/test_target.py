"""The target on a GPU: the same promises as on the CPU. Run by `make gpu`."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.speculation import noise
from outrider.speculation.sampling import SamplingParams, sample
from services.target.process.warmup import warm_up
from services.target.sampling import row_params, sampler
from tests.support.invariance.engines import draft_engine, target_engine
from tests.support.invariance.pair import GarbageDraft, Pair, request
from tests.support.tiny import VOCAB, write_model

# What libraries warn of on a GPU is theirs.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

PROMPTS = [[5, 6, 7], [9] * 10, [20, 21, 22, 20, 21], list(range(30, 75))]
LENGTH = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture(scope="module", params=["eager", "captured"])
def target(folder, request):
    torch.backends.cuda.matmul.allow_tf32 = False
    engine = target_engine(folder, device="cuda", disable_cuda_graph=request.param == "eager")
    warm_up(engine)
    return engine


def requests(temperature):
    return [request(i, prompt, temperature, LENGTH) for i, prompt in enumerate(PROMPTS)]


def test_bits_and_samples_equal_the_oracle():
    keys = noise.position_keys(7, torch.arange(64).numpy())
    tokens = torch.arange(5000)
    bits = sampler.token_bits(torch.from_numpy(keys.astype("int64")).cuda(), tokens.cuda())
    assert (bits.cpu().numpy() == noise.token_bits(keys[:, None, :], tokens.numpy()[None, :])).all()
    logits = torch.randn(32, 5000, generator=torch.Generator().manual_seed(1)) * 3
    params = SamplingParams(temperature=0.8, top_k=200, top_p=0.95, seed=3)
    rows = row_params.gather([row_params.RowRequest(params, list(range(32)), [[]] * 32)], torch.device("cuda"))
    assert sampler.sample(logits.cuda(), rows).tolist() == [sample(logits[i].numpy(), params, i) for i in range(32)]


def test_greedy_text_is_that_of_transformers(folder, target):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    model.generation_config.eos_token_id = None
    run = Pair(target).run(requests(0.0))
    for i, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt], device="cuda")
        text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, do_sample=False)
        assert text[0, len(prompt) :].tolist() == run.tokens[i]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_text_never_changes(folder, target, temperature):
    plain = {i: Pair(target).run([one]).tokens[i] for i, one in enumerate(requests(temperature))}
    for make in (
        lambda: GarbageDraft(VOCAB),
        lambda: draft_engine("NGRAM"),
        lambda: draft_engine("STANDALONE", folder),
    ):
        assert Pair(target, make).run(requests(temperature)).tokens == plain
