"""`outrider serve` as a real system of processes, with clients for it."""

import concurrent.futures
import contextlib
import signal
import subprocess
import sys
import time

import httpx
import openai

from tests.support.gateway.services import metric_of
from tests.support.outrider.children import free_port

PROMPTS = ["hello there", "a b a b a b", "the quick brown fox", "12345", "Zürich", "x", "so so so", "end of list"]


def processes_of(supervisor, role):
    """Ids of the supervisor's children that play a role."""
    children = subprocess.run(["ps", "--ppid", str(supervisor.pid), "-o", "pid=,args="], capture_output=True, text=True)
    rows = [line.split(None, 1) for line in children.stdout.splitlines()]
    return [int(pid) for pid, args in rows if f"outrider {role}" in args]


class System:
    def __init__(self, folder, *flags, sessions=8):
        """sessions: at most at once; a draft compiles fewer programs for a few."""
        self.port, self.grpc_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        ports = ["--port", str(self.port), "--grpc-port", str(self.grpc_port), "--max-running-requests", str(sessions)]
        command = [sys.executable, "-m", "outrider", "serve", "--model-path", str(folder), *ports, *flags]
        self.process = subprocess.Popen(command)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def wait(self, seconds=300, state="ok"):
        """Wait for a state in /health: "ok" with a draft if one is configured, "degraded" without it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, "the supervisor ended"
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5).json()["status"] == state:
                    return self
            time.sleep(0.1)
        self.stop()
        raise AssertionError("not ready in time")

    def ask(self, prompt, *, stream=False, max_tokens=60, temperature=0.0, **options):
        answer = self.client.completions.create(
            model="default", prompt=prompt, max_tokens=max_tokens, temperature=temperature, seed=7, stream=stream,
            extra_body={"ignore_eos": True, "return_token_ids": True, **options},
        )  # fmt: skip
        return answer if stream else answer.choices[0].text

    def ask_all(self, **options):
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda prompt: self.ask(prompt, **options), PROMPTS))

    def metric(self, name, **labels):
        """As of metric_of."""
        return metric_of(httpx.get(f"{self.url}/metrics").text, name, **labels)

    def stop(self):
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(30)
