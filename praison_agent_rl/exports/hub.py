"""``to="hub"``: push a model, an adapter or GGUF files to the Hugging Face hub; its library alone reads the token."""

import re
from pathlib import Path
from typing import Any

from praison_agent_rl.errors import ConfigError, MissingExtra, ServerFailed
from praison_agent_rl.exports.jobs import Job
from praison_agent_rl.exports.made import Options

_LOGIN = "set HF_TOKEN to a token that may write, or log in once with: hf auth login"

_REPLACED = {
    "merged": ["model*.safetensors", "model.safetensors.index.json"],
    "lora": ["adapter_model.*"],
    "gguf": None,
}
"""Files of an earlier push that are taken away with this one: a loader would mix them with the new ones."""


def check_hub(options: Options) -> None:
    """Whether a push can be tried: a name of a repository, a token, and no order to stay offline.

    Raises:
        ConfigError: one is missing.
        MissingExtra: the hub's library is not installed.
    """
    try:
        from huggingface_hub import constants, get_token
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
    except ImportError as error:
        raise MissingExtra(f'the hub needs {error.name}: pip install "praison-agent-rl[train]"') from error
    if not options.repo:
        raise ConfigError("a push needs the name of a repository, as user/name (hf_model_name, --repo)")
    try:
        validate_repo_id(options.repo)
    except HFValidationError as error:
        raise ConfigError(f"{options.repo!r} cannot be the name of a repository: {error}") from error
    if options.repo.count("/") != 1:
        raise ConfigError(f"the repository {options.repo!r} has no owner; name it as user/name")
    if constants.HF_HUB_OFFLINE:
        raise ConfigError("HF_HUB_OFFLINE is set, so nothing can be pushed to the hub; unset it")
    token = get_token()
    if token is None:
        raise ConfigError(f"there is no token for the hub; {_LOGIN}")
    if not re.fullmatch(r"[!-~]+", token):  # it cannot be sent, and the error of who tries shows it
        raise ConfigError(f"the token for the hub has spaces or letters that no token has; {_LOGIN}")


def push(job: Job, folder: Path) -> str:
    """Push the files of ``folder`` as one commit; returns its address.

    Raises:
        ConfigError: the repository is public already, and the push is to be private.
        ServerFailed: the hub refused, or cannot be reached.
    """
    from httpx import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    options, api = job.options, HfApi()
    repo = str(options.repo)
    message = options.message or f"{job.subject.title} by praison-agent-rl"
    try:
        _make_repository(api, repo, private=options.private)
        job.say(f"pushing to {repo}")
        commit = api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message=message, delete_patterns=_REPLACED[options.form]
        )
    except ConfigError:
        raise
    except HfHubHTTPError as error:
        raise ServerFailed(_in_words(error, repo)) from error
    except (OSError, HTTPError, RuntimeError, ValueError) as error:  # by the way in which large files go up
        cause = error.__cause__ or error
        raise ServerFailed(
            f"the push to {repo!r} failed on the way: {cause}; nothing was committed, do it again"
        ) from error
    return str(commit.commit_url)


def _make_repository(api: Any, repo: str, *, private: bool) -> None:
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        known = api.model_info(repo)
    except RepositoryNotFoundError:
        api.create_repo(repo, private=private, exist_ok=True)
        return
    if private and not known.private:
        raise ConfigError(
            f"the repository {repo!r} is public already, and the push was to be private; name another, or say that it "
            "may be public (hf_private: false, --public)"
        )


def _in_words(error: Any, repo: str) -> str:
    from huggingface_hub.errors import GatedRepoError

    status = error.response.status_code if error.response is not None else None
    said = f"the hub refused the push to {repo!r} ({status or 'no answer'}: {_first_line(error)})"
    if isinstance(error, GatedRepoError):
        return f"{said}; it is gated: ask for access on its page"
    if status == 401:
        return f"{said}; the token is not valid any more: {_LOGIN}"
    if status == 403:
        owner = repo.partition("/")[0]
        return f"{said}; the token may not write to repositories of {owner!r}: {_LOGIN}"
    if status == 404:
        return f"{said}; there is no such repository for you: it may be private to others, or the owner may not exist"
    return f"{said}; nothing was committed, do it again later"


def _first_line(error: Any) -> str:
    said = getattr(error, "server_message", None) or str(error)
    return next((line for line in str(said).splitlines() if line.strip()), "")[:300]
