"""Rollouts by /generate, as trainers read them: token ids, log-probabilities, counters, and answers cut by an abort."""

import asyncio
import concurrent.futures
import contextlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.integrations.rollouts import RolloutError, RolloutGateway
from outrider.integrations.verl.options import Options, ReplicaFacts
from outrider.integrations.verl.server import OutriderServer
from tests.support.gateway.services import until
from tests.support.system.controlled import KEY, System
from tests.support.tiny import VOCAB, write_model, write_tokenizer

PROMPT = [5, 9, 5, 9, 5, 9, 5, 9, 30, 31]
TOLERANCE = 1e-4  # of a log-probability in float32, between two orders of summation


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(write_model(tmp_path_factory.mktemp("policy") / "1", seed=1, num_hidden_layers=3))


@pytest.fixture(scope="module")
def running(folder, tmp_path_factory):
    system = System(folder, tmp_path_factory.mktemp("rollouts"))
    yield system
    system.stop()


def generate(running, prompt=PROMPT, count=40, seed=7, **options):
    """An answer in the way that slime asks for it."""
    sampling = {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": count, "stop": None, "stop_token_ids": None,
        "skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False,
        "sampling_seed": seed, "ignore_eos": True,
    } | options.pop("sampling", {})  # fmt: skip
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, **options}
    answer = running.gateway.client.post("/generate", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokens_of(answer):
    return [token for _, token, *_ in answer["meta_info"]["output_token_logprobs"]]


def logprobs_of(answer, side="output"):
    return [value for value, *_ in answer["meta_info"][f"{side}_token_logprobs"]]


def test_log_probabilities_are_those_of_a_plain_forward(running, folder):
    """Its rounding in float32 is that of transformers, measured against float64. At the sampling temperature, as a
    trainer's loss and SGLang have them; those of a prompt at 1.
    """
    plain, exact = (AutoModelForCausalLM.from_pretrained(folder, dtype=d) for d in (torch.float32, torch.float64))
    temperatures = (1.0, 1.0, 0.0, 0.6, 1.7)
    answers = [
        generate(running, seed=7 + number, sampling={"temperature": temperature}, logprob_start_len=0)
        for number, temperature in enumerate(temperatures)
    ]
    divisor = torch.ones(len(PROMPT) + 40 - 1, 1)
    for temperature, answer in zip(temperatures, answers, strict=True):
        divisor[len(PROMPT) - 1 :] = temperature or 1.0
        new = tokens_of(answer)
        assert new == answer["output_ids"]
        path = torch.tensor([PROMPT + new])
        with torch.no_grad():
            of_plain, expected = (
                (model(path).logits[0, :-1] / divisor).log_softmax(-1).gather(-1, path[0, 1:, None])[:, 0].double()
                for model in (plain, exact)
            )
        assert logprobs_of(answer, "input")[0] is None
        found = torch.tensor(logprobs_of(answer, "input")[1:] + logprobs_of(answer), dtype=torch.float64)
        assert (found - expected).abs().max() < 3 * (of_plain - expected).abs().max() < TOLERANCE
    assert tokens_of(answers[0]) != tokens_of(answers[1])


def test_counters_of_speculation(running):
    """Under the names that slime reads; they fit together."""
    info = {}

    def speculated():
        info.update(generate(running, sampling={"temperature": 0.0}, count=80)["meta_info"])
        return info["spec_accept_token_num"]

    until(speculated, 60)  # on a busy machine proposals may be late at first
    assert info["completion_tokens"] == 80
    assert info["spec_accept_length"] == 80 / info["spec_verify_ct"] > 1
    assert info["spec_accept_rate"] == info["spec_accept_token_num"] / info["spec_draft_token_num"]
    assert info["weight_version"] == "default"
    assert info["finish_reason"] == {"type": "length", "length": 80}


def test_many_answers_to_a_prompt(running):
    answers = generate(running, count=3, sampling={"n": 128})
    assert [answer["meta_info"]["sampling_seed"] for answer in answers] == list(range(7, 135))
    assert len({tuple(tokens_of(answer)) for answer in answers}) > 100
    alone = generate(running, count=3, seed=100)
    assert tokens_of(answers[93]) == tokens_of(alone)


def test_thousands_of_rollouts_are_queued_and_answered(running):
    """None is refused, and each has the tokens that it has alone."""
    prompts = [[3 + number, 5, 9] for number in range(8)]
    running.post("/pause_generation", json={"mode": "retract"})
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(generate, running, prompts, 4, seed, sampling={"n": 128}) for seed in (7, 100_000)]
        loads = running.gateway.client.get
        until(lambda: loads("/v1/loads?include=core").json()["loads"][0]["num_total_reqs"] == 2048)
        running.post("/continue_generation")
        answers = [one.result(60) for one in asked]
    for batch in answers:
        assert [len(answer["output_ids"]) for answer in batch] == [4] * 1024
        for number in (0, 517, 1023):
            seed = batch[number]["meta_info"]["sampling_seed"]
            assert tokens_of(batch[number]) == tokens_of(generate(running, prompts[number // 128], 4, seed))


@pytest.mark.parametrize("route", ["/abort_request", "/pause_generation"])
def test_an_aborted_answer_continues_from_its_tokens_and_seed(running, route):
    whole = generate(running, count=200)
    client = running.gateway.client
    running.pause(0.01)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(generate, running, count=200, rid="partial")
        until(lambda: running.targets[0].engine.load().running_sessions)
        until(lambda: sum(len(s.tokens) > 40 for s in running.targets[0].engine.scheduler))
        load = client.get("/v1/loads?include=core").json()["loads"][0]
        assert load["num_total_reqs"] == 1
        running.post(route, json={"abort_all": True})
        cut = future.result(30)
    running.pause(0)
    until(lambda: client.get("/v1/loads").json()["loads"][0]["num_total_reqs"] == 0)
    running.post("/continue_generation")
    new = tokens_of(cut)
    assert cut["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(new) < 200
    rest = generate(running, PROMPT + new, 200 - len(new), cut["meta_info"]["sampling_seed"])
    assert new + tokens_of(rest) == tokens_of(whole)
    found = torch.tensor(logprobs_of(cut) + logprobs_of(rest))
    torch.testing.assert_close(found, torch.tensor(logprobs_of(whole)), rtol=0, atol=TOLERANCE)


def test_an_answer_that_is_aborted_before_its_first_token_has_the_label_of_its_admission(running):
    running.post("/pause_generation", json={"mode": "in_place"})
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            future = pool.submit(generate, running, rid="early")
            until(lambda: running.post("/abort_request", json={"rid": "early"})["aborted_requests"])
            cut = future.result(30)
    finally:
        running.post("/continue_generation")
    info = cut["meta_info"]
    assert (cut["output_ids"], info["finish_reason"]["type"]) == ([], "abort")
    assert info["weight_version"] == "default"


def test_facts_that_trainers_read(running):
    info = running.gateway.client.get("/server_info").json()
    assert (info["tp_size"], info["pp_size"], info["num_gpus"]) == (1, 1, 1)
    assert (info["weight_version"], info["dtype"], info["disaggregation_mode"]) == ("default", "float32", "null")
    assert running.gateway.client.get("/health_generate").status_code == 200
    refused = running.gateway.client.post("/generate", json={"input_ids": [VOCAB - 1], "return_routed_experts": True})
    assert "return_routed_experts" in refused.json()["error"]["message"]


def test_a_loop_of_rollouts_and_training(running, folder):
    """The example, with a tiny policy: the reward rises, and each step's rollouts come from its weights."""
    path = Path(__file__).parents[3] / "docs/examples/rollouts.py"
    spec = importlib.util.spec_from_file_location("rollouts", path)
    sys.modules["rollouts"] = rollouts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rollouts)
    strategy = torch.multiprocessing.get_sharing_strategy()
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = rollouts.Engine(running.gateway.url, KEY)
    prompts = [[5, 9, 5, 9], [30, 31, 32], [7] * 6, [200, 201]]

    def even(_, tokens):
        return sum(token % 2 == 0 for token in tokens) / len(tokens)

    try:
        done = rollouts.train(policy, engine, prompts, even, steps=10, count=16, max_tokens=12, rate=1e-2, batch=64)
    finally:
        engine.close()
        torch.multiprocessing.set_sharing_strategy(strategy)
        running.post("/update_weights_from_disk", json={"model_path": str(folder), "weight_version": "default"})
    assert done[-1].reward > done[0].reward + 0.15
    assert max(step.largest_gap for step in done) < TOLERANCE
    assert min(step.same for step in done) == 1
    assert running.version() == "default"


def facts_of_verl(folder, **changes):
    """What the adapter for verl reads of its configuration."""
    given = {
        "model_path": str(folder), "tp_size": 1, "dtype": "float32", "max_model_len": 64, "prompt_length": 20,
        "response_length": 16, "ignore_eos": True, "seed": None, "frees_cache": True,
    }  # fmt: skip
    return ReplicaFacts(**given | changes)


@pytest.fixture
def replica(running, folder, monkeypatch):
    """Run a function with the actor of a replica of verl, whose gateway runs already, and the trainer's side of it."""
    monkeypatch.setenv("OUTRIDER_ADMIN_API_KEY", KEY)

    def run(use, **changes):
        async def used():
            actor = OutriderServer(facts_of_verl(folder, **changes), Options(), running.gateway.url)
            await actor.start()
            async with RolloutGateway(*await actor.endpoint()) as gateway:
                try:
                    return await use(actor, gateway)
                finally:
                    await actor.stop()

        return asyncio.run(used())

    return run


def test_rollouts_for_verl(running, replica):
    """Tokens, log-probabilities, limits, and the counters that verl's metrics divide."""
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, "seed": 7}

    async def ask(actor, _):
        await actor.set_global_steps(3)
        return (
            await actor.answer(torch.tensor(PROMPT), sampling | {"max_tokens": 30}, "a"),
            await actor.answer(PROMPT, sampling, "b"),
            await actor.answer(PROMPT + [7] * 50, sampling | {"max_tokens": 30}, "c"),
            await actor.answer(PROMPT + [7] * 54, sampling | {"max_tokens": 30}, "d"),
            *[await actor.answer(PROMPT, {"temperature": 1.0}, name) for name in ("e", "e", "f")],
        )

    long, default, cut, none, first, again, other = replica(ask, seed=42)
    expected = generate(running, count=30)
    assert long["token_ids"] == expected["output_ids"]
    assert long["log_probs"] == pytest.approx(logprobs_of(expected), abs=TOLERANCE)
    assert (long["stop_reason"], long["extra_fields"]["sampling_seed"]) == ("length", 7)
    assert long["extra_fields"]["global_steps"] == 3  # the label of the weights is no number yet
    assert 0 < long["extra_fields"]["spec_num_verify_steps"] <= 30
    assert long["extra_fields"]["spec_num_accepted_tokens"] <= long["extra_fields"]["spec_num_draft_tokens"]
    assert [len(one["token_ids"]) for one in (default, cut, none)] == [16, 4, 0]
    assert none["log_probs"] == []
    assert first["token_ids"] == again["token_ids"] != other["token_ids"]  # full_determinism: a seed for each id
    assert first["log_probs"] is None


@pytest.mark.parametrize(
    ("sampling", "options", "error"),
    [
        ({"no_such": 1}, {}, "no_such"),
        ({"prompt_logprobs": 1}, {}, "distillation"),
        ({}, {"max_model_len": 9}, "the prompt has 10 tokens, more than the context of 9"),
    ],
)
def test_rollouts_for_verl_that_cannot_be_made(replica, sampling, options, error):
    with pytest.raises((RolloutError, ValueError), match=error):
        replica(lambda actor, _: actor.answer(PROMPT, sampling, "a"), **options)


def test_control_by_verl(running, replica):
    """An abort ends rollouts with what they have; released memory and refusals end as they began."""
    sampling = {"temperature": 1.0, "logprobs": True, "seed": 7, "max_tokens": 200}
    whole = generate(running, count=200)["output_ids"]

    async def control(actor, _):
        running.pause(0.01)
        rollout = asyncio.create_task(actor.answer(PROMPT, sampling, "cut"))
        while not any(len(session.tokens) > 40 for session in running.targets[0].engine.scheduler):
            await asyncio.sleep(0.01)
        await actor.abort_all_requests(reject_request=True)
        cut = await rollout
        running.pause(0)
        with pytest.raises(RolloutError, match="no rollouts until"):
            await actor.answer(PROMPT, sampling, "refused")
        await actor.sleep()
        await actor.resume_kv_cache()
        await actor.clear_kv_cache()
        await actor.resume_generation()
        rest = {"max_tokens": 200 - len(cut["token_ids"])}
        return cut, await actor.answer(PROMPT + cut["token_ids"], sampling | rest, "rest")

    cut, rest = replica(control, max_model_len=None)
    assert cut["stop_reason"] == "abort"
    assert 0 < len(cut["token_ids"]) == len(cut["log_probs"]) < 200
    assert cut["token_ids"] + rest["token_ids"] == whole


def test_weights_from_verl(running, replica, folder):
    """In one call or several, from a trainer that reuses its buffer; those that do not fit leave whole weights."""
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tensors = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    old = generate(running)["output_ids"]
    client = running.gateway.client
    fingerprints = []

    async def yielded(changes, scale):
        for name, tensor in (tensors | changes).items():
            buffer = tensor * scale if name.endswith("down_proj.weight") else tensor.clone()
            yield name, buffer
            buffer.fill_(float("nan"))

    async def update(actor, gateway):
        for version, size in (("4", 1 << 30), ("5", 20_000)):
            assert await gateway.update_weights(yielded({}, 2), version, size) == len(tensors)
            answer = await actor.answer(PROMPT, {"seed": 7, "max_tokens": 40}, version)
            fingerprints.append((client.get("/get_model_info").json()["fingerprint"], tuple(answer["token_ids"])))
            assert answer["extra_fields"]["global_steps"] == int(version) == int(running.version())
        with pytest.raises(RolloutError, match=r"no_such.*the weights are unchanged"):
            await gateway.update_weights(yielded({"no_such": torch.zeros(3)}, 1), "6", 1 << 30)
        with pytest.raises(RolloutError, match=r"model.norm.weight.*the weights are unchanged"):
            await gateway.update_weights(yielded({"model.norm.weight": torch.zeros(10_000_000)}, 1), "6", 1 << 30)
        assert running.version() == "5"
        with pytest.raises(RolloutError, match=r"no_such.*stays paused until a whole update succeeds"):
            await gateway.update_weights(yielded({"no_such": torch.zeros(3)}, 1), "7", 20_000)
        assert running.version() == "7 (incomplete)"
        late = asyncio.create_task(actor.answer(PROMPT, {"seed": 7, "max_tokens": 40}, "late"))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(late), 0.3)
        assert not late.done(), "an answer came from weights of two versions"
        await gateway.update_weights(yielded({}, 1), "8", 20_000)
        return await late

    try:
        late = replica(update)
    finally:
        running.post("/continue_generation")
        running.post("/update_weights_from_disk", json={"model_path": str(folder), "weight_version": "default"})
    assert fingerprints[0] == fingerprints[1]
    assert fingerprints[0][1] != tuple(old) == tuple(late["token_ids"])
    assert late["extra_fields"]["global_steps"] == 8
