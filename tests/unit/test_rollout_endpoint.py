"""The endpoint that agents make rollouts with: who gets which answer, what is kept, and that nothing hangs."""

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import pytest

from praison_agent_rl.agent_rollouts import desk
from praison_agent_rl.agent_rollouts.chat_forms import Drawn, read_request
from praison_agent_rl.agent_rollouts.endpoint import RolloutEndpoint
from praison_agent_rl.agent_rollouts.http_door import LARGEST_BODY
from praison_agent_rl.agent_rollouts.jobs import RolloutJob
from praison_agent_rl.errors import AgentError, ModelError, TrainingFailed
from praison_agent_rl.rollouts import Sampled, Sampling

END = 0
PLAIN = Sampling(max_tokens=20, ends=(END,))
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
PATIENCE = 30.0


class Letters:
    """A token for each character; ``!name {...};name {...}`` are tool calls."""

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        said = "".join(str(message["content"]) for message in messages)
        if "REFUSED" in said:
            raise ModelError("the template refuses a second system message")
        if "BROKEN" in said:
            raise ZeroDivisionError("by a template")
        return [ord(letter) for letter in said + "".join(tool["function"]["name"] for tool in tools)]

    def parse(self, prompt_ids: list[int], completion_ids: list[int], tools: list[dict[str, Any]]) -> dict[str, Any]:
        text = "".join(chr(token) for token in completion_ids if token != END)
        if text == "unreadable":
            raise LookupError("no such call")
        if text.startswith("?"):
            return {"role": "assistant", "content": text[-1], "reasoning_content": text[1:-1]}
        if not text.startswith("!"):
            return {"role": "assistant", "content": text}
        pairs = [call.split(" ", 1) for call in text[1:].split(";")]
        calls = [{"type": "function", "function": {"name": name, "arguments": json.loads(a)}} for name, a in pairs]
        return {"role": "assistant", "content": "", "tool_calls": calls}


def says(*texts: str) -> Callable[[list[list[int]], Sampling], Sampled]:
    """Draws these in turn, each with an end token and a log-probability of -1 a token."""
    left = iter(texts)

    def draw(prompts: list[list[int]], sampling: Sampling) -> Sampled:
        ids = [([ord(letter) for letter in next(left)] + [END])[: sampling.max_tokens] for _ in prompts]
        return Sampled(ids, [[-1.0] * len(each) for each in ids])

    return draw


def echo(prompts: list[list[int]], sampling: Sampling) -> Sampled:
    """Says the prompt again."""
    return Sampled([[*prompt, END][: sampling.max_tokens] for prompt in prompts], None)


_CONNECTIONS: list[http.client.HTTPConnection] = []


@pytest.fixture(autouse=True)
def closed_connections() -> Iterator[None]:
    yield
    while _CONNECTIONS:
        _CONNECTIONS.pop().close()


class Client:
    """One connection, kept alive until the test ends."""

    def __init__(self, endpoint: RolloutEndpoint, key: str | None = None) -> None:
        self.http = http.client.HTTPConnection(endpoint.address.removeprefix("http://"), timeout=PATIENCE)
        _CONNECTIONS.append(self.http)
        self.headers = {"Authorization": f"Bearer {endpoint.key if key is None else key}"}

    def send(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        self.http.request(method, path, None if body is None else json.dumps(body), self.headers)
        reply = self.http.getresponse()
        return reply.status, reply.read()

    def jobs(self, query: str = "wait=10") -> list[dict[str, Any]]:
        status, body = self.send("GET", f"/jobs?{query}")
        assert status == 200, body
        return json.loads(body)["jobs"]

    def chat(self, job: str, text: str, *, agent: str = "a", **more: Any) -> tuple[int, Any]:
        request = {"model": "policy", "messages": [{"role": "user", "content": text}], **more}
        status, body = self.send("POST", chat_path(job, agent), request)
        return status, body if status == 200 and more.get("stream") else json.loads(body)

    def said(self, job: str, text: str, **more: Any) -> str:
        status, reply = self.chat(job, text, **more)
        assert status == 200, reply
        return reply["choices"][0]["message"]["content"]

    def end(self, job: str, **outcome: Any) -> int:
        return self.send("POST", f"/jobs/{job}", {"id": job, **outcome})[0]


def chat_path(job: str, agent: str) -> str:
    return f"/rollouts/{quote(job, safe='')}/{quote(agent, safe='')}/v1/chat/completions"


def job(name: str, prompt: str = "", seconds: float = PATIENCE) -> RolloutJob:
    return RolloutJob(id=name, prompt=prompt or f"ask {name}", seconds=seconds)


@pytest.fixture
def endpoint() -> Iterator[RolloutEndpoint]:
    with RolloutEndpoint(Letters(), room=40, at_most=30, first_host_seconds=PATIENCE) as opened:
        yield opened


@contextmanager
def meanwhile(*tasks: Callable[[], Any]) -> Iterator[list[Any]]:
    """Do these in threads while the block runs; what one raises fails the test."""
    found: list[Any] = [None] * len(tasks)

    def do(place: int) -> None:
        try:
            found[place] = tasks[place]()
        except BaseException as error:  # noqa: BLE001 - raised below
            found[place] = error

    threads = [threading.Thread(target=do, args=(place,), daemon=True) for place in range(len(tasks))]
    for thread in threads:
        thread.start()
    yield found
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    for each in found:
        if isinstance(each, BaseException):
            raise each


def each_in_a_thread(endpoint: RolloutEndpoint, count: int, do: Callable[[Client, dict[str, Any]], Any]) -> list[Any]:
    """A host that takes ``count`` jobs and does them all at once."""
    host, jobs = Client(endpoint), []
    while len(jobs) < count:
        jobs += host.jobs()
    tasks = [lambda each=each: do(Client(endpoint), each) for each in jobs]
    with meanwhile(*tasks) as found:
        pass
    return found


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_call_is_answered_in_the_form_of_openai_and_kept_with_its_tokens(endpoint):
    def agent() -> Any:
        client = Client(endpoint)
        (taken,) = client.jobs()
        assert taken == {"id": "j1", "prompt": "add", "history": [], "seconds": PATIENCE}
        status, reply = client.chat("j1", "Hi", tools=[TOOL], temperature=0.3, stream=False, top_p=None)
        assert status == 200 and client.end("j1", output="Hello", seconds=2.5, tool_errors=["add"]) == 200
        return reply

    ends: list[tuple[int, int]] = []
    before = time.time()
    with meanwhile(agent) as found:
        (rollout,) = endpoint.run(
            [job("j1", "add")], says("Hello"), PLAIN, on_end=lambda done, of: ends.append((done, of))
        )
    reply = found[0]
    usage = {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    message = {"role": "assistant", "content": "Hello"}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    assert reply["choices"] == [choice] and reply["usage"] == usage
    assert reply["object"] == "chat.completion" and reply["model"] == "policy" and reply["id"].startswith("chatcmpl-")
    assert (
        rollout.outcome.output == "Hello" and rollout.outcome.tool_errors == ["add"] and rollout.outcome.seconds == 2.5
    )
    (kept,) = rollout.calls
    assert kept.prompt_ids == [72, 105, 97, 100, 100] and kept.completion_ids == [72, 101, 108, 108, 111, END]
    assert kept.log_probs == [-1.0] * 6 and kept.agent == "a"
    call = kept.call
    assert (call.id, call.run, call.agent, call.model) == ("j1-0", "j1", "a", "policy")
    assert call.messages == [{"role": "user", "content": "Hi"}] and call.tools == [TOOL]
    assert call.settings == {"temperature": 0.3}
    assert (call.reply, call.finish, call.usage, call.error) == (message, "stop", usage, None)
    assert before <= call.time <= call.time + call.seconds <= time.time()
    assert ends == [(1, 1)]


def test_32_clients_at_once_are_drawn_together_and_each_gets_its_own_answer(endpoint):
    sizes: list[int] = []

    def draw(prompts: list[list[int]], sampling: Sampling) -> Sampled:
        sizes.append(len(prompts))
        if len(sizes) == 1:  # the others come in the meantime
            until(lambda: len(prompts) + len(endpoint._desk._waiting) == 32)
        return echo(prompts, sampling)

    def do(client: Client, taken: dict[str, Any]) -> None:
        assert client.said(taken["id"], taken["prompt"]) == taken["prompt"]
        assert client.end(taken["id"], output=taken["prompt"]) == 200

    jobs = [job(f"j{number}", f"marker {number}") for number in range(32)]
    with meanwhile(lambda: each_in_a_thread(endpoint, 32, do)):
        rollouts = endpoint.run(jobs, draw, PLAIN)
    assert sum(sizes) == 32 and len(sizes) <= 2
    assert [each.job for each in rollouts] == jobs
    for each in rollouts:
        (kept,) = each.calls
        assert each.outcome.output == each.job.prompt == kept.call.reply["content"]
        assert "".join(map(chr, kept.prompt_ids)) == each.job.prompt


def test_no_time_is_waited_once_all_that_are_under_way_have_asked(endpoint, monkeypatch):
    monkeypatch.setattr(desk, "QUIET", (10 * PATIENCE, 0))
    monkeypatch.setattr(desk, "LONGEST_GATHERING", (10 * PATIENCE, 0))
    sizes: list[int] = []

    def draw(prompts: list[list[int]], sampling: Sampling) -> Sampled:
        sizes.append(len(prompts))
        return echo(prompts, sampling)

    def do(client: Client, taken: dict[str, Any]) -> None:
        client.said(taken["id"], "one")
        client.said(taken["id"], "two")
        until(lambda: len(sizes) == 2)  # both have asked twice
        client.end(taken["id"])

    with meanwhile(lambda: each_in_a_thread(endpoint, 2, do)):
        endpoint.run([job("j1"), job("j2")], draw, PLAIN)
    assert sizes == [2, 2]


@pytest.mark.parametrize(("draw_seconds", "sizes"), [(0.0, [1, 1]), (1000.0, [2])])
def test_calls_are_waited_for_in_proportion_to_what_a_draw_takes(draw_seconds, sizes):
    """The second of two rollouts asks later than is waited for it where a draw takes no time."""
    at, found = desk.Desk(first_host_seconds=PATIENCE), []
    at.is_open = True
    at.lay_out([job("j1"), job("j2")])
    at.take(limit=None, wait=0, is_connected=lambda: True)
    asked = read_request(b'{"messages": [{"role": "user", "content": "Hi"}]}')

    def ask(name: str) -> None:
        at.wait_for(at.begin(name, "a", asked, lambda: True))

    def ask_late() -> None:
        until(lambda: at._waiting if draw_seconds else found)
        time.sleep(2 * desk.LONGEST_GATHERING[0])
        ask("j2")

    with meanwhile(lambda: ask("j1"), ask_late):
        while sum(found) < 2:
            calls = at.next_calls(draw_seconds)
            for call in calls:
                call.give(Drawn([], None, True))
            found += [len(calls)] if calls else []
    assert found == sizes


def test_calls_of_one_rollout_stand_in_the_order_in_which_they_came(endpoint):
    def agent() -> None:
        client = Client(endpoint)
        client.jobs()
        assert client.said("j1", "1", agent="first") == "one"
        assert client.said("j1", "2", agent="Zweite Ägentin/日本 ?") == "two"
        assert client.said("j1", "3", agent="first") == "three"
        client.end("j1")

    with meanwhile(agent):
        (rollout,) = endpoint.run([job("j1")], says("one", "two", "three"), PLAIN)
    assert [(kept.agent, kept.call.reply["content"]) for kept in rollout.calls] == [
        ("first", "one"),
        ("Zweite Ägentin/日本 ?", "two"),
        ("first", "three"),
    ]
    assert [kept.call.agent for kept in rollout.calls] == [kept.agent for kept in rollout.calls]


def answered(endpoint: RolloutEndpoint, text: str, sampling: Sampling = PLAIN, **more: Any) -> tuple[Any, Any]:
    """The reply to one request, and the call that was kept."""

    def agent() -> Any:
        client = Client(endpoint)
        client.jobs()
        status, reply = client.chat("j1", "Hi", **more)
        assert status == 200 and client.end("j1") == 200
        return reply

    with meanwhile(agent) as found:
        (rollout,) = endpoint.run([job("j1")], says(text), sampling)
    return found[0], rollout.calls[0]


CALLS = '!add {"a": 1};add {"é": "x"}'
ROOMY = Sampling(max_tokens=30, ends=(END,))


def test_tool_calls_get_ids_of_their_own_and_their_arguments_are_text(endpoint):
    reply, kept = answered(endpoint, CALLS, ROOMY)
    message = reply["choices"][0]["message"]
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [{"name": "add", "arguments": '{"a": 1}'}, {"name": "add", "arguments": '{"é": "x"}'}]
    first, second = (call["id"] for call in message["tool_calls"])
    assert first != second and first.startswith("call_") and int(first.removeprefix("call_"), 16)
    assert reply["choices"][0]["finish_reason"] == "tool_calls" == kept.call.finish and kept.call.reply == message
    other, _ = answered(endpoint, CALLS, ROOMY)  # the same job once more
    assert other["choices"][0]["message"] == message


def test_a_stream_gives_the_name_of_a_tool_call_first_and_its_arguments_later(endpoint):
    body, kept = answered(endpoint, CALLS, ROOMY, stream=True, stream_options={"include_usage": True})
    *events, last, nothing = body.decode().split("\n\n")
    assert last == "data: [DONE]" and nothing == ""
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"} and len({c["id"] for c in chunks}) == 1
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == kept.call.usage
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    ids = [call["id"] for call in kept.call.reply["tool_calls"]]
    head = {"type": "function", "function": {"name": "add", "arguments": ""}}
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"tool_calls": [{"id": ids[0], "index": 0, **head}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1}'}}]},
        {"tool_calls": [{"id": ids[1], "index": 1, **head}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": '{"é": "x"}'}}]},
        {},
    ]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert reasons == [None] * 5 + ["tool_calls"]
    assert kept.call.settings == {"stream": True, "stream_options": {"include_usage": True}}


def test_thoughts_come_before_what_is_said(endpoint):
    body, kept = answered(endpoint, "?hmm7", stream=True)
    chunks = [json.loads(event.removeprefix("data: ")) for event in body.decode().split("\n\n")[:-2]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"reasoning_content": "hmm"}, {"content": "7"}, {}]
    assert kept.call.reply == {"role": "assistant", "content": "7", "reasoning_content": "hmm"}


def test_openais_client_puts_a_stream_together_and_shows_what_was_refused(endpoint):
    import openai

    def agent() -> Any:
        client = Client(endpoint)
        client.jobs()
        base = f"{endpoint.address}/rollouts/j1/{quote('Zoë', safe='')}/v1"
        with openai.OpenAI(base_url=base, api_key=endpoint.key) as chat:
            assert [model.id for model in chat.models.list()] == ["policy"]
            ask = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}]}
            with chat.chat.completions.stream(**ask) as stream:
                whole = stream.get_final_completion().choices[0]
            with pytest.raises(openai.BadRequestError, match="40") as refused:
                chat.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x" * 41}])
            client.end("j1")
            with pytest.raises(openai.APIStatusError, match="over") as over:
                chat.chat.completions.create(**ask)
        return whole, refused.value.code, over.value.status_code

    with meanwhile(agent) as found:
        (rollout,) = endpoint.run([job("j1")], says(CALLS), ROOMY)
    whole, code, over = found[0]
    assert [call.function.arguments for call in whole.message.tool_calls] == ['{"a": 1}', '{"é": "x"}']
    assert whole.finish_reason == "tool_calls" and code == "context_length_exceeded" and over == 410
    assert [kept.agent for kept in rollout.calls] == ["Zoë", "Zoë"]


@pytest.mark.parametrize(
    ("asked", "limit", "said", "finish"),
    [
        ({}, 20, "abcdef", "stop"),
        ({"max_tokens": 3}, 3, "abc", "length"),
        ({"max_completion_tokens": 3, "max_tokens": 5}, 3, "abc", "length"),
        ({"max_tokens": 6}, 6, "abcdef", "length"),
        ({"max_tokens": 7}, 7, "abcdef", "stop"),
        ({"max_tokens": 500}, 20, "abcdef", "stop"),
    ],
)
def test_a_request_can_only_make_its_answer_shorter(endpoint, asked, limit, said, finish):
    limits: list[int] = []

    def draw(prompts: list[list[int]], sampling: Sampling) -> Sampled:
        limits.append(sampling.max_tokens)
        return says("abcdef")(prompts, sampling)

    def agent() -> None:
        client = Client(endpoint)
        client.jobs()
        assert client.said("j1", "Hi", **asked) == said
        client.end("j1")

    with meanwhile(agent):
        (rollout,) = endpoint.run([job("j1")], draw, PLAIN)
    assert limits == [limit] and rollout.calls[0].call.finish == finish
    assert len(rollout.calls[0].completion_ids) == len(rollout.calls[0].log_probs) == len(said) + (finish == "stop")


def test_calls_with_different_limits_are_drawn_together_and_cut(endpoint, monkeypatch):
    monkeypatch.setattr(desk, "QUIET", (10 * PATIENCE, 0))
    monkeypatch.setattr(desk, "LONGEST_GATHERING", (10 * PATIENCE, 0))
    drawn: list[tuple[int, int]] = []

    def draw(prompts: list[list[int]], sampling: Sampling) -> Sampled:
        drawn.append((len(prompts), sampling.max_tokens))
        return echo(prompts, sampling)

    def do(client: Client, taken: dict[str, Any]) -> str:
        said = client.said(taken["id"], "abcdefghij", max_tokens=2 if taken["id"] == "j1" else 8)
        client.end(taken["id"])
        return said

    with meanwhile(lambda: each_in_a_thread(endpoint, 2, do)) as found:
        endpoint.run([job("j1"), job("j2")], draw, PLAIN)
    assert drawn == [(2, 8)] and found[0] == ["ab", "abcdefgh"]


def test_no_answer_is_longer_than_the_endpoint_allows(endpoint):
    reply, _ = answered(endpoint, "x" * 100, Sampling(max_tokens=99, ends=(END,)))
    assert reply["usage"]["completion_tokens"] == 30 and reply["choices"][0]["finish_reason"] == "length"


def test_tools_are_shown_whatever_may_be_called_as_transformers_serve_does(endpoint):
    _, kept = answered(endpoint, "no", tools=[TOOL], tool_choice="none")
    assert "".join(map(chr, kept.prompt_ids)) == "Hiadd"
    assert kept.call.tools == [TOOL] and kept.call.settings == {"tool_choice": "none"}
    _, kept = answered(endpoint, "no", tools=[TOOL], tool_choice="required", response_format={"type": "json_object"})
    assert "".join(map(chr, kept.prompt_ids)) == "Hiadd"
    assert kept.call.settings == {"tool_choice": "required", "response_format": {"type": "json_object"}}


def test_log_probabilities_are_given_where_they_are_asked_for(endpoint):
    reply, kept = answered(endpoint, "A", logprobs=True)
    rest = {"logprob": -1.0, "bytes": None, "top_logprobs": []}
    wanted = {"content": [{"token": "token_id:65", **rest}, {"token": "token_id:0", **rest}]}
    assert reply["choices"][0]["logprobs"] == wanted == kept.call.logprobs


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x" * 41, "41 tokens, and the maximum context length is 40"),
        ("REFUSED", "the template refuses a second system message"),
        ("BROKEN", "ZeroDivisionError: by a template"),
    ],
)
def test_messages_that_cannot_be_shown_to_the_model_are_refused_and_kept(endpoint, text, said):
    def agent() -> Any:
        client = Client(endpoint)
        client.jobs()
        status, reply = client.chat("j1", text)
        assert client.said("j1", "x" * 40) == "fits"
        client.end("j1")
        return status, reply

    with meanwhile(agent) as found:
        (rollout,) = endpoint.run([job("j1")], says("fits"), PLAIN)
    status, reply = found[0]
    assert status == 400 and said in reply["error"]["message"] and reply["error"]["type"] == "invalid_request_error"
    failed, fine = rollout.calls
    assert failed.call.error == reply["error"]["message"] and failed.call.reply is None
    assert failed.completion_ids == [] and failed.call.messages == [{"role": "user", "content": text}]
    assert fine.call.error is None


def test_an_answer_that_cannot_be_read_fails_that_call_only(endpoint):
    def agent() -> Any:
        client = Client(endpoint)
        client.jobs()
        status, reply = client.chat("j1", "Hi")
        assert client.said("j1", "Hi") == "fine"
        client.end("j1")
        return status, reply["error"]["message"]

    with meanwhile(agent) as found:
        (rollout,) = endpoint.run([job("j1")], says("unreadable", "fine"), PLAIN)
    assert found[0] == (500, "what the policy said cannot be read: LookupError: no such call")
    assert [kept.call.error for kept in rollout.calls] == [found[0][1], None]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "no JSON"),
        (b"\xff", "no JSON"),
        (b"[" * 200_000, "no JSON"),
        (b"[]", "a JSON list"),
        (b"{}", "messages must be"),
        (b'{"messages": []}', "messages must be"),
        (b'{"messages": [{"content": "x"}]}', r"messages [0] have no role"),
        (b'{"messages": [{"role": "user"}], "tools": {}, "n": 2}', "n must be 1, not 2"),
        (b'{"messages": [{"role": "user"}], "tools": ["x"]}', "tools must be"),
        (
            b'{"messages": [{"role": "user"}], "max_tokens": 0}',
            "max_tokens must be a whole number of at least 1, not 0",
        ),
        (b'{"messages": [{"role": "user"}], "max_completion_tokens": true}', "not True"),
        (b'{"messages": [{"role": "user"}], "stream": "yes"}', "stream must be of type bool, not 'yes'"),
        (b'{"messages": [{"role": "user"}], "model": 7}', "model must be of type str, not 7"),
    ],
)
def test_bodies_that_are_no_requests_are_refused_and_not_kept(endpoint, body, said):
    def agent() -> Any:
        client = Client(endpoint)
        client.jobs()
        client.http.request("POST", chat_path("j1", "a"), body, client.headers)
        reply = client.http.getresponse()
        error = json.loads(reply.read())["error"]
        client.end("j1")
        return reply.status, error["message"]

    with meanwhile(agent) as found:
        (rollout,) = endpoint.run([job("j1")], says(), PLAIN)
    assert found[0][0] == 400 and said in found[0][1] and rollout.calls == []


def test_all_that_is_wrong_with_a_body_is_said_at_once(endpoint):
    def agent() -> Any:
        client = Client(endpoint)
        client.jobs()
        found = client.chat("j1", "Hi", n=3, max_tokens="5")
        client.end("j1")
        return found

    with meanwhile(agent) as found:
        endpoint.run([job("j1")], says(), PLAIN)
    message = found[0][1]["error"]["message"]
    assert message.startswith("max_tokens must be") and "; n must be 1, not 3" in message


@pytest.mark.parametrize("key", ["", "wrong", "schlüssel"])
def test_nothing_is_done_for_whoever_has_not_the_key(endpoint, key):
    def strangers() -> list[int]:
        stranger = Client(endpoint, key)
        found = [stranger.send("GET", "/jobs?wait=10")[0]]
        client = Client(endpoint)
        client.jobs()
        found.append(stranger.chat("j1", "Hi")[0])
        found.append(stranger.end("j1"))
        found.append(stranger.send("GET", "/rollouts/j1/a/v1/models")[0])
        found.append(stranger.send("GET", "/elsewhere")[0])
        del stranger.headers["Authorization"]
        found.append(stranger.chat("j1", "Hi")[0])
        assert client.end("j1", output="by the host") == 200
        return found

    with meanwhile(strangers) as found:
        (rollout,) = endpoint.run([job("j1")], says(), PLAIN)
    assert found[0] == [401] * 6 and rollout.calls == [] and rollout.outcome.output == "by the host"


def test_each_endpoint_makes_a_key_of_its_own_and_takes_none_that_no_header_carries():
    one, other = (RolloutEndpoint(Letters(), room=1, at_most=1) for _ in range(2))
    assert len(one.key) >= 32 and one.key != other.key and one.address != other.address
    assert one.address.startswith("http://127.0.0.1:")
    for endpoint in (one, other):
        endpoint._door.server_close()
    for key in ("", "a\nb", "ö"):
        with pytest.raises(AgentError, match="the key"):
            RolloutEndpoint(Letters(), room=1, at_most=1, key=key)
    with pytest.raises(AgentError, match="at least 1, not 0 and 5"):
        RolloutEndpoint(Letters(), room=0, at_most=5)


def test_rollouts_that_are_over_or_unknown_get_no_answer(endpoint):
    def agent() -> list[Any]:
        client = Client(endpoint)
        assert [each["id"] for each in client.jobs("wait=10&limit=1")] == ["j1"]
        found = [client.chat("j2", "Hi")[0], client.end("j2"), client.chat("elsewhere", "Hi")[0]]
        found += [client.end("elsewhere"), client.end("j1", output="1"), client.end("j1", output="2")]
        found += [client.chat("j1", "Hi"), client.send("GET", "/rollouts/j1/a/v1/models")[0]]
        assert [each["id"] for each in client.jobs()] == ["j2"]
        assert client.jobs("wait=0") == [] and client.said("j2", "Hi") == "fine"
        client.end("j2")
        return found

    with meanwhile(agent) as found:
        first, second = endpoint.run([job("j1"), job("j2")], says("fine"), PLAIN)
    *others, last, models = found[0]
    assert others == [410, 404, 410, 404, 200, 409] and models == 410
    assert last[0] == 410 and "'j1' is over" in last[1]["error"]["message"]
    assert first.outcome.output == "1" and first.calls == [] and len(second.calls) == 1
    assert Client(endpoint).end("j1") == 409 and Client(endpoint).chat("j2", "Hi")[0] == 410


def test_outcomes_that_are_none_are_refused(endpoint):
    def agent() -> list[int]:
        client = Client(endpoint)
        client.jobs()
        bodies = [{"id": "j2"}, {"output": "x"}, {"id": "j1", "more": 1}, [], {"id": "j1"}]
        return [client.send("POST", "/jobs/j1", body)[0] for body in bodies]

    with meanwhile(agent) as found:
        endpoint.run([job("j1")], says(), PLAIN)
    assert found[0] == [400, 400, 400, 400, 200]


@pytest.mark.parametrize("query", ["wait=x", "wait=-1", "wait=nan", "wait=inf", "limit=x"])
def test_waiting_times_that_are_no_numbers_are_refused(endpoint, query):
    status, body = Client(endpoint).send("GET", f"/jobs?{query}")
    assert status == 400 and b"must be a number of at least 0" in body


def test_a_rollout_whose_host_does_not_report_ends_by_itself(endpoint, monkeypatch):
    monkeypatch.setattr(desk, "GRACE", 0.1)

    def host() -> None:
        Client(endpoint).jobs()  # and is gone

    with meanwhile(host):
        lost, late = endpoint.run([job("j1", seconds=0.2), job("j2", seconds=0.25)], says(), PLAIN)
    assert lost.outcome.error == "took longer than 0.2 s" and late.outcome.error == "took longer than 0.25 s"
    assert lost.outcome.seconds >= 0.3 and lost.calls == []
    assert Client(endpoint).end("j1") == 409


def test_a_call_that_waits_when_its_rollout_ends_is_let_go(endpoint):
    drawing, ended = threading.Event(), threading.Event()

    def draw(prompts: list[list[int]], sampling: Sampling) -> Sampled:
        drawing.set()
        assert ended.wait(PATIENCE)
        return echo(prompts, sampling)

    def do(client: Client, taken: dict[str, Any]) -> int:
        if taken["id"] == "j2":
            assert drawing.wait(PATIENCE)
        return client.chat(taken["id"], taken["id"])[0]

    def host() -> None:
        client = Client(endpoint)
        assert drawing.wait(PATIENCE)
        until(lambda: endpoint._desk._waiting)
        assert client.end("j1", error="gave up") == client.end("j2", error="gave up too") == 200
        ended.set()

    with meanwhile(lambda: each_in_a_thread(endpoint, 2, do), host) as found:
        rollouts = endpoint.run([job("j1"), job("j2")], draw, PLAIN)
    assert found[0] == [410, 410]
    assert [(each.outcome.error, each.calls) for each in rollouts] == [("gave up", []), ("gave up too", [])]


def test_nobody_who_asks_for_jobs_is_an_error_that_says_what_to_look_at():
    with RolloutEndpoint(Letters(), room=9, at_most=9, first_host_seconds=1.0) as endpoint:
        with pytest.raises(AgentError, match=r"2 rollouts wait .* nobody has asked for one in 1 s; .*RolloutHost"):
            endpoint.run([job("j1"), job("j2")], says(), PLAIN)

        def host() -> None:
            client = Client(endpoint)
            client.jobs("wait=10&limit=1")
            client.end("j3")  # and does not ask again

        with meanwhile(host), pytest.raises(AgentError, match="1 rollouts wait"):
            endpoint.run([job("j3"), job("j4")], says(), PLAIN)


def test_a_job_does_not_get_lost_with_the_connection_that_asked_for_it(endpoint):
    gone = Client(endpoint)
    gone.http.request("GET", "/jobs?wait=30", headers=gone.headers)
    until(lambda: endpoint._desk._last_asked > 0)
    gone.http.sock.close()
    gone.http.close()

    def host() -> Any:
        client = Client(endpoint)
        found = client.jobs()
        client.end("j1")
        return found

    with meanwhile(host) as found:
        endpoint.run([job("j1")], says(), PLAIN)
    assert [each["id"] for each in found[0]] == ["j1"]


def test_jobs_that_did_not_reach_anybody_are_offered_again():
    at = desk.Desk(first_host_seconds=PATIENCE)
    at.is_open = True
    at.lay_out([job("j1"), job("j2")])
    assert at.take(limit=1, wait=0, is_connected=lambda: False) == []
    taken = at.take(limit=1, wait=0, is_connected=lambda: True)
    assert [each.id for each in taken] == ["j1"]
    at.take_back(taken)
    assert [each.id for each in at.take(limit=None, wait=0, is_connected=lambda: True)] == ["j1", "j2"]
    assert at.take(limit=None, wait=0, is_connected=lambda: True) == []


@pytest.mark.parametrize("failure", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_failure_to_draw_ends_all_rollouts_and_leaves_nobody_waiting(endpoint, failure):
    drawing = threading.Event()

    def draw(prompts: list[list[int]], sampling: Sampling) -> Sampled:
        drawing.set()
        until(lambda: len(prompts) + len(endpoint._desk._waiting) == 3)
        raise failure

    def do(client: Client, taken: dict[str, Any]) -> tuple[int, Any]:
        found = client.chat(taken["id"], "Hi")
        assert client.end(taken["id"]) == 409
        return found

    with meanwhile(lambda: each_in_a_thread(endpoint, 3, do)) as found, pytest.raises(type(failure)) as raised:
        endpoint.run([job(f"j{number}") for number in range(3)], draw, PLAIN)
    assert raised.value is failure
    assert [status for status, _ in found[0]] == [500] * 3
    assert all(type(failure).__name__ in reply["error"]["message"] for _, reply in found[0])
    assert answered(endpoint, "goes on")[0]["choices"][0]["message"]["content"] == "goes on"


def test_a_draw_that_gives_too_few_completions_is_an_error(endpoint):
    def agent() -> int:
        client = Client(endpoint)
        client.jobs()
        return client.chat("j1", "Hi")[0]

    with meanwhile(agent) as found, pytest.raises(TrainingFailed, match="1 completions were to be drawn, and 0 were"):
        endpoint.run([job("j1")], lambda prompts, sampling: Sampled([], None), PLAIN)
    assert found[0] == 500


def test_clients_that_have_gone_are_not_drawn_for(endpoint):
    drawn: list[str] = []
    drawing, gone = threading.Event(), threading.Event()

    def draw(prompts: list[list[int]], sampling: Sampling) -> Sampled:
        drawn.extend("".join(map(chr, prompt)) for prompt in prompts)
        drawing.set()
        assert gone.wait(PATIENCE)
        return echo(prompts, sampling)

    def leave(text: str) -> None:
        client = Client(endpoint)
        body = json.dumps({"messages": [{"role": "user", "content": text}]})
        client.http.request("POST", chat_path("j1", "a"), body, client.headers)
        until(lambda: drawing.is_set() if text == "drawn" else endpoint._desk._waiting)
        client.http.close()

    def host() -> None:
        client = Client(endpoint)
        client.jobs()
        leave("drawn")
        leave("waits")
        gone.set()
        assert client.said("j1", "stays") == "stays"
        until(lambda: endpoint._desk._places["j1"].calls[0].record)
        until(lambda: endpoint._desk._places["j1"].calls[0].record.call.error)
        client.end("j1")

    with meanwhile(host):
        (rollout,) = endpoint.run([job("j1")], draw, PLAIN)
    assert drawn == ["drawn", "stays"]
    unheard, heard = rollout.calls
    assert unheard.completion_ids == [] and "had gone" in unheard.call.error
    assert heard.call.reply["content"] == "stays"


def test_each_batch_has_random_numbers_of_its_own(endpoint):
    seeds: list[int | None] = []

    def draw(prompts: list[list[int]], sampling: Sampling) -> Sampled:
        seeds.append(sampling.seed)
        return echo(prompts, sampling)

    def agent() -> None:
        client = Client(endpoint)
        client.jobs()
        for text in ("a", "b", "c"):
            client.said("j1", text)
        client.end("j1")

    for seed, wanted in ((7, [7, 8, 9]), (None, [None] * 3)):
        seeds.clear()
        with meanwhile(agent):
            endpoint.run([job("j1")], draw, Sampling(max_tokens=9, ends=(END,), seed=seed))
        assert seeds == wanted


def test_a_closed_endpoint_says_so_and_leaves_no_threads():
    before = set(threading.enumerate())
    with RolloutEndpoint(Letters(), room=9, at_most=9) as endpoint:
        idle, waiting = Client(endpoint), Client(endpoint)
        assert idle.jobs("wait=0") == []
        asked = endpoint._desk._last_asked
        waiting.http.request("GET", "/jobs?wait=30", headers=waiting.headers)
        until(lambda: endpoint._desk._last_asked > asked)
    assert waiting.http.getresponse().status == 410
    with pytest.raises(OSError):
        Client(endpoint).send("GET", "/jobs")
    with pytest.raises(AgentError, match="not open"):
        endpoint.run([job("j1")], says(), PLAIN)
    until(lambda: set(threading.enumerate()) <= before)


def test_two_jobs_need_two_ids_and_one_batch_is_made_at_a_time(endpoint):
    with pytest.raises(AgentError, match=r"same id: \['j1'\]"):
        endpoint.run([job("j1"), job("j2"), job("j1")], says(), PLAIN)
    assert endpoint.run([], says(), PLAIN) == []

    def second() -> None:
        until(lambda: endpoint._desk._places)
        with pytest.raises(AgentError, match="one is under way"):
            endpoint.run([job("j2")], says(), PLAIN)
        client = Client(endpoint)
        client.jobs()
        client.end("j1", output="first")

    with meanwhile(second):
        (rollout,) = endpoint.run([job("j1")], says(), PLAIN)
    assert rollout.outcome.output == "first"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Length": str(LARGEST_BODY + 1)}, 413),
        ({"Content-Length": "9" * 5000}, 413),
        ({"Content-Length": "-1"}, 400),
        ({"Content-Length": "x"}, 400),
        ({"Transfer-Encoding": "chunked"}, 411),
        ({}, 411),
    ],
)
def test_bodies_of_no_or_too_great_length_are_refused_unread(endpoint, headers, status):
    client = Client(endpoint)
    client.http.putrequest("POST", "/jobs/j1")
    for name, value in {**client.headers, **headers}.items():
        client.http.putheader(name, value)
    client.http.endheaders()
    reply = client.http.getresponse()
    assert reply.status == status and reply.headers["connection"] == "close"
    assert json.loads(reply.read())["error"]["message"]


def test_a_connection_serves_one_request_after_the_other(endpoint):
    client = Client(endpoint)
    found, sockets = [], set()
    for method, path, body in (
        ("GET", "/jobs?wait=0", None),
        ("POST", "/jobs/j1", {"id": "j1"}),
        ("POST", "/elsewhere", {"x": "y" * 100}),
        ("GET", "/jobs?wait=0", {"a": "body"}),
        ("GET", "/jobs?wait=0", None),
    ):
        found.append(client.send(method, path, body)[0])
        sockets.add(client.http.sock.getsockname())
    assert found == [200, 404, 404, 200, 200] and len(sockets) == 1
