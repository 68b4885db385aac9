"""How well a model tells the chosen answer of a held-out pair from the rejected one: by its score, or by its odds."""

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from praison_agent_rl.answering import Engine
from praison_agent_rl.checksums import hash_weights
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.data import Row, prompt_key, read_rows, write_rows
from praison_agent_rl.errors import ModelError
from praison_agent_rl.intervals import wilson
from praison_agent_rl.loading import as_deployed
from praison_agent_rl.models import load_scorer, load_tokenizer, plain_weights
from praison_agent_rl.pairs.texts import Rendered, explicit, render_pairs
from praison_agent_rl.records import FEWEST_PROMPTS, Answer, RewardCard
from praison_agent_rl.runs import RunFolder, now, write_record
from praison_agent_rl.sequence_scores import padded, score_sequences

PREFERENCE = "preference"
"""Name of the measure: 1 where the chosen answer is the likelier one, 0 where it is not."""
MARGIN = "margin"
"""Log-probability of the chosen answer less that of the rejected one, nats."""

_BATCH = 16
_MOST_TRAINED = 512
"""Pairs of the training rows whose scores are looked at for their mean and spread."""
_LEVELS = (5, 25, 50, 75, 95)


class PairScore(NamedTuple):
    """What a model says of both sides of a pair."""

    chosen: float
    rejected: float

    @property
    def right(self) -> float:
        """1 if the chosen side scores higher, 0.5 if both score the same, 0 if lower or no number."""
        return float(self.chosen > self.rejected) + 0.5 * (self.chosen == self.rejected)


def measure_reward_model(run: RunFolder) -> RewardCard:
    """Score the held-out pairs, and some that were trained on, with the merged model of ``run``; writes its card."""
    plan = run.plan
    config = TrainConfig.load(plan.config, need_model=False, need_data=False)
    tokenizer = load_tokenizer(str(run.merged), config)
    model = load_scorer(str(run.merged), as_deployed(config), device=plan.device).eval()
    train, held_out = read_rows(run.train_rows), read_rows(run.held_out_rows)
    step = max(1, -(-len(train) // _MOST_TRAINED))
    limit = config.max_length or config.max_seq_length
    trained = _scores(model, render_pairs(tokenizer, train[::step], tools=plan.tools), limit)
    judged = _scores(model, render_pairs(tokenizer, held_out, tools=plan.tools), limit)
    write_rows(run.pair_scores, [{"pair": n, **score._asdict()} for n, score in enumerate(judged)])
    seen = [value for score in trained for value in score]
    accuracy, margin, prompts = by_prompt(held_out, judged)
    low, high = wilson(accuracy, prompts)
    card = RewardCard(
        name=plan.agent or "reward",
        base=plan.base,
        base_hash=_hash_of(plan.base, config),
        created=now(),
        train=len(train),
        held_out=prompts,
        accuracy=accuracy,
        accuracy_low=low,
        accuracy_high=high,
        margin=margin,
        score_mean=statistics.fmean(seen),
        score_std=statistics.pstdev(seen),
        score_quantiles=_quantiles(seen),
        form="text" if isinstance(explicit(train[0])["chosen"], str) else "messages",
        tools=plan.tools,
        max_length=limit,
        passed=prompts >= FEWEST_PROMPTS and low > 0.5,
        libraries=plan.libraries,
        run=str(run.root.resolve()),
    )
    write_record(run.card, card)
    return card


def by_prompt(rows: Sequence[Row], scores: Sequence[PairScore]) -> tuple[float, float, int]:
    """Accuracy, margin and the number of distinct prompts; the pairs of one prompt count as one, with their mean."""
    groups: dict[str, list[PairScore]] = {}
    for row, score in zip(rows, scores, strict=True):
        groups.setdefault(prompt_key(explicit(row)), []).append(score)
    if not groups:
        return math.nan, math.nan, 0
    accuracy = statistics.fmean(statistics.fmean(score.right for score in group) for group in groups.values())
    margin = statistics.fmean(statistics.fmean(s.chosen - s.rejected for s in group) for group in groups.values())
    return accuracy, margin, len(groups)


def with_preferences(
    engine: Engine, rows: Sequence[Row], answers: Sequence[Answer], tools: Sequence[dict[str, Any]]
) -> list[Answer]:
    """The answers with what the model holds of their row's pair: judged, or as their total where no reward scored."""
    pairs = render_pairs(engine.tokenizer, rows, tools=tools)
    scores = preferences(engine, pairs)
    found = []
    for answer in answers:
        score = scores[answer.prompt]
        seen = {PREFERENCE: score.right, MARGIN: score.chosen - score.rejected}
        if answer.rewards or answer.error is not None:
            update: dict[str, Any] = {"judged": {**answer.judged, **({} if answer.error else seen)}}
        else:
            margin = {MARGIN: seen[MARGIN]}
            update = {"rewards": {PREFERENCE: score.right}, "total": score.right, "judged": {**answer.judged, **margin}}
        found.append(answer.model_copy(update=update))
    return found


def preferences(engine: Engine, pairs: Sequence[tuple[Rendered, Rendered]]) -> list[PairScore]:
    """Log-probability, in nats, of what the model would write itself in both sides of each pair."""
    flat = [side for pair in pairs for side in pair]
    values = iter(_log_probs(engine.model, flat, engine.tokenizer.pad_token_id))
    return [PairScore(next(values), next(values)) for _ in pairs]


def _scores(model: Any, pairs: Sequence[tuple[Rendered, Rendered]], limit: int) -> list[PairScore]:
    values = iter(score_sequences(model, [side.ids for pair in pairs for side in pair], limit=limit))
    return [PairScore(next(values), next(values)) for _ in pairs]


def _log_probs(model: Any, sides: Sequence[Rendered], pad: int) -> Iterator[float]:
    import torch

    order = sorted(range(len(sides)), key=lambda place: len(sides[place].ids))
    found: dict[int, float] = {}
    for start in range(0, len(order), _BATCH):
        places = order[start : start + _BATCH]
        ids, mask = padded([sides[place].ids for place in places], pad, model.device)
        learned, _ = padded([sides[place].learned for place in places], 0, model.device)
        with torch.inference_mode():
            logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
            chosen = logits.gather(2, ids[:, 1:, None])[..., 0] - logits.logsumexp(2)
        found.update(zip(places, (chosen * learned[:, 1:]).sum(1).tolist(), strict=True))
    return iter(found[place] for place in range(len(sides)))


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"{level} %": ordered[min(len(ordered) - 1, round(level / 100 * (len(ordered) - 1)))] for level in _LEVELS}


def _hash_of(base: str, config: TrainConfig) -> str | None:
    try:
        return hash_weights(plain_weights(base), revision=config.revision)
    except ModelError:
        return None
