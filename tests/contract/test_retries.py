"""The words by which the framework's own retries are known are those that it sends, in every client that retries."""

import json
from typing import Any

import pytest

import praison_agent_rl as rl
from praison_agent_rl.data import load_rows
from praison_agent_rl.dataset_building import BuildOptions
from tests.fakes import FakeServer, build_agent


class Improving(FakeServer):
    """Answers badly at first, and well to whoever asks again; it is never satisfied with its first answer."""

    verdicts = 0

    def reply_to(self, request: dict[str, Any]) -> dict[str, Any]:
        """The assistant message for a request."""
        last = request["messages"][-1]
        text = str(last["content"])
        if "Reflect on" in text:
            self.verdicts += 1
            said = json.dumps({"reflection": "too short", "satisfactory": "no" if self.verdicts == 1 else "yes"})
        elif last["role"] == "user" and "TOOL" in text and request.get("tools"):
            return super().reply_to(request)
        else:
            said = "a GOOD answer" if "regenerate" in text or "improved response" in text else "a draft"
        return {"role": "assistant", "content": said}


def good(output: Any) -> tuple[bool, Any]:
    text = str(getattr(output, "raw", output))
    return ("GOOD" in text, text if "GOOD" in text else "it must be GOOD")


@pytest.mark.parametrize(
    ("options", "asked", "roles"),
    [
        ({"guardrails": good, "tools": []}, "hello", ["system", "user"]),
        ({"reflection": True, "tools": []}, "hello", ["system", "user"]),
        ({"guardrails": good}, "hello TOOL", ["system", "user", "assistant", "tool"]),
    ],
)
def test_what_an_agent_took_back_is_paired_with_what_it_said_instead(agents_around, in_tmp, options, asked, roles):
    with Improving("A") as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_BASE_URL", server.url)
        agent = build_agent("environment", server.url, **options)
        with rl.record():
            assert agent.chat(asked) == "a GOOD answer"
    built = rl.build_dataset(kind="pairs", options=BuildOptions(near_duplicates=None))
    (row,) = load_rows(built.rows)
    assert (row["source"], row["chosen"][0]["content"], row["rejected"][0]["content"]) == (
        "retry",
        "a GOOD answer",
        "a draft",
    )
    assert [message["role"] for message in row["prompt"]] == roles
