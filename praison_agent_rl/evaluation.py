"""Let base and candidate answer the same held-out prompts in the same way, and compare what the rewards say of it.

Both are asked by one engine in one process with the same seeds: a difference of scores is a difference of weights.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import Row, columns_of
from praison_agent_rl.errors import DataError, MissingExtra
from praison_agent_rl.models import load_model, load_tokenizer, plain_weights, render_prompts
from praison_agent_rl.records import Answer, Comparison, Interval, Plan
from praison_agent_rl.rewards import Reward, total
from praison_agent_rl.shared_prefix import sample_completions, until_end, why_not_shareable

if TYPE_CHECKING:
    import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95
_BATCH = 32


def answer_prompts(
    source: str, rows: Sequence[Row], plan: Plan, *, progress: Callable[[int, int], None] = lambda done, of: None
) -> list[tuple[int, int, str, int]]:
    """Answers of the model ``source`` to every row: (row, sample, text, tokens); sample 0 is greedy.

    The others are sampled at the temperature that training samples at. Prompts are answered in batches of similar
    length, so a prompt's answer does not depend on where it stands among the rows.

    Raises:
        DataError: a prompt leaves no room for an answer.
    """
    import torch
    from transformers import GenerationConfig

    config = TrainConfig.load(plan.config, need_model=False, need_data=False)
    source = plain_weights(source)
    tokenizer = load_tokenizer(source, config)
    model = load_model(source, config, device=plan.device).eval()
    prompts = render_prompts(tokenizer, [row["prompt"] for row in rows], plan.tools)
    _check_lengths(prompts, config)
    eos = _end_tokens(model, tokenizer)
    by_length = sorted(range(len(rows)), key=lambda place: (len(prompts[place]), place))
    answers = []
    for sample in range(plan.samples):
        greedy = {"do_sample": False} if sample == 0 else {"do_sample": True, "temperature": config.temperature}
        settings = GenerationConfig(
            max_new_tokens=config.max_completion_length, pad_token_id=tokenizer.pad_token_id, eos_token_id=eos, **greedy
        )
        torch.manual_seed(config.seed + sample)
        for start in range(0, len(rows), _BATCH):
            places = by_length[start : start + _BATCH]
            completions = _complete(model, [prompts[place] for place in places], settings, eos)
            texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
            answers += [
                (place, sample, text, len(ids)) for place, text, ids in zip(places, texts, completions, strict=True)
            ]
            progress(len(answers), len(rows) * plan.samples)
    return sorted(answers)


def score_answers(
    answers: Sequence[tuple[int, int, str, int]], rows: Sequence[Row], rewards: Sequence[Reward]
) -> list[Answer]:
    """What each reward says of each answer, and the weighted sum of it."""
    asked = [rows[place] for place, *_ in answers]
    texts = [text for _, _, text, _ in answers]
    ids = [list(range(tokens)) for *_, tokens in answers]
    columns = {**columns_of(asked), "completion_ids": ids}
    scores = [reward([row["prompt"] for row in asked], texts, **columns) for reward in rewards]
    totals = total(scores, [reward.weight for reward in rewards])
    return [
        Answer(
            prompt=place,
            sample=sample,
            text=text,
            tokens=tokens,
            rewards={reward.name: by_answer[i] for reward, by_answer in zip(rewards, scores, strict=True)},
            total=totals[i],
        )
        for i, (place, sample, text, tokens) in enumerate(answers)
    ]


def compare(base: Sequence[Answer], new: Sequence[Answer], *, seed: int = 0) -> Comparison:
    """Base and candidate prompt by prompt, with a 95 % interval of the mean difference.

    The interval is the percentile interval of a paired bootstrap over prompts (Efron and Tibshirani, An Introduction to
    the Bootstrap, 1993, ch. 13): prompts are drawn with replacement, and both sides of a prompt stay together. A prompt
    counts with the mean of its scored answers; a prompt that one side has no scored answer to is left out and counted.
    """
    totals = _paired(_by_prompt(base, ""), _by_prompt(new, ""))
    prompts = {answer.prompt for answer in base} | {answer.prompt for answer in new}
    names = list(base[0].rewards) if base else []
    differences = totals[1] - totals[0]
    return Comparison(
        total=paired_interval(*totals, seed=seed),
        rewards={
            name: paired_interval(*_paired(_by_prompt(base, name), _by_prompt(new, name)), seed=seed) for name in names
        },
        prompts=len(differences),
        samples=len({answer.sample for answer in base}),
        wins=int((differences > 0).sum()),
        ties=int((differences == 0).sum()),
        losses=int((differences < 0).sum()),
        unscored=len(prompts) - len(differences),
    )


def paired_interval(base: "np.ndarray[Any, Any]", new: "np.ndarray[Any, Any]", *, seed: int = 0) -> Interval:
    """Means of two paired samples and the bootstrap interval of their difference; NaN where there is no pair."""
    import numpy as np

    if len(base) == 0:
        nan = float("nan")
        return Interval(base=nan, new=nan, difference=nan, low=nan, high=nan)
    differences = new - base
    draws = np.random.default_rng(seed).integers(0, len(base), size=(RESAMPLES, len(base)))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(differences[draws].mean(1), [tail, 1 - tail])
    return Interval(
        base=float(base.mean()),
        new=float(new.mean()),
        difference=float(differences.mean()),
        low=float(low),
        high=float(high),
    )


def _by_prompt(answers: Sequence[Answer], reward: str) -> dict[int, float]:
    """Each prompt's mean score over its scored answers; ``""`` is the weighted total."""
    scores: dict[int, list[float]] = {}
    for answer in answers:
        score = answer.rewards[reward] if reward else answer.total
        if score is not None:
            scores.setdefault(answer.prompt, []).append(score)
    return {prompt: sum(values) / len(values) for prompt, values in scores.items()}


def _paired(base: dict[int, float], new: dict[int, float]) -> "tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]":
    try:
        import numpy as np
    except ImportError as error:
        raise MissingExtra('comparing needs numpy: pip install "praison-agent-rl[train]"') from error
    both = sorted(base.keys() & new.keys())
    return np.array([base[p] for p in both], dtype=float), np.array([new[p] for p in both], dtype=float)


def _complete(model: Any, prompts: list[list[int]], settings: Any, eos: list[int]) -> list[list[int]]:
    import torch

    pad = settings.pad_token_id
    if why_not_shareable(model) is None and min(map(len, prompts)) >= 2:
        return sample_completions(model, prompts, generation_config=settings, pad=pad, eos=eos)
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    with torch.inference_mode():
        output = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
    ends = set(eos)
    return [until_end(row, ends) for row in output[:, width:].tolist()]


def _end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Every token that ends an answer: the model may declare more than the tokenizer's one."""
    declared = model.generation_config.eos_token_id
    ends = declared if isinstance(declared, list) else [declared]
    return sorted({token for token in [*ends, tokenizer.eos_token_id] if token is not None})


def _check_lengths(prompts: list[list[int]], config: TrainConfig) -> None:
    room = config.max_seq_length - config.max_completion_length
    long = [place + 1 for place, ids in enumerate(prompts) if len(ids) > room]
    if long:
        raise DataError(
            f"{len(long)} of {len(prompts)} held-out prompts are longer than {room} tokens (max_seq_length "
            f"{config.max_seq_length} less max_completion_length {config.max_completion_length}), the first being "
            f"number {long[0]}; raise max_seq_length or take them out"
        )
