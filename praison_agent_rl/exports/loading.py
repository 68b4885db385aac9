"""Load what was exported as a deployment would, and let it answer prompts by its likeliest tokens."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from praison_agent_rl.answering import Engine, Manner, answer_rows, load_engine
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import Row
from praison_agent_rl.errors import MissingExtra, ModelError, ServerFailed
from praison_agent_rl.exports.checking import Question
from praison_agent_rl.exports.llama_python import ask_llama
from praison_agent_rl.models import load_tokenizer, render_prompts
from praison_agent_rl.records import Plan
from praison_agent_rl.rollouts import Sampling
from praison_agent_rl.vllm_servers.rollouts import VllmSampler, start_sampling_server
from praison_agent_rl.vllm_servers.serving import rank_of


class Given(NamedTuple):
    """An answer of an export."""

    text: str
    ids: list[int]
    """The end token included."""


class CannotLoad(Exception):
    """A loader is not fit for this, which says nothing of the export."""


def answers_of(question: Question, rows: Sequence[Row], plan: Plan) -> list[Given]:
    """The greedy answer to each row.

    Raises:
        CannotLoad: transformers reads no GGUF file of this kind, vLLM does not come up, or llama-cpp-python is none.
        ModelError: it cannot be loaded, or splits text in another way than the tokenizer.
        ServerFailed: vLLM refused the adapter.
    """
    if question.loader == "transformers":  # with the chat template that it brings, and no other
        own = plan.model_copy(update={"config": {**plan.config, "chat_template": None}})
        return _by_engine(load_engine(question.made, own), rows, plan)
    if question.loader == "transformers' GGUF reader":
        return _by_engine(_gguf_engine(question, plan), rows, plan)
    config = TrainConfig.load(plan.config, need_model=False, need_data=False)
    tokenizer = load_tokenizer(question.model, config)
    prompts = render_prompts(tokenizer, [row["prompt"] for row in rows], plan.tools)
    ask = _by_llama if question.loader == "llama.cpp" else _by_vllm
    ids = ask(question, prompts, tokenizer, config)
    return [Given(text, one) for text, one in zip(_texts(tokenizer, ids), ids, strict=True)]


def _texts(tokenizer: Any, ids: Sequence[Sequence[int]]) -> list[str]:
    return list(tokenizer.batch_decode(ids, skip_special_tokens=True))


def _by_engine(engine: Engine, rows: Sequence[Row], plan: Plan) -> list[Given]:
    raw = answer_rows(engine, rows, Manner(1, plan.tools))
    return [Given(answer.text, list(answer.ids)) for answer in raw]


def _gguf_engine(question: Question, plan: Plan) -> Engine:
    """The file as transformers reads it; it is not converted, so that nothing is left in the cache."""
    import torch
    from transformers import AutoModelForCausalLM

    file = Path(question.made)
    config = TrainConfig.load(plan.config, need_model=False, need_data=False)
    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    except (ValueError, NotImplementedError) as error:
        raise CannotLoad(f"transformers' GGUF reader does not take it: {error}") from error
    except (OSError, RuntimeError, KeyError) as error:
        raise ModelError(f"transformers cannot read {file.name}: {error}") from error
    tokenizer = load_tokenizer(question.model, config)
    return Engine(model.to(plan.device).eval(), tokenizer, config, question.ends, by_decoder=False)


def _by_llama(question: Question, prompts: list[list[int]], tokenizer: Any, config: TrainConfig) -> list[list[int]]:
    texts = [str(tokenizer.decode(ids, skip_special_tokens=False)) for ids in prompts]
    most = config.max_completion_length
    try:
        answers = ask_llama(Path(question.made), prompts, texts, most=most, ends=question.ends)
    except MissingExtra as missing:
        raise CannotLoad(str(missing)) from missing
    wanted = [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    if other := [text for text, read, ids in zip(texts, answers.read, wanted, strict=True) if read != ids]:
        raise ModelError(
            f"the file's own tokenizer splits {len(other)} of {len(prompts)} prompts otherwise than the model's, the "
            f"first being {other[0][:80]!r}; update llama.cpp and export again"
        )
    return answers.ids


def _by_vllm(question: Question, prompts: list[list[int]], tokenizer: Any, config: TrainConfig) -> list[list[int]]:
    """``tokenizer`` splits nothing here: vLLM is given token ids."""
    made, most = Path(question.made), config.max_completion_length
    longest = max(map(len, prompts)) + most

    def save(folder: Path) -> None:
        shutil.copytree(made, folder, dirs_exist_ok=True)

    revision = ["--revision", config.revision] if config.revision and not Path(question.base).exists() else []
    try:
        server = start_sampling_server(question.base, rank=rank_of(made), longest=longest, options=revision)
    except ServerFailed as failure:
        raise CannotLoad(f"vLLM does not serve its base here: {failure}") from failure
    try:
        with (
            tempfile.TemporaryDirectory(prefix="praison-agent-rl-adapters-") as folder,
            VllmSampler(server, Path(folder), base=question.base, run_id="export") as sampler,
        ):
            sampler.offer(0, save)
            greedy = Sampling(most, temperature=0.0, ends=tuple(question.ends))
            return sampler.sample(prompts, greedy).ids
    finally:
        server.stop()
