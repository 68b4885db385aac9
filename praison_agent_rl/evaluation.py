"""What the rewards say of the answers of base and candidate to the same prompts, and how the two compare."""

from collections.abc import Callable, Sequence

from praison_agent_rl.answering import RawAnswer
from praison_agent_rl.data import Row, columns_of, prompt_key
from praison_agent_rl.errors import RewardError
from praison_agent_rl.intervals import differences, paired_interval, prompts_needed
from praison_agent_rl.pairing import (
    Value,
    by_prompt,
    change_of,
    judged_of,
    missing_of,
    names_of,
    paired,
    reward_of,
    total_of,
    values_of,
)
from praison_agent_rl.records import Answer, Comparison, Run
from praison_agent_rl.rewards import Reward, Text, total
from praison_agent_rl.run_views import run_messages
from praison_agent_rl.scoring.calls import Caller

Calling = Callable[[Sequence[Reward]], Caller]


def score_answers(
    answers: Sequence[RawAnswer],
    rows: Sequence[Row],
    rewards: Sequence[Reward],
    *,
    judges: Sequence[Reward] = (),
    calling: Calling = Caller,
    runs: Sequence[Run] | None = None,
) -> list[Answer]:
    """What each reward, and each judge, says of each answer, and the weighted sum of the rewards.

    Each is called once with all answers. An answer that failed is shown to none of them and has no scores. One on
    which a reward failed has none of that reward; ``calling`` says how often that may be. With ``runs``, one for each
    answer, the rewards see the messages of the whole run, and what they ask of it.

    Raises:
        RewardError: one failed on too many, or there are more or fewer runs than answers.
    """
    answers = [RawAnswer(*answer) for answer in answers]
    if runs is not None and len(runs) != len(answers):
        raise RewardError(f"{len(runs)} runs were given for {len(answers)} answers; give one for each")
    sound = [answer for answer in answers if answer.error is None]
    known = None if runs is None else [r for r, answer in zip(runs, answers, strict=True) if answer.error is None]
    scores, judged = (_scores(scorers, sound, rows, calling, known) for scorers in (rewards, judges))
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
    rewards: Sequence[Reward],
    answers: Sequence[RawAnswer],
    rows: Sequence[Row],
    calling: Calling,
    runs: Sequence[Run] | None,
) -> dict[str, list[float | None]]:
    if not answers:
        return {reward.name: [] for reward in rewards}
    asked = [rows[answer.prompt] for answer in answers]
    ids = [list(answer.ids) or list(range(answer.tokens)) for answer in answers]
    columns = {**columns_of(asked), "completion_ids": ids}
    prompts, texts = [row["prompt"] for row in asked], _completions(answers, runs)
    caller = calling(rewards)
    try:
        found = caller.score(prompts, texts, columns, runs=runs)
        if reason := caller.too_many_failed(at_the_end=True):
            raise RewardError(f"{reason}\nMend the reward, or allow more with reward_failures")
    finally:
        caller.close()
    return found


def _completions(answers: Sequence[RawAnswer], runs: Sequence[Run] | None) -> list[Text]:
    """What was said to each prompt: the text, or all messages of a run, as in training."""
    if runs is None:
        return [answer.text for answer in answers]
    return [run_messages(run) or answer.text for answer, run in zip(answers, runs, strict=True)]


def by_distinct_prompt(answers: Sequence[Answer], rows: Sequence[Row]) -> list[Answer]:
    """The answers with the place of the first row that has the same prompt: the same prompt shows the same thing twice.

    Rows are alike by their prompt alone, as `data.split_rows` takes them, whatever their other columns say.
    """
    first: dict[str, int] = {}
    places = [first.setdefault(prompt_key(row), place) for place, row in enumerate(rows)]
    return [answer.model_copy(update={"prompt": places[answer.prompt]}) for answer in answers]


def compare(base: Sequence[Answer], new: Sequence[Answer], *, seed: int = 0) -> Comparison:
    """Base and candidate prompt by prompt, with a 95 % interval of each mean difference.

    A prompt counts with the mean of its scored answers. An answer that failed is neither a zero nor passed over: it is
    counted, and its prompt is left out, and counted too, only if that side has no scored answer to it. So is an answer
    to which a reward gave no score; ``guards.score_guards`` tests whether the gain rests on it.
    """
    both = [*base, *new]
    totals = paired(by_prompt(base, total_of), by_prompt(new, total_of))
    prompts = {answer.prompt for answer in base} | {answer.prompt for answer in new}
    gains = differences(*totals)
    return Comparison(
        total=paired_interval(*totals, seed=seed),
        rewards={name: change_of(base, new, reward_of(name), seed=seed).interval for name in names_of(both, "rewards")},
        prompts=len(gains),
        samples=len({answer.sample for answer in base}),
        wins=int((gains > 0).sum()),
        ties=int((gains == 0).sum()),
        losses=int((gains < 0).sum()),
        unscored=len(prompts) - len(gains),
        judged={name: change_of(base, new, judged_of(name), seed=seed).interval for name in names_of(both, "judged")},
        errors_base=sum(answer.error is not None for answer in base),
        errors_new=sum(answer.error is not None for answer in new),
        missing_base={name: _missing(base, value) for name, value in values_of(both).items()},
        missing_new={name: _missing(new, value) for name, value in values_of(both).items()},
        unscored_base=_missing(base, total_of),
        unscored_new=_missing(new, total_of),
        needed=prompts_needed(gains),
    )


def _missing(answers: Sequence[Answer], value: Value) -> int:
    return sum(missing_of(value)(answer) == 1 for answer in answers)
