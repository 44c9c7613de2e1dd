"""Two checkpoints behind one gateway, drafted for by one draft service: each gives exactly its own text."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from services.draft.drafters.ngram import NgramDrafter, NgramOptions
from tests.support.gateway.services import Gateway
from tests.support.system.services import draft_service, target_service
from tests.support.target.greedy_text import NEW, PROMPT, greedy
from tests.support.tiny import write_model, write_tokenizer

FAMILIES = {"a": "llama", "b": "qwen3"}


@pytest.fixture
def folders(tmp_path):
    return {name: write_tokenizer(write_model(tmp_path / name, kind, seed=7)) for name, kind in FAMILIES.items()}


def test_each_model_gives_the_text_that_it_gives_alone(tmp_path, folders):
    alone = {name: greedy(folder) for name, folder in folders.items()}
    assert alone["a"] != alone["b"]
    services = [target_service(folder, f"unix:{tmp_path}/{name}.sock").start() for name, folder in folders.items()]
    for service in services:
        service.pause = 0.02  # steps of a tiny model are over before proposals arrive
    draft = draft_service(f"unix:{tmp_path}/draft.sock", NgramDrafter(NgramOptions())).start()
    file = tmp_path / "models.toml"
    file.write_text(
        "".join(f'[{name}]\ntarget = "unix:{tmp_path}/{name}.sock"\ndraft = "{draft.address}"\n' for name in folders)
    )
    gateway = Gateway(tmp_path, None, models=file)
    try:
        gateway.wait()

        def tokens(model):
            answer = gateway.complete(PROMPT, model=model, max_tokens=NEW, ignore_eos=True, return_token_ids=True)
            return answer["choices"][0]["token_ids"]

        with ThreadPoolExecutor(4) as pool:  # beside one another, and again with the n-grams of the first answers
            for _ in range(2):
                found = list(pool.map(tokens, "abab"))
                assert found == [alone[name] for name in "abab"]
        assert gateway.metric("outrider_accepted_draft_tokens_total") > 0
    finally:
        assert gateway.stop() == 0
        for service in [draft, *services]:
            service.stop()
