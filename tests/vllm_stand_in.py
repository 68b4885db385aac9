"""A stand-in for a vLLM server with adapters, as vLLM 0.32 answers: in this process, or as the command ``vllm``."""

import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

from praison_agent_rl.vllm_servers.sources import ForeignServer

END = 9
KEY = "key"


class StandIn:
    """A completion is [7, 9], of log-probabilities -0.5 and -0.25 at temperature 1."""

    def __init__(self) -> None:
        self.adapters: dict[str, str] = {}
        """The configuration of each adapter that is loaded, by name."""
        self.asked: list[dict[str, Any]] = []
        """Every request but those of a check, in order; ``verb`` is what it is for."""
        self.checked: list[dict[str, Any]] = []
        """The requests with which a check sees what adapters are taken; none of them is dropped."""
        self.dropped = 0
        """Connections that are closed before one is answered."""
        self.dies_at: int | None = None
        """Number of prompts after which every connection is closed."""
        self.processed = True
        self.lora = True
        self.max_rank = 16
        self.base: dict[str, Any] = {"id": "base", "root": "owner/base", "parent": None, "max_model_len": 64}
        self.change: Callable[[dict[str, Any]], Any] = lambda answer: None
        """Called with each answer with completions, before it is sent."""

    def answer(self, verb: str, body: dict[str, Any]) -> tuple[int, Any]:
        (self.checked if of_a_check(body) else self.asked).append({"verb": verb, **body})
        if not self.lora and verb.endswith("_lora_adapter"):
            return 404, {"detail": "Not Found"}
        if verb == "load_lora_adapter":
            folder = Path(body["lora_path"])
            file = folder / "adapter_config.json"
            if not file.exists():
                return 404, error("Loading lora x failed: No adapter found for <path>")
            if json.loads(file.read_text())["r"] > self.max_rank:
                return 500, error(f"LoRA rank is greater than max_lora_rank {self.max_rank}.")
            if of_a_check(body):  # that has no tensor, which vLLM notices at last
                return 500, error("Call to add_lora method failed: Worker failed with error ''")
            self.adapters[body["lora_name"]] = file.read_text()
            self.loaded(body["lora_name"], folder)
            return 200, "Success"
        if verb == "unload_lora_adapter":
            return (200, "Success") if self.adapters.pop(body["lora_name"], None) else (404, error("not found"))
        if body["model"] not in self.adapters:
            return 404, error(f"The model `{body['model']}` does not exist.")
        if body["temperature"] == 0 and body["n"] > 1:
            return 400, error("n must be 1 when using greedy sampling")
        answer = {"model": body["model"], "choices": [self.choice(body, n) for n in reversed(range(body["n"]))]}
        self.change(answer)
        return 200, answer

    def loaded(self, name: str, folder: Path) -> None:
        """An adapter was loaded from ``folder``."""

    def choice(self, body: dict[str, Any], number: int) -> dict[str, Any]:
        factor = body["temperature"] if self.processed else 1.0
        return choice_of(body, number, [7, END], [-0.5 * factor, -0.25 * factor])

    def completions(self) -> list[dict[str, Any]]:
        """The prompts that were asked."""
        return [body for body in self.asked if body["verb"] == "completions"]

    def gone(self) -> bool:
        """Whether a connection is to be closed without an answer."""
        if self.dies_at is not None and len(self.completions()) >= self.dies_at:
            return True
        self.dropped -= 1
        return self.dropped >= 0


class Drawing(StandIn):
    """Draws as the policy, the prompt and the seed say: 1 to ``max_tokens`` bytes of ``make_tiny_model``'s tokenizer.

    Log-probabilities are drawn too, between -7 and -4, so that they are those of no model.
    """

    def __init__(self, base: str) -> None:
        super().__init__()
        self.base = {"id": base, "root": base, "parent": None, "max_model_len": 4096}
        self.weights: dict[str, bytes] = {}
        """What each name was loaded with: the file of its tensors."""
        self.given: list[dict[str, Any]] = []
        """Every completion that was given, with the ``prompt`` and the ``seed`` of its row."""

    def loaded(self, name: str, folder: Path) -> None:
        self.weights[name] = (folder / "adapter_model.safetensors").read_bytes()

    def choice(self, body: dict[str, Any], number: int) -> dict[str, Any]:
        policy = hashlib.sha256(self.weights[body["model"]]).hexdigest()
        seed = body.get("seed", 0) + number
        rng = random.Random(f"{policy} {body['prompt']} {seed}")
        ids = [rng.randrange(3, 259) for _ in range(rng.randint(1, body["max_tokens"]))]
        if len(ids) < body["max_tokens"]:
            ids[-1] = body["stop_token_ids"][0]
        log_probs = [rng.uniform(-7, -4) for _ in ids]
        self.given.append({"prompt": body["prompt"], "seed": seed, "ids": ids, "log_probs": log_probs})
        return choice_of(body, number, ids, log_probs)


def choice_of(body: dict[str, Any], number: int, ids: list[int], given: list[float]) -> dict[str, Any]:
    """A completion as vLLM tells it."""
    return {
        "index": number, "token_ids": ids, "prompt_token_ids": body["prompt"],
        "finish_reason": "stop" if ids[-1] in body["stop_token_ids"] else "length",
        "logprobs": {"token_logprobs": given, "top_logprobs": [{"x": value} for value in given]},
    }  # fmt: skip


def of_a_check(body: dict[str, Any]) -> bool:
    return "-check-" in body.get("lora_name", "")


def error(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}


@contextlib.contextmanager
def serving(stand_in: StandIn, *, key: str = KEY, port: int = 0) -> Iterator[ForeignServer]:
    """``stand_in`` on a port of 127.0.0.1."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.reply(200, {"data": [stand_in.base, *({"id": name, "parent": "base"} for name in stand_in.adapters)]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if not of_a_check(body) and stand_in.gone():
                self.close_connection = True
                return
            assert self.headers["authorization"] == f"Bearer {key}"
            self.reply(*stand_in.answer(self.path.removeprefix("/v1/"), body))

        def reply(self, status: int, body: Any) -> None:
            raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

    http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield ForeignServer(url=f"http://127.0.0.1:{http.server_port}", api_key=key)
    finally:
        http.shutdown()
        http.server_close()


# --- the command ------------------------------------------------------------------------------------------------------

COMMAND = """\
#!{python}
import sys
sys.path.insert(0, {root!r})
from tests.vllm_stand_in import command
command({dies_at!r}, {says!r}, {told!r})
"""


class Command:
    """The command ``vllm`` in a folder; the server that it starts kills itself after ``dies_at`` prompts."""

    def __init__(self, folder: Path, *, dies_at: int | None = None, says: str | None = None) -> None:
        """With ``says`` it does not come up, and says that."""
        self.path, self._told = folder / "vllm", folder / "told.jsonl"
        root = str(Path(__file__).parents[1])
        given = {"root": root, "dies_at": dies_at, "says": says, "told": str(self._told)}
        self.path.write_text(COMMAND.format(python=sys.executable, **given))
        self.path.chmod(0o755)

    def told(self) -> list[dict[str, Any]]:
        """``words`` and ``pid`` of each start."""
        return [json.loads(line) for line in self._told.read_text().splitlines()] if self._told.exists() else []


def ended(pid: int) -> bool:
    """Whether a process is gone, or nobody has taken note of its end yet; it is given some time."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for _ in range(400):
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
            time.sleep(0.05)
        return False
    return True


def command(dies_at: int | None, says: str | None, told: str) -> None:
    """What that command runs."""
    words = sys.argv[1:]
    with open(told, "a") as file:
        file.write(json.dumps({"words": words, "pid": os.getpid()}) + "\n")
    if says:
        sys.exit(says)
    stand_in = Drawing(words[1])

    def die(_: Any) -> None:
        if dies_at is not None and len(stand_in.completions()) > dies_at:
            print("EngineCore died: the stand-in was told to", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    stand_in.change = die
    port = int(words[words.index("--port") + 1])
    with serving(stand_in, key=os.environ["VLLM_API_KEY"], port=port):
        signal.pause()
