"""Keys of a training file: what is trained on, what scores it, and what the result must show."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field

from praison_agent_rl.config_values import SETTINGS, Amount, Count, Real, Seconds, Weight, Whole, read_dataset


class DataFields(BaseModel):
    """What is trained on, what scores it, and what the result must show."""

    model_config = SETTINGS

    dataset: Annotated[Any, BeforeValidator(read_dataset)] = None
    """Datasets to train on: a list of ``DatasetSpec``, a name or path, or rows in memory."""
    held_out: Amount = 0.2
    """Prompts kept back for the comparison: a share below 1, or a count."""
    held_out_seed: Whole = 0
    """Seed of that choice, apart from the training seed so that a rerun keeps back the same prompts."""
    reward_funcs: Any = None
    """Reward functions: ``module:function`` texts or callables, as given."""
    reward_weights: list[Real] | None = None
    """One weight for each reward function; by default all 1."""
    judge_funcs: Any = None
    """Reward functions that judge the held-out answers and are not trained on, given as ``reward_funcs`` are."""
    reward_timeout: Seconds = 60.0
    """Seconds for one call of one reward with up to 64 completions; a call with more may take longer in proportion."""
    reward_retries: Annotated[Whole, Field(le=10)] = 1
    """How often a reward's call that failed is made again before it is made in smaller parts."""
    reward_failures: Annotated[Weight, Field(le=1)] = 0.2
    """Share of completions without a sound score, by any one reward, above which the run stops; a None is sound."""
    reward_concurrency: Annotated[Count, Field(le=1024)] = 8
    """Calls of async rewards and judges in flight at once."""
    reward_cache: bool = True
    """Keep scores on disk (``.praisonai/rl/reward_cache.sqlite``) where a reward gives the same to the same."""
    eval_samples: Annotated[Count, Field(le=64)] = 2
    """Answers to each held-out prompt: the first greedy, the others sampled at ``temperature``."""
    min_gain: Weight = 0.0
    """What the lower end of the interval of the gain must lie above for the new model to be swapped in."""
    guards: dict[str, Weight] = {}
    """Rewards or judges, by name, whose mean may not fall by more than this: ``{correctness: 0.02}``."""
    guard_limits: dict[str, Weight] = {}
    """Limits of drift that differ from the defaults (``guards.LIMITS``): ``{longer: 3.0, empty: 0.05}``."""
    watch: bool = True
    """Say during training what goes wrong, end it where nothing more is learned, and keep the best checkpoint."""
    watch_prompts: Amount | None = None
    """Training prompts put aside to watch with: a share below 1, or a count; by default a tenth, 8 to 24, of 80 up."""
    watch_steps: Count | None = None
    """Updates between two looks at them; by default ``save_steps``."""
    patience: Whole = 200
    """Updates without a better reward on them after which training ends; 0 never ends it."""
