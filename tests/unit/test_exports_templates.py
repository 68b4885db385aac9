"""Go templates are rendered as Go does, and a tokenizer's template is matched by what it renders."""

import json
from importlib import resources

import pytest

from praison_agent_rl.exports.go_templates import GoTemplateError, render
from praison_agent_rl.exports.ollama_templates import go_values, ollama_template
from praison_agent_rl.exports.probes import PROBES
from praison_agent_rl.templates import ready_template

VALUES = {
    "Messages": [{"Role": "system", "Content": "Be brief."}, {"Role": "user", "Content": "Hi"}],
    "Empty": [],
    "Think": False,
    "Function": {"name": "f", "b": [1, None, True], "a": "<&>é"},
}


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("plain {{ .Think }}", "plain false"),
        ("a {{- .Think -}} b", "afalseb"),
        ("a\n{{- range .Messages }}\n{{ .Role }}\n{{- end }}\n", "a\nsystem\nuser\n"),
        ("{{ range $i, $m := .Messages }}{{ $i }}={{ $m.Role }};{{ end }}", "0=system;1=user;"),
        ("{{ range .Messages }}{{ .Role }}{{ $.Think }}{{ end }}", "systemfalseuserfalse"),
        ("{{ if .Empty }}yes{{ else if eq (len .Messages) 2 }}two{{ else }}no{{ end }}", "two"),
        ("{{ (index .Messages 1).Content }}", "Hi"),
        ("{{ range slice .Messages 1 }}{{ .Role }}{{ end }}", "user"),
        ('{{ $x := "a" }}{{ if true }}{{ $x = "b" }}{{ end }}{{ $x }}', "b"),
        ('{{ $x := "a" }}{{ if true }}{{ $x := "b" }}{{ end }}{{ $x }}', "a"),
        ("{{ if and .Messages (not .Empty) }}1{{ end }}{{ if or .Empty .Think }}2{{ end }}", "1"),
        ('{{ if eq "b" "a" "b" }}in{{ end }}{{ if and (gt 2 1) (le 1 1) (ne 1 2) }} order{{ end }}', "in order"),
        ("{{ json .Function }}", '{"a":"\\u003c\\u0026\\u003eé","b":[1,null,true],"name":"f"}'),
        ('{"a": {{ json .Think }}}', '{"a": false}'),
        ('{{ "a }} b" }}', "a }} b"),
    ],
)
def test_a_template_renders_as_in_go(template: str, wanted: str) -> None:
    assert render(template, VALUES) == wanted


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ .Nothing }}", "no field Nothing"),
        ("{{ $x }}", "not declared"),
        ("{{ if .Think }}", "has no end"),
        ("{{ printf .Think }}", "'printf' is not known"),
        ("{{ .Think | json }}", "is not known here"),
        ("{{ .Messages }}", "printing list"),
        ("{{ range .Messages }}{{ else }}{{ end }}", "range with else"),
        ("{{ eq 1 (len .Messages }}", "parenthesis"),
        ("{{ len .Messages 2 }}", "len takes no such arguments"),
        ("{{ index .Messages 7 }}", "index takes no such arguments"),
        ('{{ len "abc" }}', "'abc' is no list"),
    ],
)
def test_what_is_not_known_is_refused(template: str, said: str) -> None:
    with pytest.raises(GoTemplateError, match=said.replace("(", r"\(")):
        render(template, VALUES)


def rendered_by(template: str, bos: str = ""):
    """What transformers makes of a conversation with a chat template, by Jinja itself."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: "30 Nov 2026"
    compiled = environment.from_string(template)

    def rendered(conversation) -> str:
        given = {"tools": None, **{key: value for key, value in conversation.items() if key != "name"}}
        return compiled.render(add_generation_prompt=True, bos_token=bos, **given)

    return rendered


def _refuse(message: str) -> None:
    raise ValueError(message)


def trl_template(name: str) -> str:
    return (resources.files("trl") / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou "
    "are \"SmolLM\"<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("family", "covers", "lacks"),
    [
        ("qwen2_5", ("plain", "tools"), ()),
        ("qwen3", ("plain", "tools", "thinking"), ()),
        ("qwen3_instruct_2507", ("plain", "tools"), ()),
        ("llama3", ("plain",), ()),
        ("llama3_2", ("plain",), ("tools",)),
        ("gemma", ("plain",), ()),
        ("gemma3", ("plain",), ()),
        ("chatml_tools", ("plain", "tools"), ()),
        ("smollm2", ("plain",), ()),
    ],
)
def test_a_known_family_is_found_by_what_it_renders(family: str, covers: tuple, lacks: tuple) -> None:
    bos = "<bos>" if family.startswith(("gemma", "llama")) else ""
    template = {"smollm2": SMOLLM2}.get(family) or ready_template(family) or trl_template(family)
    rendered = rendered_by(template, bos)
    found = ollama_template(rendered, bos=bos, added=bool(bos))
    assert found is not None and (found.covers, found.lacks) == (covers, lacks)
    for probe in PROBES["plain"]:
        try:
            wanted = rendered(probe).removeprefix(bos)
        except ValueError:  # Gemma knows no system message
            assert family == "gemma" and probe["messages"][0]["role"] == "system"
            continue
        assert render(found.text, go_values(probe)) == wanted


def test_tools_are_rendered_as_in_training_but_for_the_spaces_of_json() -> None:
    rendered = rendered_by(trl_template("qwen3"))
    found = ollama_template(rendered, bos="", added=False)
    result = next(probe for probe in PROBES["tools"] if probe["name"] == "result")
    ours, theirs = render(found.text, go_values(result)), rendered(result)
    assert ours != theirs
    assert '<tool_call>\n{"name": "weather", "arguments": {"city":"Köln"}}\n</tool_call><|im_end|>' in ours
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call><|im_end|>' in theirs


def test_a_template_of_no_known_family_is_not_guessed() -> None:
    assert (
        ollama_template(rendered_by("{% for m in messages %}[{{ m.content }}]{% endfor %}"), bos="", added=False)
        is None
    )
    assert ollama_template(rendered_by("{{ raise_exception('no') }}"), bos="", added=False) is None


def test_a_bos_token_that_no_engine_adds_is_written_out() -> None:
    rendered = rendered_by(trl_template("llama3"), "<bos>")
    found = ollama_template(rendered, bos="<bos>", added=False)
    assert found is not None and found.text.startswith("<bos>")
    assert render(found.text, go_values(PROBES["plain"][0])) == rendered(PROBES["plain"][0])
    # the first token of SmolLM2's messages is its bos token, too, and must not be taken for one that is added
    plain = ollama_template(rendered_by(SMOLLM2), bos="<|im_start|>", added=False)
    assert plain is not None and render(plain.text, go_values(PROBES["plain"][0])).startswith("<|im_start|>system\n")
