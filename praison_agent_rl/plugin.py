"""The framework's plugin that records agents once it is enabled with consent; installed alone, it does nothing.

```yaml
# .praisonai/config.yaml
plugins:
  praison_agent_rl: {enabled: true, allow_conversation: true, agents: ["support-*"], sample: 0.1}
```

It declares no hook: the framework runs the hooks of plugins synchronously, which makes concurrent turns fail.
"""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from praisonaiagents.plugins.manager import get_plugin_manager
from praisonaiagents.plugins.plugin import Plugin, PluginInfo, PluginType

from praison_agent_rl.errors import ConfigError

if TYPE_CHECKING:
    from praison_agent_rl.capture import Recording

NAME = "praison_agent_rl"
OPTIONS = ("store", "redact", "agents", "sample", "tags")
"""What `record` is told; ``agents`` are names or patterns of names."""

_LOG = logging.getLogger(__name__)
_OF_THE_FRAMEWORK = ("enabled", "allow_conversation")


class RecordingPlugin(Plugin):  # type: ignore[misc]
    """Records while it is enabled and its options say ``allow_conversation: true``."""

    def __init__(self) -> None:
        self._registry: Any = None
        self._recording: Recording | None = None
        self._warned = False
        # An attribute, not a method: the framework takes a method of this name for a hook.
        self.on_config = self._configure

    @property
    def info(self) -> PluginInfo:
        """What the framework lists."""
        return PluginInfo(
            name=NAME,
            description="Records what agents send and receive, so that they can be trained on it.",
            plugin_type=PluginType.INTEGRATION,
        )

    @property
    def _wired_into_registry(self) -> Any:
        """Set by the framework when it enables a plugin and cleared when it disables it; it says so in no other way."""
        return self._registry

    @_wired_into_registry.setter
    def _wired_into_registry(self, registry: Any) -> None:
        self._registry = registry
        if registry is None:
            self._stop()
        elif get_plugin_manager().get_plugin_options(NAME).get("allow_conversation") is not True:
            self._say_that_consent_is_missing()  # the framework passes no options on where there are none

    def on_shutdown(self) -> None:
        """Stop recording."""
        self._stop()

    def _configure(self, options: dict[str, Any]) -> dict[str, Any]:
        """Record as ``options`` say; the framework logs what is raised here."""
        self._stop()
        if options.get("allow_conversation") is True:
            self._recording = _record(options)
        else:
            self._say_that_consent_is_missing()
        return options

    def _stop(self) -> None:
        if self._recording is not None:
            self._recording.stop()
            self._recording = None

    def _say_that_consent_is_missing(self) -> None:
        if not self._warned:
            self._warned = True
            _LOG.warning(
                "the plugin %s is enabled but records nothing: recording keeps conversations, so it wants "
                "plugins.%s.allow_conversation: true in .praisonai/config.yaml",
                *(NAME, NAME),
            )


def _record(options: Mapping[str, Any]) -> "Recording":
    from praison_agent_rl.capture import record

    given = {key: value for key, value in options.items() if key not in _OF_THE_FRAMEWORK and value is not None}
    unknown = sorted(given.keys() - set(OPTIONS))
    if unknown:
        raise ConfigError(f"plugins.{NAME} has no option {unknown}; it knows {list(OPTIONS)}")
    named = "agents" in given
    agents = _as_list(given.pop("agents", ()), "agents")
    if named and not agents:
        raise ConfigError(f"plugins.{NAME}.agents is [], which names no agent; leave it out to record all of them")
    return record(*agents, tags=_as_list(given.pop("tags", ()), "tags"), **given)


def _as_list(value: Any, name: str) -> list[str]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
        raise ConfigError(f"plugins.{NAME}.{name} is {value!r}; write a text or a list of texts")
    return list(items)
