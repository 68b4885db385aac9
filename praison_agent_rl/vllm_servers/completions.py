"""What a vLLM server is asked for completions with, and whether its answer has the form that vLLM's have.

What the answer says is not judged here.
"""

from collections.abc import Callable
from typing import Any

from praison_agent_rl.rollouts import Sampling


def completion_request(name: str, prompt: list[int], sampling: Sampling) -> dict[str, Any]:
    """Every setting is said, as a server fills in what is not from the model's generation config."""
    drawn = {key: getattr(sampling, key) for key in ("max_tokens", "temperature", "top_p", "top_k", "min_p")}
    seed = {} if sampling.seed is None else {"seed": sampling.seed}
    return {
        "model": name,
        "prompt": prompt,
        **drawn,
        **seed,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(sampling.ends),
        "ignore_eos": True,  # else the model's own end tokens end it too, asked for or not
        "logprobs": 0,  # of the tokens drawn and no others
        "return_token_ids": True,
    }


def why_unreadable(choices: Any) -> str | None:
    """What in the choices of an answer has another form than with vLLM; None if nothing has.

    >>> why_unreadable([{"token_ids": [7, "9"]}])
    "token_ids [7, '9']"
    """
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        return _part("choices", choices)
    for choice in choices:
        if not _is_number_of_something(choice.get("index", 0)):
            return _part("index", choice["index"])
        for name in ("token_ids", "prompt_token_ids"):
            if not _is_list_of(choice.get(name), _is_number_of_something):
                return _part(name, choice[name])
        log_probs = choice.get("logprobs")
        if not isinstance(log_probs, dict | None):
            return _part("logprobs", log_probs)
        for name, fits in (("token_logprobs", _is_log_prob), ("top_logprobs", _are_log_probs)):
            if not _is_list_of((log_probs or {}).get(name), fits):
                return _part(name, (log_probs or {})[name])
    return None


def _part(name: str, value: Any) -> str:
    return f"{name} {str(value)[:80] if isinstance(value, list | dict) else repr(value)[:80]}"


def _is_list_of(value: Any, fits: Callable[[Any], bool]) -> bool:
    return value is None or (isinstance(value, list) and all(map(fits, value)))


def _is_number_of_something(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_log_prob(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _are_log_probs(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and all(map(_is_log_prob, value.values())))
