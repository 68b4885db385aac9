"""Let an agent itself answer prompts on given weights: with its tools, which really run; it scores nothing.

Weights are served by the same kind of server whatever they are, and each prompt goes to a fresh copy of the agent.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from praison_agent_rl.answering import Progress, RawAnswer
from praison_agent_rl.errors import MissingExtra, ModelError
from praison_agent_rl.sent import silent_thread
from praison_agent_rl.serving import Server, start_server
from praison_agent_rl.swap import fresh_copy, swap_model


def answer_as_agent(
    agent: Any,
    prompts: Sequence[str],
    weights: str,
    *,
    device: str = "auto",
    progress: Progress = lambda done, of: None,
) -> list[RawAnswer]:
    """One answer of ``agent`` to each prompt, running on ``weights``, without sampling; a failure is an answer too.

    Tokens are not counted here.

    Raises:
        ServerFailed: the weights cannot be served.
    """
    server = start_server(_local_folder(weights), name="rl-evaluated", device=device)
    try:
        answers = []
        for place, prompt in enumerate(prompts):
            answers.append(_answer(agent, prompt, place, server))
            progress(place + 1, len(prompts))
        return answers
    finally:
        server.stop()


def _answer(agent: Any, prompt: str, place: int, server: Server) -> RawAnswer:
    twin = fresh_copy(agent)
    swap_model(twin, server.model, base_url=server.address, api_key=server.api_key, server=server)
    try:
        with silent_thread():  # the framework prints panels even when it is silent
            said = twin.chat(prompt, temperature=0.0)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the agent's tools and hooks may raise anything
        return RawAnswer(place, 0, "", 0, error=f"{type(error).__name__}: {error}")
    if said is None:
        return RawAnswer(place, 0, "", 0, error="the agent gave no answer")
    return RawAnswer(place, 0, str(said).encode("utf-8", "replace").decode(), 0)


def _local_folder(weights: str) -> Path:
    """Where the weights lie; those of a hub name are in the hub's cache, or are put there."""
    if Path(weights).exists():
        return Path(weights)
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingExtra(f'hub names need {error.name}: pip install "praison-agent-rl[train]"') from error
    try:
        return Path(snapshot_download(weights))
    except (OSError, ValueError) as error:
        raise ModelError(f"{weights!r} cannot be had from the hub: {error}; give a local folder") from error
