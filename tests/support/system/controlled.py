"""A system whose targets a test controls as a trainer does."""

import base64
import concurrent.futures
import json
import pickle

from services.draft.drafters.ngram import NgramDrafter, NgramOptions
from tests.support.gateway.services import Gateway, until
from tests.support.system.services import draft_service, target_service

KEY = "for trainers"
PROMPTS = ["hello there", "a b a b a b a b a b", "the quick brown fox jumps", "12 12 12"]


def pickled(tensors):
    """Tensors as SGLang's clients send them."""
    return base64.b64encode(pickle.dumps(list(tensors.items()))).decode()


class System:
    """Two targets, a draft service, and a gateway with a small body limit and an admin key."""

    def __init__(self, folder, base, targets=1, drafter=None):
        """drafter: makes one at every start of the draft service; by default stored n-grams."""
        self.folder = folder
        roots = (str(folder.parents[1]),)
        self.targets = [
            target_service(folder, f"unix:{base}/target{i}", weight_update_roots=roots).start() for i in range(targets)
        ]
        self.draft = draft_service(f"unix:{base}/draft", drafter or NgramDrafter(NgramOptions())).start()
        addresses = [target.address for target in self.targets]
        flags = {"max_body_bytes": 10_000, "admin_api_key": KEY}
        self.gateway = Gateway(base, addresses, [self.draft.address], **flags).wait()
        self.admin = {"authorization": f"Bearer {KEY}"}

    def post(self, route, status=200, **options):
        """status: that the answer must have; None for any."""
        answer = self.gateway.client.post(route, headers=self.admin | options.pop("headers", {}), **options)
        assert status in (None, answer.status_code), answer.text
        return answer.json()

    def ask(self, prompt, **options):
        return self.gateway.complete(prompt, ignore_eos=True, return_token_ids=True, **({"max_tokens": 40} | options))

    def texts(self, **options):
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda prompt: self.ask(prompt, **options), PROMPTS))
        return [answer["choices"][0]["token_ids"] for answer in answers]

    def pause(self, seconds):
        """Set the pause of the targets between steps."""
        for target in self.targets:
            target.pause = seconds

    def version(self):
        return self.gateway.client.get("/get_weight_version").json()["weight_version"]

    def stop(self):
        for service in (self.gateway, self.draft, *self.targets):
            service.stop()


def stream(running, pool, **options):
    """A long generation in progress: a future of its token ids and finish reason, after its first tokens.

    The targets pause between steps, so that it does not end before something befalls it; who calls ends that.
    """
    begun = []

    def read():
        body = {"prompt": PROMPTS[1], "max_tokens": 450, "ignore_eos": True, "stream": True, "return_token_ids": True}
        tokens, reason = [], None
        with running.gateway.client.stream("POST", "/v1/completions", json=body | options) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        tokens += choice["token_ids"]
                        reason = choice["finish_reason"] or reason
                        begun.append(True)
        return tokens, reason

    running.pause(0.05)
    future = pool.submit(read)
    until(lambda: begun)
    return future, begun
