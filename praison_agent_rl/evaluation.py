"""What the rewards say of the answers of base and candidate to the same prompts, and how the two compare."""

from collections.abc import Sequence
from typing import Literal

from praison_agent_rl.answering import RawAnswer
from praison_agent_rl.data import Row, columns_of
from praison_agent_rl.intervals import differences, paired_interval, prompts_needed
from praison_agent_rl.pairing import by_prompt, change_of, judged_of, paired, reward_of, total_of
from praison_agent_rl.records import Answer, Comparison
from praison_agent_rl.rewards import Reward, total


def score_answers(
    answers: Sequence[RawAnswer], rows: Sequence[Row], rewards: Sequence[Reward], *, judges: Sequence[Reward] = ()
) -> list[Answer]:
    """What each reward, and each judge, says of each answer, and the weighted sum of the rewards.

    Each is called once with all answers. An answer that failed is shown to none of them and has no scores.
    """
    answers = [RawAnswer(*answer) for answer in answers]
    sound = [answer for answer in answers if answer.error is None]
    scores, judged = _scores(rewards, sound, rows), _scores(judges, sound, rows)
    totals = total(list(scores.values()), [reward.weight for reward in rewards]) if rewards else [None] * len(sound)
    places = {(answer.prompt, answer.sample): number for number, answer in enumerate(sound)}
    found = []
    for answer in answers:
        number = places.get((answer.prompt, answer.sample))
        found.append(
            Answer(
                prompt=answer.prompt,
                sample=answer.sample,
                text=answer.text,
                tokens=answer.tokens,
                rewards={} if number is None else {name: values[number] for name, values in scores.items()},
                total=None if number is None else totals[number],
                judged={} if number is None else {name: values[number] for name, values in judged.items()},
                error=answer.error,
            )
        )
    return found


def _scores(
    rewards: Sequence[Reward], answers: Sequence[RawAnswer], rows: Sequence[Row]
) -> dict[str, list[float | None]]:
    if not answers:
        return {reward.name: [] for reward in rewards}
    asked = [rows[answer.prompt] for answer in answers]
    ids = [list(answer.ids) or list(range(answer.tokens)) for answer in answers]
    columns = {**columns_of(asked), "completion_ids": ids}
    prompts, texts = [row["prompt"] for row in asked], [answer.text for answer in answers]
    return {reward.name: reward(prompts, texts, **columns) for reward in rewards}


def compare(base: Sequence[Answer], new: Sequence[Answer], *, seed: int = 0) -> Comparison:
    """Base and candidate prompt by prompt, with a 95 % interval of each mean difference.

    A prompt counts with the mean of its scored answers. An answer that failed is neither a zero nor passed over: it is
    counted, and its prompt is left out, and counted too, only if that side has no scored answer to it.
    """
    totals = paired(by_prompt(base, total_of), by_prompt(new, total_of))
    prompts = {answer.prompt for answer in base} | {answer.prompt for answer in new}
    gains = differences(*totals)
    return Comparison(
        total=paired_interval(*totals, seed=seed),
        rewards={
            name: change_of(base, new, reward_of(name), seed=seed).interval for name in _names(base, new, "rewards")
        },
        prompts=len(gains),
        samples=len({answer.sample for answer in base}),
        wins=int((gains > 0).sum()),
        ties=int((gains == 0).sum()),
        losses=int((gains < 0).sum()),
        unscored=len(prompts) - len(gains),
        judged={
            name: change_of(base, new, judged_of(name), seed=seed).interval for name in _names(base, new, "judged")
        },
        errors_base=sum(answer.error is not None for answer in base),
        errors_new=sum(answer.error is not None for answer in new),
        needed=prompts_needed(gains),
    )


def _names(base: Sequence[Answer], new: Sequence[Answer], kind: Literal["rewards", "judged"]) -> list[str]:
    """Names of the rewards; an answer that failed may lack them, so they are collected from all."""
    return list(dict.fromkeys(name for answer in [*base, *new] for name in getattr(answer, kind)))
