"""A trained reward model as a reward: ``rewards/my-rm``, a folder or a hub name; weights load at the first call."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import MissingExtra, ModelError, RewardError
from praison_agent_rl.models import find_weights, load_scorer, load_tokenizer
from praison_agent_rl.pairs.texts import render_answer
from praison_agent_rl.reward_cards import find_reward_model
from praison_agent_rl.sequence_scores import score_sequences

_LONGEST = 2048  # tokens, of a model without a card


class ModelReward:
    """The score that a reward model gives an answer.

    ``scale="zscore"`` takes off the mean of the scores of its training answers and divides by their spread; ``clip``
    bounds the result to ±clip. ``tools`` are shown as in training.
    """

    trusted = True
    """It is not tried before training: that would load its weights."""
    cacheable = True

    def __init__(
        self,
        model: str,
        *,
        scale: Literal["none", "zscore"] = "none",
        clip: float | None = None,
        batch: int = 16,
        device: str | None = None,
    ) -> None:
        faults = []
        if scale not in ("none", "zscore"):
            faults.append(f"scale is {scale!r}, but must be 'none' or 'zscore'")
        if clip is not None and not clip > 0:
            faults.append(f"clip is {clip!r}, but must be above 0")
        if not (isinstance(batch, int) and batch > 0):
            faults.append(f"batch is {batch!r}, but must be a number above 0")
        source, card = find_reward_model(model)
        if scale == "zscore" and (card is None or not card.score_std > 0):
            faults.append(f"scale 'zscore' needs the card of a model that was trained here, and {model!r} has none")
        if faults:
            raise RewardError("; ".join(faults))
        try:
            self.source = find_weights(source)
        except (ModelError, MissingExtra) as error:
            raise RewardError(f"the reward model {model!r} cannot be found: {error}") from error
        self.card, self._given = card, model
        self._shift, self._spread = (card.score_mean, card.score_std) if card and scale == "zscore" else (0.0, 1.0)
        self._clip, self._batch, self._device, self._scale = clip, batch, device, scale
        self._loaded: tuple[Any, Any] | None = None
        form = card.form if card else "messages"
        self.reads = (form, form)

    @property
    def __name__(self) -> str:
        return self._pinned.removeprefix("rewards/").replace("/", "_").strip("_.") or "reward_model"

    @property
    def _pinned(self) -> str:
        """The name that means these weights for good: the newest version may be another one tomorrow."""
        if self.card and self.card.version and self._given.strip().startswith("rewards/"):
            return f"rewards/{self.card.name}/{self.card.version}"
        return self._given.strip()

    @property
    def reward_spec(self) -> dict[str, Any]:
        """How another process makes the same reward."""
        given = {"scale": (self._scale, "none"), "clip": (self._clip, None), "batch": (self._batch, 16)}
        changed = {name: value for name, (value, usual) in given.items() if value != usual}
        return {"reward": self._pinned, **changed, **({"device": self._device} if self._device else {})}

    @property
    def cache_key(self) -> str:
        """What a score depends on besides prompt and answer."""
        folder = Path(self.source)
        weights = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
        stamps = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in weights]
        return f"{self.source}|{stamps}|{self._scale}|{self._shift}|{self._spread}|{self._clip}"

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        """One number for each completion."""
        model, tokenizer = self._model()
        tools = self.card.tools if self.card else []
        pairs = zip(prompts, completions, strict=True)
        ids = [render_answer(tokenizer, prompt, answer, tools=tools).ids for prompt, answer in pairs]
        limit = self.card.max_length if self.card else _LONGEST
        scores = score_sequences(model, ids, limit=limit, batch=self._batch)
        return [self._bounded((score - self._shift) / self._spread) for score in scores]

    def _bounded(self, score: float) -> float:
        return score if self._clip is None else max(-self._clip, min(self._clip, score))

    def _model(self) -> tuple[Any, Any]:
        if self._loaded is None:
            import torch

            device = self._device or ("cuda" if torch.cuda.is_available() else "cpu")
            config = TrainConfig.load({"method": "reward", "model_name": self.source}, need_data=False)
            tokenizer = load_tokenizer(self.source, config)
            model = load_scorer(self.source, config, device=device).eval()
            self._loaded = model, tokenizer
        return self._loaded
