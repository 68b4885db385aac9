"""Answer the chat requests of rollouts with what the policy draws, and keep each with its tokens."""

import hashlib
import threading
import time
from collections.abc import Callable
from typing import Any

from praison_agent_rl.agent_rollouts.chat_forms import Answer, Drawn, Refusal, Words, answer_to, read_request
from praison_agent_rl.agent_rollouts.desk import Desk, WaitingCall
from praison_agent_rl.agent_rollouts.jobs import TokenCall
from praison_agent_rl.errors import ModelError
from praison_agent_rl.records import Call


class PolicyChat:
    """The policy as a chat model, for any number of threads at once."""

    def __init__(self, words: Words, desk: Desk, *, room: int, model: str) -> None:
        self._words = words
        self._desk = desk
        self._room = room
        self.model = model
        """Name that it answers by."""
        self._reading = threading.Lock()  # a tokenizer serves one thread at a time

    def answer(self, job: str, agent: str, body: bytes, is_connected: Callable[[], bool]) -> tuple[WaitingCall, Answer]:
        """What the policy says to a request, once that is drawn and kept.

        Raises:
            Refusal: the request cannot be read or answered, or its rollout has ended.
        """
        call = self._desk.begin(job, agent, read_request(body), is_connected)
        self._render(call)
        drawn = self._desk.wait_for(call)
        answer = self._said(call, drawn)
        self._desk.keep(call, _record(call, answer, drawn))
        return call, answer

    def fail(self, call: WaitingCall, why: str) -> None:
        """Have the rollout keep a call as one that failed.

        Raises:
            Refusal: the rollout has ended.
        """
        self._desk.keep(call, _failed(call, why))

    def _render(self, call: WaitingCall) -> None:
        try:
            with self._reading:
                call.prompt_ids = self._words.render(call.asked.messages, call.asked.tools)
        except ModelError as error:
            raise self._refused(call, Refusal(400, str(error))) from error
        except Exception as error:
            why = f"the messages cannot be rendered: {type(error).__name__}: {error}"
            raise self._refused(call, Refusal(400, why)) from error
        if (length := len(call.prompt_ids)) > self._room:
            why = f"the messages and tools have {length} tokens, and the maximum context length is {self._room}"
            raise self._refused(call, Refusal(400, why, code="context_length_exceeded"))

    def _said(self, call: WaitingCall, drawn: Drawn) -> Answer:
        asked, name = call.asked, f"{call.job}/{call.number}"
        head = {
            "id": hashlib.sha256(name.encode()).hexdigest()[:24],  # as another run with the same jobs would have
            "created": int(call.time),
            "model": self.model,
        }
        try:
            with self._reading:
                said = self._words.parse(call.prompt_ids, drawn.ids, asked.tools)
            return answer_to(asked, head, said, len(call.prompt_ids), drawn)
        except Exception as error:
            why = f"what the policy said cannot be read: {type(error).__name__}: {error}"
            raise self._refused(call, Refusal(500, why)) from error

    def _refused(self, call: WaitingCall, refusal: Refusal) -> Refusal:
        self.fail(call, refusal.message)
        return refusal


def _record(call: WaitingCall, answer: Answer, drawn: Drawn) -> TokenCall:
    said = {"reply": answer.message, "finish": answer.finish, "usage": answer.usage, "logprobs": answer.logprobs}
    return TokenCall(
        call=_call(call, **said),
        agent=call.agent,
        prompt_ids=call.prompt_ids,
        completion_ids=drawn.ids,
        log_probs=drawn.log_probs,
    )


def _failed(call: WaitingCall, why: str) -> TokenCall:
    return TokenCall(call=_call(call, error=why), agent=call.agent, prompt_ids=call.prompt_ids)


def _call(call: WaitingCall, **outcome: Any) -> Call:
    asked = call.asked
    return Call(
        id=f"{call.job}-{call.number}",
        run=call.job,
        agent=call.agent,
        time=call.time,
        seconds=time.time() - call.time,
        model=asked.model,
        messages=asked.messages,
        tools=asked.tools,
        settings={key: value for key, value in asked.settings.items() if (key, value) != ("stream", False)},
        **outcome,
    )
