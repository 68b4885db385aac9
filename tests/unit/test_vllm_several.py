"""Sampling from several vLLM servers, held by stand-ins: a batch is divided, and what one fails to draw others do."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from praison_agent_rl.backoff import Backoff
from praison_agent_rl.config_fields.sampling import SamplingFields
from praison_agent_rl.errors import ConfigError, ServerFailed
from praison_agent_rl.vllm_servers import sources
from praison_agent_rl.vllm_servers.addresses import faults_in
from praison_agent_rl.vllm_servers.rollouts import VllmSampler
from praison_agent_rl.vllm_servers.sources import ForeignServer, Patience
from tests.unit.test_vllm_rollouts import PLAIN, saved
from tests.vllm_stand_in import END, StandIn, choice_of, serving


class Echo(StandIn):
    """Draws the first token of the prompt, so that a row tells which one it is of."""

    def choice(self, body: dict[str, Any], number: int) -> dict[str, Any]:
        factor = body["temperature"] if self.processed else 1.0
        return choice_of(body, number, [body["prompt"][0], END], [-0.5 * factor, -0.25 * factor])

    def rows(self) -> list[tuple[list[int], int, int]]:
        """What was asked: prompt, completions and seed."""
        return sorted((body["prompt"], body["n"], body["seed"]) for body in self.completions())


class Several(NamedTuple):
    """Three servers, and a sampler of theirs."""

    stand_ins: list[Echo]
    servers: list[ForeignServer]
    sampler: VllmSampler
    told: list[str]
    clock: list[float]

    def left_out(self) -> list[int]:
        """Numbers of the servers that were said to be left out, in order."""
        named = [[number for number, each in enumerate(self.servers) if each.url in note] for note in self.told]
        return [numbers[0] for numbers, note in zip(named, self.told, strict=True) if "is left out until" in note]


@pytest.fixture
def several(tmp_path, monkeypatch) -> Iterator[Several]:
    clock = [0.0]
    monkeypatch.setattr(sources, "Backoff", lambda: Backoff(clock=lambda: clock[0]))
    stand_ins, told = [Echo(), Echo(), Echo()], []
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serving(each)) for each in stand_ins]
        patience = Patience(retries=0)
        yield Several(
            stand_ins,
            servers,
            VllmSampler(servers, tmp_path, base="owner/base", run_id="run", patience=patience, tell=told.append),
            told,
            clock,
        )


def drawn_as(prompts: list[list[int]]) -> list[list[int]]:
    return [[prompt[0], END] for prompt in prompts]


BATCH = [[1], [1], [2], [2], [3], [3], [4], [4], [1]]


def test_a_batch_is_divided_by_prompts_and_comes_back_in_order(several):
    stand_ins, _, sampler, told, _ = several
    first = sampler.offer(0, saved())
    assert all(list(each.adapters) == [first] for each in stand_ins)
    drawn = sampler.sample(BATCH, PLAIN)
    assert drawn.ids == drawn_as(BATCH) and drawn.log_probs == [[-0.5, -0.25]] * 9
    assert [each.rows() for each in stand_ins] == [
        [([1], 1, 108), ([1], 2, 100)],  # equal prompts stay together
        [([2], 2, 102), ([4], 2, 106)],  # it has fewer rows than the first by then
        [([3], 2, 104)],
    ]
    second = sampler.offer(1, saved())
    assert all(list(each.adapters) == [second] for each in stand_ins)
    sampler.close()
    assert told == [] and not any(each.adapters for each in stand_ins)


def lost(stand_in: Echo) -> None:
    stand_in.dies_at = 0


def started_again(stand_in: Echo) -> None:
    stand_in.adapters.clear()


def of_a_former_policy(stand_in: Echo) -> None:
    stand_in.change = lambda answer: answer.update(model="run-0-former")


def unreadable(stand_in: Echo) -> None:
    stand_in.change = lambda answer: answer.update(choices="none")


def broken(stand_in: Echo) -> None:
    stand_in.change = lambda answer: answer["choices"][0]["logprobs"].update(token_logprobs=[math.nan, -1.0])


@pytest.mark.parametrize("fails", [lost, started_again, of_a_former_policy, unreadable, broken])
def test_a_server_that_fails_is_said_once_its_rows_go_to_others_and_it_comes_back_with_the_policy(several, fails):
    stand_ins, servers, sampler, told, clock = several
    sampler.offer(0, saved())
    fails(stand_ins[1])
    drawn = sampler.sample(BATCH, PLAIN)
    assert drawn.ids == drawn_as(BATCH) and drawn.log_probs == [[-0.5, -0.25]] * 9
    assert several.left_out() == [1] and len(told) == 1
    own = {(tuple(prompt), count, seed) for each in (stand_ins[0], stand_ins[2]) for prompt, count, seed in each.rows()}
    assert own == {((1,), 2, 100), ((1,), 1, 108), ((2,), 2, 102), ((3,), 2, 104), ((4,), 2, 106)}

    for each in stand_ins:
        each.asked.clear()
    assert sampler.sample(BATCH, PLAIN).ids == drawn_as(BATCH)
    second = sampler.offer(1, saved())
    assert stand_ins[1].asked == []  # its pause is not over
    stand_ins[1].dies_at, stand_ins[1].change = None, lambda answer: None
    clock[0] = 1.0
    assert sampler.sample(BATCH, PLAIN).ids == drawn_as(BATCH)
    assert told[1:] == [f"the vLLM server at {servers[1].url}/v1 is back, and has the policy"]
    assert list(stand_ins[1].adapters) == [second]
    asked = [body["verb"] for body in stand_ins[1].asked]
    assert asked[0] == "load_lora_adapter" and sorted(asked[1:]) == ["completions"] * 2 + ["unload_lora_adapter"]
    sampler.close()
    assert not any(each.adapters for each in stand_ins)


def test_one_that_stays_away_is_tried_after_longer_and_longer_pauses_and_not_said_again(several):
    stand_ins, _, sampler, told, clock = several
    sampler.offer(0, saved())
    lost(stand_ins[0])
    tried = []
    stand_ins[0].gone = lambda: tried.append(clock[0]) or True
    for second in range(16):
        clock[0] = float(second)
        assert sampler.sample([[1], [2]], PLAIN).ids == [[1, END], [2, END]]
    assert tried == [0.0, 1.0, 3.0, 7.0, 15.0] and len(told) == 1


def test_a_policy_that_one_server_does_not_take_is_drawn_from_by_the_others(several):
    stand_ins, _, sampler, _, _ = several
    stand_ins[2].max_rank = 4
    name = sampler.offer(0, saved())
    assert [list(each.adapters) for each in stand_ins] == [[name], [name], []] and several.left_out() == [2]
    assert sampler.sample(BATCH, PLAIN).ids == drawn_as(BATCH) and stand_ins[2].completions() == []


def test_when_none_is_left_the_failures_of_all_are_one_error(several):
    stand_ins, servers, sampler, _, _ = several
    sampler.offer(0, saved())
    for each in stand_ins:
        lost(each)
    with pytest.raises(ServerFailed, match="none of the 3 vLLM servers is left") as failed:
        sampler.sample(BATCH, PLAIN)
    lines = str(failed.value).splitlines()[1:]
    assert [f"- the vLLM server at {each.url}/v1 did not answer completions" in line for each, line in zip(
        servers, lines, strict=True)] == [True] * 3  # fmt: skip
    with pytest.raises(ServerFailed, match="none of the 3"):
        sampler.offer(1, saved())


def test_one_that_comes_back_with_other_weights_or_less_room_is_not_asked(several):
    stand_ins, _, sampler, told, clock = several
    assert sampler.check(64) == []
    sampler.offer(0, saved())
    for number, base in enumerate(({"root": "owner/other", "id": "other"}, {"max_model_len": 32})):
        stand_ins[number].base = {**stand_ins[number].base, **base}
        started_again(stand_ins[number])
    for second in range(5):
        clock[0] = float(second)
        assert sampler.sample(BATCH, PLAIN).ids == drawn_as(BATCH)
    assert sorted(several.left_out()) == [0, 1] and len(told) == 2
    assert not stand_ins[0].adapters and not stand_ins[1].adapters


def test_log_probabilities_are_used_if_those_of_all_servers_can_be(several):
    stand_ins, servers, sampler, told, _ = several
    stand_ins[1].processed = False
    sampler.offer(0, saved())
    assert sampler.sample(BATCH, replace(PLAIN, temperature=2.0)).log_probs is None
    assert f"{servers[1].url}/v1 gives log-probabilities before temperature" in told[0] and len(told) == 1


def test_another_process_has_a_server_load_what_the_first_could_not(several, tmp_path):
    stand_ins, servers, first, _, clock = several
    lost(stand_ins[1])
    name = first.offer(0, saved())
    stand_ins[1].dies_at = None
    second = VllmSampler(servers[1:], tmp_path, base="owner/base", run_id="run", patience=Patience(retries=0))
    second.take(0, name)
    assert second.sample([[5]], PLAIN).ids == [[5, END]] and stand_ins[2].completions()  # 1 has not got it
    clock[0] = 1.0
    stand_ins[2].asked.clear()
    assert second.sample([[5]], PLAIN).ids == [[5, END]] and not stand_ins[2].completions()
    assert list(stand_ins[1].adapters) == [name]
    second.take(1, first.offer(1, saved()))  # in which the first has it back, too
    assert name not in stand_ins[1].adapters
    second.close()
    first.close()
    assert not any(each.adapters for each in stand_ins)


def test_what_is_wanting_at_any_server_is_said_at_once_with_its_address(several, tmp_path):
    stand_ins, servers, _, _, _ = several
    stand_ins[0].base["root"] = stand_ins[0].base["id"] = "owner/other"
    stand_ins[1].lora = False
    stand_ins[2].max_rank = 8
    away = ForeignServer(url="http://127.0.0.1:9")
    blind = replace(servers[2], url=f"{servers[2].url}/", seen_as=str(tmp_path / "nowhere"))
    sampler = VllmSampler([*servers, away, blind], tmp_path, base="owner/base", run_id="run")
    with pytest.raises(ConfigError) as failed:
        sampler.check(64, rank=16)
    said = str(failed.value).splitlines()
    wanting = [
        "serves 'owner/other'",
        "start it with --enable-lora",
        "--max-lora-rank 16",
        "refused",
        "vllm_server_sees",
    ]
    addresses = [each.url.rstrip("/") for each in [*servers, away, blind]]
    assert [url in line and what in line for url, what, line in zip(addresses, wanting, said, strict=True)] == [
        True
    ] * 5
    assert not any(each.adapters for each in stand_ins) and not list(tmp_path.iterdir())
    stand_ins[2].max_rank = 16
    assert VllmSampler(servers[2], tmp_path, base="owner/base", run_id="run").check(64, rank=16) == []
    assert [body["verb"] for body in stand_ins[2].checked] == ["load_lora_adapter"] * 3
    assert not stand_ins[2].adapters and not list(tmp_path.iterdir())


def test_a_run_that_goes_on_leaves_out_what_is_wanting_if_any_is_left(several):
    stand_ins, servers, sampler, told, clock = several
    stand_ins[0].lora, stand_ins[1].base = False, {**stand_ins[1].base, "root": "owner/other", "id": "other"}
    assert sampler.check(64, rank=8, all_needed=False) == []
    assert several.left_out() == [0, 1] and "--enable-lora" in told[0] and "owner/other" in told[1]
    sampler.offer(0, saved())
    assert sampler.sample(BATCH, PLAIN).ids == drawn_as(BATCH) and len(stand_ins[2].completions()) == 5
    stand_ins[0].lora, clock[0] = True, 1.0
    sampler.offer(1, saved())
    assert len(told) == 3 and f"{servers[0].url}/v1 is back" in told[2]
    stand_ins[0].lora, stand_ins[2].max_rank = False, 4
    with pytest.raises(ConfigError, match=r"(?s)--enable-lora.*owner/other.*--max-lora-rank 8"):
        sampler.check(64, rank=8, all_needed=False)


# --- their addresses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("http://a:1", "http://a:1"),
        ("http://a:1, http://b:1/v1,", ["http://a:1", "http://b:1/v1"]),
        (["http://a:1"], "http://a:1"),
        (["http://a:1", "http://b:1"], ["http://a:1", "http://b:1"]),
        (None, None),
    ],
)
def test_one_address_several_in_a_text_and_a_list_are_kept_as_plain_values(written, kept):
    config = SamplingFields(vllm_server_base_url=written)
    assert config.vllm_server_base_url == kept
    assert config.vllm_servers == ([kept] if isinstance(kept, str) else kept or [])
    assert SamplingFields(vllm_server_base_url=kept) == config


@pytest.mark.parametrize("written", [[], ["http://a:1", 3], 7, {"url": "http://a:1"}])
def test_what_is_no_address_and_no_list_of_them_is_refused(written):
    with pytest.raises(ValueError, match="vllm_server_base_url"):
        SamplingFields(vllm_server_base_url=written)


def test_each_fault_in_a_list_of_addresses_is_said_by_its_place_and_no_secret_is_shown():
    found = list(faults_in(["http://a:1", "http://me:s3cret@b:1", "c:1", "http://a:1/v1/"]))
    assert [fault.partition(" ")[0] for fault in found] == [f"vllm_server_base_url[{place}]" for place in (1, 2, 3)]
    assert "s3cret" not in "".join(found) and "names the same server as vllm_server_base_url[0]" in found[2]
    assert list(faults_in(["http://a:1", "http://a:2"])) == [] and list(faults_in([])) == []
