"""One model answers rows of prompts, and says how likely answers are under it; it scores nothing.

Whatever is compared is asked by this one engine, in the same batches and with the same seeds, so that a difference of
answers is a difference of weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import Row
from praison_agent_rl.errors import DataError, ModelError
from praison_agent_rl.loading import load_deployed
from praison_agent_rl.models import load_tokenizer, plain_weights, render_prompts
from praison_agent_rl.records import Plan
from praison_agent_rl.rollouts import Sampled, Sampling, declared_settings
from praison_agent_rl.shareable import why_not_shareable
from praison_agent_rl.shared_prefix import completion_states, sample_completions, until_end

if TYPE_CHECKING:
    import torch

    from praison_agent_rl.decoding.weights import SamplingModel

Progress = Callable[[int, int], None]

_BATCH = 32
_STATES_AT_ONCE = 256
"""Positions whose logits over the whole vocabulary are held at once."""


class RawAnswer(NamedTuple):
    """One answer before any reward saw it."""

    prompt: int
    """Place among the rows."""
    sample: int
    """0 is the greedy answer, the others are sampled."""
    text: str
    tokens: int
    ids: tuple[int, ...] = ()
    """Token ids, the end token included; empty where the answer did not come from the engine."""
    error: str | None = None
    """Why there is no answer."""


class Manner(NamedTuple):
    """How rows are asked."""

    samples: int = 1
    """Answers to each: the first greedy, the others sampled at the temperature that training samples at."""
    tools: Sequence[dict[str, Any]] = ()
    """Schemas that the model is shown."""
    at_most: int | None = None
    """Tokens of an answer, where that is less than the config's ``max_completion_length``."""
    strict: bool = True
    """Whether a prompt that leaves no room for an answer is an error; else its answer is one that failed."""


@dataclass(frozen=True)
class Engine:
    """A loaded model with all that its answers depend on."""

    model: Any
    tokenizer: Any
    config: TrainConfig
    eos: list[int]
    """Every token that ends an answer."""
    by_decoder: bool = True
    """Whether this package's own decoder answers where it can; else ``generate`` does."""

    @property
    def room(self) -> int:
        """Tokens that a prompt may have."""
        return self.config.max_seq_length - self.config.max_completion_length

    @cached_property
    def decoder(self) -> "SamplingModel | None":
        """This package's own decoder of the model as it is now, on a CPU; None where ``generate`` answers."""
        from praison_agent_rl.decoding.probe import why_not_drawable
        from praison_agent_rl.decoding.weights import SamplingModel

        if not self.by_decoder or self.model.device.type != "cpu" or getattr(self.model, "is_quantized", False):
            return None
        if why_not_shareable(self.model, longest=self.config.max_seq_length):
            return None
        sampled = _settings(self, sampling_of(self, 1))
        if declared_settings(self.model.generation_config, sampled):
            return None
        decoder = SamplingModel(self.model)
        return None if why_not_drawable(decoder, self.model) else decoder


def load_engine(source: str, plan: Plan) -> Engine:
    """The model of ``source`` as it is served, with the settings of ``plan``."""
    config = TrainConfig.load(plan.config, need_model=False, need_data=False)
    source = plain_weights(source)
    tokenizer = load_tokenizer(source, config)
    model = load_deployed(source, config, device=plan.device).eval()
    return Engine(model, tokenizer, config, _end_tokens(model, tokenizer))


def answer_prompts(
    source: str, rows: Sequence[Row], plan: Plan, *, progress: Progress = lambda done, of: None
) -> list[RawAnswer]:
    """Answers of the model ``source`` to every row, ``plan.samples`` each; sample 0 is greedy.

    Raises:
        DataError: a prompt leaves no room for an answer.
    """
    manner = Manner(plan.samples, plan.tools)
    return answer_rows(load_engine(source, plan), rows, manner, progress=progress)


def answer_rows(
    engine: Engine, rows: Sequence[Row], manner: Manner, *, progress: Progress = lambda done, of: None
) -> list[RawAnswer]:
    """Answers to every row, in the order of rows and samples.

    Prompts are answered in batches of similar length, so a prompt's answer does not depend on where it stands among the
    rows.

    Raises:
        DataError: a prompt leaves no room for an answer, and ``manner`` is strict.
    """
    import torch

    prompts, faults = _rendered(engine, [row["prompt"] for row in rows], manner)
    samples = range(manner.samples)
    answers = [RawAnswer(place, sample, "", 0, error=why) for place, why in faults.items() for sample in samples]
    by_length = sorted(prompts, key=lambda place: (len(prompts[place]), place))
    for sample in samples:
        sampling = sampling_of(engine, sample, manner.at_most)
        torch.manual_seed(engine.config.seed + sample)
        for start in range(0, len(by_length), _BATCH):
            places = by_length[start : start + _BATCH]
            completions = complete(engine, [prompts[place] for place in places], sampling).ids
            texts = engine.tokenizer.batch_decode(completions, skip_special_tokens=True)
            answers += [
                RawAnswer(place, sample, text, len(ids), tuple(ids))
                for place, text, ids in zip(places, texts, completions, strict=True)
            ]
            progress(len(answers), len(rows) * manner.samples)
    return sorted(answers)


def _rendered(engine: Engine, prompts: Sequence[Any], manner: Manner) -> tuple[dict[int, list[int]], dict[int, str]]:
    """Token ids of the prompts by place, and by place too what is wrong with those that cannot be asked."""
    if manner.strict:
        rendered = dict(enumerate(render_prompts(engine.tokenizer, prompts, manner.tools)))
        if long := [place for place, ids in rendered.items() if len(ids) > engine.room]:
            raise DataError(_too_long(long, len(prompts), engine))
        return rendered, {}
    sound, faults = {}, {}
    for place, prompt in enumerate(prompts):
        try:
            (ids,) = render_prompts(engine.tokenizer, [prompt], manner.tools)
        except ModelError as error:
            faults[place] = str(error)
            continue
        if len(ids) > engine.room:
            faults[place] = f"the prompt is longer than {engine.room} tokens"
        else:
            sound[place] = ids
    return sound, faults


def likelihoods(
    engine: Engine, prompts: Sequence[Any], answers: Sequence[RawAnswer], *, tools: Sequence[dict[str, Any]] = ()
) -> list[float | None]:
    """Mean log-probability of each answer's tokens after its prompt, nats a token; None where it has no token.

    An answer without ids is read with the engine's own tokenizer.
    """
    import torch

    rendered = render_prompts(engine.tokenizer, prompts, tools)
    encoded = [list(a.ids) or engine.tokenizer(a.text, add_special_tokens=False)["input_ids"] for a in answers]
    known = [place for place, ids in enumerate(encoded) if ids and len(rendered[place]) <= engine.room]
    found: list[float | None] = [None] * len(answers)
    with torch.no_grad():
        for start in range(0, len(known), _BATCH):
            places = known[start : start + _BATCH]
            means = _mean_log_probs(engine, [rendered[p] for p in places], [encoded[p] for p in places])
            for place, mean in zip(places, means, strict=True):
                found[place] = mean
    return found


def same_vocabulary(one: Any, other: Any) -> bool:
    """Whether token ids of one tokenizer mean the same to another."""
    return bool(one.get_vocab() == other.get_vocab())


def token_log_probs(
    engine: Engine, prompts: list[list[int]], completions: list[list[int]], *, temperature: float = 1.0
) -> "list[torch.Tensor]":
    """Natural log-probability of each token of each completion, logits divided by ``temperature``; with gradients."""
    import torch

    model = engine.model
    width, pad = max(map(len, completions)), engine.tokenizer.pad_token_id
    if not _shareable(model, prompts, width):
        pairs = zip(prompts, completions, strict=True)
        return [_log_probs_alone(model, prompt, ids, temperature) for prompt, ids in pairs]
    tokens = torch.tensor([ids + [pad] * (width - len(ids)) for ids in completions], device=model.device)
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in completions], device=model.device)
    states = completion_states(model, prompts, tokens, mask, pad=pad)
    head, wanted = model.get_output_embeddings(), tokens[mask.bool()]
    pieces = zip(states.split(_STATES_AT_ONCE), wanted.split(_STATES_AT_ONCE), strict=True)
    scores = torch.cat([_log_probs(head(some) / temperature, ids) for some, ids in pieces])
    return list(scores.split(mask.sum(1).tolist()))


def _mean_log_probs(engine: Engine, prompts: list[list[int]], completions: list[list[int]]) -> list[float]:
    return [float(scores.mean()) for scores in token_log_probs(engine, prompts, completions)]


def _log_probs_alone(model: Any, prompt: list[int], completion: list[int], temperature: float) -> "torch.Tensor":
    import torch

    ids = torch.tensor([prompt + completion], device=model.device)
    logits = model(input_ids=ids, logits_to_keep=len(completion) + 1).logits[0, :-1]
    return _log_probs(logits / temperature, ids[0, len(prompt) :])


def _log_probs(logits: "torch.Tensor", ids: "torch.Tensor") -> "torch.Tensor":
    logits = logits.float()
    return logits.gather(1, ids[:, None])[:, 0] - logits.logsumexp(1)


def sampling_of(engine: Engine, sample: int, at_most: int | None = None) -> Sampling:
    """How answer number ``sample`` is drawn: 0 by the likeliest tokens, the others as training samples."""
    config = engine.config
    tokens = min(config.max_completion_length, at_most or config.max_completion_length)
    return Sampling(tokens, temperature=config.temperature if sample else 0.0, ends=tuple(engine.eos))


def complete(engine: Engine, prompts: list[list[int]], sampling: Sampling) -> Sampled:
    """A completion for each prompt, in order; log-probabilities where the own decoder draws."""
    shareable = _shareable(engine.model, prompts, sampling.max_tokens)
    if shareable and engine.decoder is not None:
        from praison_agent_rl.decoding.loop import draw

        return draw(engine.decoder, prompts, sampling, pad=engine.tokenizer.pad_token_id)
    settings = _settings(engine, sampling)
    if shareable:
        pad, ends = settings.pad_token_id, engine.eos
        ids = sample_completions(engine.model, prompts, generation_config=settings, pad=pad, eos=ends)
    else:
        ids = _generate(engine.model, prompts, settings, set(engine.eos))
    return Sampled(ids, None)


def _settings(engine: Engine, sampling: Sampling) -> Any:
    from transformers import GenerationConfig

    drawn: dict[str, Any] = {"do_sample": False}
    if sampling.temperature:  # all in words: what is left out, `generate` takes from the model, or a top_k of 50
        truncated = {"top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}
        drawn = {"do_sample": True, "temperature": sampling.temperature, **truncated}
    return GenerationConfig(
        repetition_penalty=sampling.repetition_penalty,
        max_new_tokens=sampling.max_tokens,
        pad_token_id=engine.tokenizer.pad_token_id,
        eos_token_id=engine.eos,
        **drawn,
    )


def _generate(model: Any, prompts: list[list[int]], settings: Any, ends: set[int]) -> list[list[int]]:
    import torch

    width, pad = max(map(len, prompts)), settings.pad_token_id
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    with torch.inference_mode():
        output = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
    return [until_end(row, ends) for row in output[:, width:].tolist()]


def _shareable(model: Any, prompts: list[list[int]], completion: int) -> bool:
    """Whether prompts can be computed once that are followed by as many tokens as ``completion``, or fewer."""
    lengths = [len(prompt) for prompt in prompts]
    return min(lengths) >= 2 and why_not_shareable(model, longest=max(lengths) + completion) is None


def _end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Every token that ends an answer: the model may declare more than the tokenizer's one."""
    declared = model.generation_config.eos_token_id
    ends = declared if isinstance(declared, list) else [declared]
    return sorted({token for token in [*ends, tokenizer.eos_token_id] if token is not None})


def _too_long(long: list[int], of: int, engine: Engine) -> str:
    config = engine.config
    return (
        f"{len(long)} of {of} held-out prompts are longer than {engine.room} tokens (max_seq_length "
        f"{config.max_seq_length} less max_completion_length {config.max_completion_length}), the first being "
        f"number {long[0] + 1}; raise max_seq_length or take them out"
    )
