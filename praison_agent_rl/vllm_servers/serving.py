"""Start ``vllm serve`` for base weights, and load and unload adapters while it runs: many versions, one server.

vLLM may be installed in an environment of its own, as its libraries seldom agree with those that train. How it is
started and asked is held by tests with a stand-in, and by ``make test-vllm`` with vLLM on a CPU; none ran on a GPU.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from praison_agent_rl.child import last_lines, start_child
from praison_agent_rl.errors import MissingExtra, ServerFailed, VersionError
from praison_agent_rl.serving import LOG, Served, Server, ServerAddress, bring_up, free_port, new_home
from praison_agent_rl.vllm_servers.adapters import why_not_servable
from praison_agent_rl.vllm_servers.calls import Refused, ask

EXECUTABLE = "PRAISON_AGENT_RL_VLLM"
"""Variable of the environment that says where the command ``vllm`` is, if it is not on the path."""

_AT_ONCE = 4
"""Adapters in one batch; by its default of 1 the requests of two agents wait for each other."""

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What ``--max-lora-rank`` takes, but for 1 (vllm/config/lora.py, MaxLoRARanks)."""


@dataclass(kw_only=True)
class VllmServer(Server):
    """A running vLLM server for base weights; adapters come and go under names of their own."""

    def load(self, name: str, folder: Path, weights: Path) -> "Adapter":
        """Offer the adapter in ``folder`` as ``name``, which no other adapter had: the prefix cache keys on it.

        ``weights`` is the folder of the same model with the adapter merged.

        Raises:
            ServerFailed: vLLM refused it.
        """
        self._post("load_lora_adapter", {"lora_name": name, "lora_path": str(folder.resolve())})
        return Adapter(
            url=self.url, model=name, api_key=self.api_key, folder=weights.resolve(), host=self, held=self.address
        )

    def unload(self, name: str) -> None:
        """Offer the adapter no longer.

        Raises:
            ServerFailed: vLLM refused.
        """
        self._post("unload_lora_adapter", {"lora_name": name})

    def _post(self, what: str, body: dict[str, str]) -> None:
        try:
            ask(f"{self.url}/{what}", body, api_key=self.api_key, timeout=300.0)
        except Refused as refusal:
            raise ServerFailed(f"vLLM answered {what} {body} with {refusal.status}: {refusal.said}") from refusal
        except OSError as error:
            log = last_lines(self.home / LOG)
            raise ServerFailed(f"vLLM did not answer {what} {body}: {error}; the end of its log:\n{log}") from error


@dataclass(kw_only=True)
class Adapter(Served):
    """A version that a vLLM server offers beside others."""

    host: VllmServer
    held: ServerAddress = field(repr=False)
    """Keeps the server for as long as the adapter is offered."""

    @property
    def running(self) -> bool:
        """Whether its server is alive."""
        return self.host.running

    def stop(self) -> None:
        """Offer it no longer; it is safe to call this twice."""
        if self.host.running:
            with contextlib.suppress(ServerFailed):  # it is not there any more
                self.host.unload(self.model)
        self.held = ServerAddress(self.url, self)  # not counted: the server may go


def start_vllm_server(
    base: str, *, max_rank: int = 64, options: Sequence[str] = (), timeout: float = 900.0, api_key: str | None = None
) -> VllmServer:
    """Serve ``base`` (a folder or a hub name) by vLLM on a free port of 127.0.0.1, ready for adapters.

    ``max_rank`` is the largest rank of an adapter, ``options`` are further arguments of ``vllm serve``, ``timeout`` is
    in seconds. The server ends with this process.

    Raises:
        MissingExtra: there is no vLLM.
        ServerFailed: it did not come up, or the rank is larger than any that vLLM takes.
    """
    command = find_vllm()
    rank = fitting_rank(max_rank)

    def launch() -> VllmServer:
        port, home, key = free_port(), new_home(), api_key or secrets.token_urlsafe(24)
        place = ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]  # it would grow for ever
        lora = ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(_AT_ONCE)]
        process = start_child(
            "praison_agent_rl.vllm_servers.serving",
            [command, "serve", base, "--served-model-name", base, *place, *lora, *options],
            log=home / LOG,
            env={"VLLM_API_KEY": key, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"},  # a key on the command line is seen
        )
        url = f"http://127.0.0.1:{port}/v1"
        return VllmServer(url=url, model=base, api_key=key, folder=Path(base), process=process, home=home)

    return bring_up(launch, timeout=timeout)


def find_vllm() -> str:
    """The command ``vllm``: where the environment says, on the path, or beside the running Python.

    Raises:
        MissingExtra: it is nowhere.
    """
    given = os.environ.get(EXECUTABLE)
    places = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    found = shutil.which(given or "vllm", path=places)
    if found is None:
        raise MissingExtra(
            f"there is no command {given or 'vllm'!r}; install vLLM, in an environment of its own if it must be, and "
            f"set {EXECUTABLE} to the command, or leave 'vllm' out"
        )
    return found


def fitting_rank(rank: int) -> int:
    """The smallest rank that vLLM takes and that holds adapters of ``rank``; raises ServerFailed if there is none."""
    fitting = next((known for known in RANKS if known >= rank), None)
    if fitting is None:
        raise ServerFailed(f"the adapter has rank {rank}, and vLLM serves none above {RANKS[-1]}; serve merged weights")
    return fitting


def rank_of(adapter: Path) -> int:
    """The largest rank in an adapter; raises ServerFailed where its configuration cannot be read."""
    config = _config_of(adapter)
    try:
        return max([int(config["r"]), *(int(rank) for rank in (config.get("rank_pattern") or {}).values())])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ServerFailed(f"{str(adapter)!r} is no adapter that can be served: {error!r}") from error


def check_servable(adapter: Path) -> None:
    """Raise VersionError for an adapter that vLLM would not serve as PEFT means it."""
    if reason := why_not_servable(_config_of(adapter)):
        raise VersionError(f"{str(adapter)!r} cannot be served: {reason}; serve merged weights: backend transformers")


def _config_of(adapter: Path) -> dict[str, Any]:
    try:
        config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ServerFailed(f"{str(adapter)!r} is no adapter that can be served: {error!r}") from error
    if not isinstance(config, dict):
        raise ServerFailed(f"{str(adapter)!r} is no adapter that can be served: its configuration is {config!r}")
    return config


def main() -> None:
    """What the child process runs: the given command, with this environment less what is of our Python."""
    # The whole group is asked to end; who waits for the command outlasts it, or it would be killed at once.
    signal.signal(signal.SIGTERM, lambda *_: None)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    sys.exit(subprocess.call(sys.argv[1:], env=environment))


if __name__ == "__main__":
    main()
