"""Chat templates that come with the package, each a Jinja file that the key ``chat_template`` selects by its name."""

import re
from pathlib import Path

_FOLDER = Path(__file__).parent


def ready_template(name: str) -> str | None:
    """The text of the template of that name; None where the package has none, as for a path or a template's text."""
    file = _FOLDER / f"{name}.jinja"
    return file.read_text(encoding="utf-8") if re.fullmatch(r"\w+", name) and file.is_file() else None


def ready_templates() -> list[str]:
    """The names that ``ready_template`` knows."""
    return sorted(file.stem for file in _FOLDER.glob("*.jinja"))
