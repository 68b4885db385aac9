"""The plugin records with consent only, leaves those who merely have it installed alone, and declares no hook."""

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from praisonaiagents import plugins
from praisonaiagents.hooks import HookEvent
from praisonaiagents.hooks.registry import get_default_registry
from praisonaiagents.plugins import manager as managers

from praison_agent_rl.capture import open_recordings
from praison_agent_rl.plugin import NAME, RecordingPlugin
from praison_agent_rl.transcripts import read_calls, read_runs
from tests.fakes import FakeServer, build_agent

CONSENT = {"allow_conversation": True, "store": "kept"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, in_tmp: Path, server_a: FakeServer) -> Iterator[None]:
    for name in [n for n in os.environ if n.startswith(("OPENAI_", "OLLAMA_", "PRAISONAI_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OPENAI_BASE_URL", server_a.url)
    monkeypatch.setenv("OPENAI_API_KEY", "key-a")
    yield
    for recording in open_recordings():
        recording.stop()


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingPlugin]:
    """The plugin as the only one in a manager of the test's own, enabled and disabled by the framework's functions."""
    manager = managers.PluginManager(disabled=True)  # discovers nothing
    monkeypatch.setattr(managers, "_default_manager", manager)
    monkeypatch.setattr(plugins, "_plugins_enabled", False)
    monkeypatch.setattr(plugins, "_enabled_plugin_names", None)
    plugin = RecordingPlugin()
    manager.set_registration_allow_list([])
    manager.register(plugin)
    yield plugin
    plugins.disable([NAME])


def enable(**options: Any) -> None:
    plugins.enable([NAME], {NAME: options} if options else None)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]


def test_enabled_with_consent_it_records_every_agent(plugin, server_a):
    enable(**CONSENT, tags=["live"])
    for name in ("ann", "bob"):
        build_agent("environment", server_a.url, name=name).chat("hello")
    runs = list(read_runs("kept"))
    assert [(run.agent, run.tags, len(run.calls)) for run in runs] == [("ann", ["live"], 1), ("bob", ["live"], 1)]


@pytest.mark.parametrize("options", [{}, {"store": "kept"}, {"allow_conversation": "yes"}, {"allow_conversation": 1}])
def test_enabled_without_consent_it_records_nothing_and_says_so_once(options, plugin, server_a, caplog):
    enable(**options)
    enable(**options)
    build_agent("environment", server_a.url).chat("hello")
    (said,) = warnings_in(caplog)
    assert "records nothing" in said and "plugins.praison_agent_rl.allow_conversation: true" in said
    assert open_recordings() == () and not Path("kept").exists() and not Path(".praisonai").exists()


def test_a_store_may_be_in_the_home_folder_and_has_to_be_a_path(plugin, server_a, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    enable(allow_conversation=True, store="~/kept")
    build_agent("environment", server_a.url).chat("hello")
    assert len(list(read_runs(tmp_path / "home/kept"))) == 1 and not Path("~").exists()
    enable(allow_conversation=True, store=5)
    assert open_recordings() == () and "store=5 is no folder" in caplog.text


def test_only_agents_of_the_given_names_are_recorded(plugin, server_a):
    enable(**CONSENT, agents=["support-*", "bob"])
    for name in ("support-de", "bob", "bobby"):
        build_agent("environment", server_a.url, name=name).chat("hello")
    assert [call.agent for call in read_calls("kept")] == ["support-de", "bob"]


def test_one_name_and_one_tag_need_no_list(plugin, server_a):
    enable(**CONSENT, agents="bob", tags="live")
    build_agent("environment", server_a.url, name="bob").chat("hello")
    assert [(run.agent, run.tags) for run in read_runs("kept")] == [("bob", ["live"])]


def test_sample_and_redact_are_passed_on(plugin, server_a):
    enable(**CONSENT, sample=0.0)
    assert [recording.sample for recording in open_recordings()] == [0.0]
    enable(**CONSENT, redact="personal")
    build_agent("environment", server_a.url).chat("write to ann@example.org")
    (call,) = read_calls("kept")
    assert "ann@example.org" not in str(call)


def test_enabling_anew_replaces_the_recording_and_disabling_ends_it(plugin, server_a):
    enable(**CONSENT)
    enable(**CONSENT | {"store": "other"})
    assert [recording.store.name for recording in open_recordings()] == ["other"]
    plugins.disable([NAME])
    assert open_recordings() == ()
    enable(**CONSENT)
    assert [recording.store.name for recording in open_recordings()] == ["kept"]
    managers.get_plugin_manager().unregister(NAME)
    assert open_recordings() == ()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sampel": 0.5}, "has no option ['sampel']"),
        ({"agents": []}, "names no agent"),
        ({"sample": 2}, "sample=2 is no share"),
        ({"agents": 7}, "plugins.praison_agent_rl.agents is 7"),
        ({"tags": [1]}, "plugins.praison_agent_rl.tags is [1]"),
    ],
)
def test_a_wrong_option_is_said_and_the_agent_goes_on_unrecorded(wrong, message, plugin, server_a, caplog):
    enable(**CONSENT, **wrong)
    assert build_agent("environment", server_a.url).chat("hello").startswith("[A|m1]")
    assert any(message in said for said in warnings_in(caplog))
    assert open_recordings() == ()


def test_it_declares_no_hook_and_concurrent_turns_all_succeed(plugin, server_a):
    enable(**CONSENT)
    assert plugin.info.hooks == [] and plugin.info.dependencies == []
    assert not any(get_default_registry().has_hooks(event) for event in HookEvent)

    async def ask() -> list[Any]:
        agent = build_agent("environment", server_a.url)
        return await asyncio.gather(*(agent.achat(f"SLOW {number}") for number in range(8)))

    assert all(asyncio.run(ask()))
    assert len(list(read_calls("kept"))) == 8


# --- as the framework finds it --------------------------------------------------------------------------------------


def run_agent(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process in which the framework discovers the installed entry point, and an agent talks."""
    agent = 'Agent(name="ann", instructions="Be brief.", llm="m1", output="silent", rules=False).chat("hello")\n'
    program = f"from praisonaiagents import Agent\nassert {agent}import sys\nprint(sorted(sys.modules))\n"
    variables = {**os.environ, "HOME": str(folder), **environment}
    ran = subprocess.run([sys.executable, "-c", program], cwd=folder, env=variables, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran


def test_the_installed_package_declares_the_plugin():
    (found,) = [e for e in entry_points(group="praisonai.plugins") if e.name == "praison_agent_rl"]
    assert found.load() is RecordingPlugin, "install the package again if this fails: pip install -e ."


def configure(folder: Path, options: str) -> None:
    (folder / ".praisonai").mkdir()
    (folder / ".praisonai" / "config.yaml").write_text(f"plugins:\n  praison_agent_rl: {options}\n")


def test_a_config_file_switches_it_on(in_tmp):
    configure(in_tmp, "{enabled: true, allow_conversation: true, tags: [live]}")
    run_agent(in_tmp)
    assert [(run.agent, run.prompt, run.tags) for run in read_runs(in_tmp / ".praisonai/rl/transcripts")] == [
        ("ann", "hello", ["live"])
    ]


def test_the_environment_switches_it_on_and_the_config_file_gives_consent(in_tmp):
    configure(in_tmp, "{allow_conversation: true, store: kept}")
    run_agent(in_tmp, PRAISONAI_PLUGINS="praison_agent_rl")
    assert len(list(read_calls(in_tmp / "kept"))) == 1


def test_the_environment_alone_records_nothing_and_the_process_says_so(in_tmp):
    ran = run_agent(in_tmp, PRAISONAI_PLUGINS="praison_agent_rl")
    assert ran.stderr.count("records nothing") == 1
    assert not (in_tmp / ".praisonai").exists()


@pytest.mark.parametrize("variables", [{}, {"PRAISONAI_PLUGINS": "another"}])
def test_who_merely_has_it_installed_gets_no_file_no_tap_and_no_further_module(variables, in_tmp):
    ran = run_agent(in_tmp, **variables)
    loaded = {name for name in ran.stdout.split("'") if name.startswith("praison_agent_rl")}
    assert loaded <= {"praison_agent_rl", "praison_agent_rl.plugin", "praison_agent_rl.errors"}
    assert loaded or not variables
    assert "praison_agent_rl" not in ran.stderr
    assert list(in_tmp.iterdir()) == []
