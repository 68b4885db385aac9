"""A training file as the mapping that it holds; what its keys mean is said in ``config_keys``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigError


class _OneKeyOnce(yaml.SafeLoader):
    """PyYAML's safe loader, but a key given twice is an error instead of the last one winning in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_source(source: str | Path | Mapping[str, Any] | None) -> dict[Any, Any]:
    """The mapping in a YAML file, or a copy of the mapping given; an empty file is an empty mapping."""
    if source is None or isinstance(source, Mapping):
        return dict(source or {})
    path = Path(source)
    if path.is_dir():
        raise ConfigError(f"{str(path)!r} is a folder; name the YAML file in it")
    if not path.exists():
        raise ConfigError(f"there is no file {str(path)!r} (looked from {str(Path.cwd())!r}); check the path")
    try:
        # a SafeLoader: the file is data and can never name a Python object
        content = yaml.load(path.read_text(encoding="utf-8-sig"), Loader=_OneKeyOnce)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{str(path)!r} is not sound YAML{place}: {error.problem}; put that line right") from error
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as YAML text: {error}") from error
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{str(path)!r} holds a {type(content).__name__} at its top; it needs lines of 'key: value'")
    return content or {}
