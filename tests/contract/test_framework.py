"""The names of the framework that this package writes, reads or calls exist in the installed one, and mean the same."""

import ast
import inspect
import os
import sys
import textwrap

import pytest
from praisonaiagents import Agent
from praisonaiagents.llm import OpenAIClient

import praison_agent_rl
from praison_agent_rl.swap import WRITTEN_NAMES, fresh_copy
from tests.fakes import AGENT_KINDS, FakeServer, add, build_agent

OURS = {"_rl_server", "_rl_home", "_rl_route"}
LAZY = {"_unified_dispatcher", "harness_base_prompt"}
"""Not there on a fresh agent: the first is set by the first turn on the OpenAI client, the second only by who wants a
prompt of their own; the framework reads both with a default."""

COPIED = {
    "_Agent__chat_history_state",
    "_system_prompt_cache",
    "_Agent__hook_runner",
    "_turn_tools_used",
    "_memory_instance",
    "knowledge",
    "_session_id",
    "_db",
    "_loop_guard",
    "_guardrail_fn",
    "_closed",
}
"""What `fresh_copy` replaces in the copy."""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, in_tmp, server_a: FakeServer) -> None:
    for name in [n for n in os.environ if n.startswith(("OPENAI_", "OLLAMA_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OPENAI_BASE_URL", server_a.url)
    monkeypatch.setenv("OPENAI_API_KEY", "key-a")


def source_of_agent() -> str:
    """The source of every class of the framework that an agent is made of."""
    return "\n".join(textwrap.dedent(inspect.getsource(c)) for c in Agent.__mro__ if c is not object)


@pytest.mark.parametrize("kind", AGENT_KINDS)
def test_a_fresh_agent_has_every_name_that_a_swap_writes_but_the_lazy_ones_and_ours(kind, server_a):
    fresh = build_agent(kind, server_a.url).__dict__
    assert set(WRITTEN_NAMES) - fresh.keys() == LAZY | OURS


def test_the_lazy_names_are_read_by_the_framework():
    source = source_of_agent()
    assert "self._unified_dispatcher = dispatcher" in source
    assert 'getattr(self, "harness_base_prompt", None)' in source


def test_the_first_turn_on_the_openai_client_sets_the_dispatcher(server_a):
    agent = build_agent("environment", server_a.url)
    agent.chat("hello")
    assert agent._unified_dispatcher is not None


def test_nothing_of_the_frameworks_has_our_name():
    assert "_rl_" not in source_of_agent()


@pytest.mark.parametrize("kind", AGENT_KINDS)
def test_a_fresh_agent_has_every_name_that_a_copy_replaces(kind, server_a):
    agent = build_agent(kind, server_a.url)
    assert COPIED - agent.__dict__.keys() == set()
    twin = fresh_copy(agent)
    assert type(twin) is type(agent) and twin.__dict__.keys() - agent.__dict__.keys() == {"_unified_dispatcher"}
    replaced = {name for name in agent.__dict__ if twin.__dict__[name] is not agent.__dict__[name]}
    assert replaced <= COPIED


def test_which_of_the_two_clients_answers_is_said_by_using_custom_llm(server_a):
    on_litellm = {kind: build_agent(kind, server_a.url)._using_custom_llm for kind in AGENT_KINDS}
    assert {kind for kind, custom in on_litellm.items() if not custom} == {"environment", "subclass"}


def test_settings_of_a_model_that_is_not_built_yet_wait_in_llm_init_params(server_a):
    agent = build_agent("dict", server_a.url)
    assert agent._llm_init_params["temperature"] == 0.3 and agent._llm_instance is None
    assert agent.llm_instance is agent._llm_instance is not None
    assert build_agent("finished", server_a.url)._llm_init_params is None


def test_a_model_object_keeps_what_it_has_no_name_for_in_extra_settings(server_a):
    from praisonaiagents.llm import LLM

    assert LLM(model="openai/m1", extra_body={"top_k": 5}).extra_settings["extra_body"] == {"top_k": 5}


@pytest.mark.parametrize("kind", ["environment", "provider"])
def test_the_prompt_fragment_can_be_resolved_and_overridden(kind, server_a):
    agent = build_agent(kind, server_a.url)
    assert isinstance(agent._resolve_harness_base_prompt(), str)
    agent.harness_base_prompt = "Mine."
    assert agent._resolve_harness_base_prompt() == "Mine."
    assert agent._build_system_prompt().startswith("Mine.")


def test_the_lock_for_changes_of_model_is_one_per_agent_and_can_be_entered(server_a):
    agent = build_agent("environment", server_a.url)
    with agent._get_model_fallback_lock().sync():
        held = agent._model_fallback_lock
    assert agent._get_model_fallback_lock() is held


def test_the_history_is_what_its_state_holds(server_a):
    agent = build_agent("environment", server_a.url)
    agent.chat("hello")
    state = agent._Agent__chat_history_state
    assert state.value is agent.chat_history or list(state.value) == agent.chat_history
    assert len(agent.chat_history) == 2
    agent._Agent__chat_history_state = type(state)([])
    assert agent.chat_history == []


def test_the_prompt_cache_can_be_replaced_by_an_empty_one(server_a):
    agent = build_agent("environment", server_a.url)
    agent._build_system_prompt()
    assert len(agent._system_prompt_cache) == 1 and len(type(agent._system_prompt_cache)()) == 0


def test_the_openai_client_takes_a_key_and_an_address(server_a):
    client = OpenAIClient(api_key="key-x", base_url=server_a.url)
    assert (client.sync_client.api_key, str(client.sync_client.base_url)) == ("key-x", server_a.url + "/")
    agent = build_agent("environment", server_a.url)
    agent._Agent__openai_client = client
    assert agent._openai_client is client


def test_a_string_guardrail_is_marked_as_one_for_answers_only(server_a):
    assert build_agent("provider", server_a.url, guardrails="Be polite")._guardrail_fn._praison_output_only is True
    assert build_agent("provider", server_a.url)._guardrail_fn is None


def test_panels_and_back_ends_are_told_by_the_names_that_the_check_reads():
    panel = Agent(name="many", instructions="Be brief.", llm="panel:council", output="silent", rules=False)
    assert panel._panel_descriptor == "panel:council"
    backend = object()
    hosted = Agent(name="far", instructions="Be brief.", llm="m1", backend=backend, output="silent", rules=False)
    assert hosted.backend is backend and hosted._panel_descriptor is None


def test_the_framework_has_no_improve_of_its_own_and_ours_is_on_every_agent(server_a):
    modules = {sys.modules[c.__module__] for c in Agent.__mro__ if c is not object}
    trees = [ast.parse(inspect.getsource(module)) for module in modules]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    defined = {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
    written = {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    assert "chat" in defined and "improve" not in defined and "improve" not in written
    assert Agent.improve is praison_agent_rl.improve
    assert build_agent("subclass", server_a.url).improve.__func__ is praison_agent_rl.improve


def test_tools_are_described_by_their_signature_and_docstring(server_a):
    build_agent("environment", server_a.url).chat("hello")
    (tool,) = server_a.requests[0]["tools"]
    assert tool["function"]["name"] == add.__name__ and tool["function"]["description"] == "Add two numbers."
    assert set(tool["function"]["parameters"]["properties"]) == {"a", "b"}


def test_a_model_object_of_the_framework_is_tied_to_its_agent(server_a):
    """`swap.asks_for` tells a request of the agent from one of its tools by this."""
    agent = build_agent("provider", server_a.url)
    agent.chat("hello")
    assert agent.llm_instance._agent_history_append.__self__ is agent


def test_a_dispatcher_can_be_made_before_the_next_turn_needs_it(server_a):
    from praisonaiagents.llm import create_llm_dispatcher

    agent = build_agent("environment", server_a.url)
    agent.chat("hello")
    used = agent._unified_dispatcher
    made = create_llm_dispatcher(openai_client=agent._Agent__openai_client, model=agent.llm)
    assert type(made) is type(used) and made.__dict__.keys() == used.__dict__.keys()
