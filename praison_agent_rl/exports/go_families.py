"""Chat templates of known families in Go's template language, as Ollama wants them.

DEFAULT stands for a Go string of the model: the system message that is made up where none is given, or what stands
before every one.
"""

CHATML = """\
{{- $default := DEFAULT }}
{{- if and $default (ne (index .Messages 0).Role "system") }}<|im_start|>system
{{ $default }}<|im_end|>
{{ end }}
{{- range .Messages }}<|im_start|>{{ .Role }}
{{ .Content }}<|im_end|>
{{ end }}<|im_start|>assistant
"""

_TOOLS = """\
{{- $default := DEFAULT }}
{{- $system := $default }}
{{- $begun := or $default (eq (index .Messages 0).Role "system") }}
{{- if eq (index .Messages 0).Role "system" }}{{ $system = (index .Messages 0).Content }}{{ end }}
{{- if .Tools }}<|im_start|>system
{{ if $begun }}{{ $system }}

{{ end }}# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{{- range .Tools }}
{"type": "function", "function": {{ json .Function }}}
{{- end }}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{{ else if $begun }}<|im_start|>system
{{ $system }}<|im_end|>
{{ end }}
{{- $question := 0 }}
{{- range $i, $m := .Messages }}
{{- if eq $m.Role "user" }}{{ $question = $i }}{{ end }}
{{- end }}
{{- $before := "" }}
{{- range $i, $m := .Messages }}
{{- if and (eq $before "tool") (ne $m.Role "tool") }}<|im_end|>
{{ end }}
{{- if eq $m.Role "tool" }}
{{- if ne $before "tool" }}<|im_start|>user{{ end }}
<tool_response>
{{ $m.Content }}
</tool_response>
{{- else if or (ne $m.Role "system") $i }}<|im_start|>{{ $m.Role }}
{{ THOUGHT }}{{ $m.Content }}
{{- range $j, $call := $m.ToolCalls }}
{{- if or $m.Content $j }}
{{ end }}<tool_call>
{"name": "{{ $call.Function.Name }}", "arguments": {{ json $call.Function.Arguments }}}
</tool_call>
{{- end }}<|im_end|>
{{ end }}
{{- $before = $m.Role }}
{{- end }}
{{- if eq $before "tool" }}<|im_end|>
{{ end }}<|im_start|>assistant
"""
CHATML_TOOLS = _TOOLS.replace("{{ THOUGHT }}", "")
"""Hermes and Qwen2.5."""
CHATML_TOOLS_BARE = CHATML_TOOLS.replace("{{ if $begun }}{{ $system }}", "{{ if $system }}{{ $system }}")
"""Our own ``chatml_tools``: of an empty system message nothing stands before the tools."""
CHATML_THINKING = (
    _TOOLS.replace(
        "{{ THOUGHT }}",
        "{{ if and $m.Thinking (gt $i $question) }}<think>\n{{ $m.Thinking }}\n</think>\n\n{{ end }}",
    )
    + "{{ if and .IsThinkSet (not .Think) }}<think>\n\n</think>\n\n{{ end }}"
)
"""Qwen3: thoughts since the last question are shown, and a model that is not to think begins with an empty one."""

LLAMA3 = """\
{{- range .Messages }}<|start_header_id|>{{ .Role }}<|end_header_id|>

{{ .Content }}<|eot_id|>{{ end }}<|start_header_id|>assistant<|end_header_id|>

"""
LLAMA3_DATED = """\
{{- $default := DEFAULT }}<|start_header_id|>system<|end_header_id|>

{{ $default }}{{ if eq (index .Messages 0).Role "system" }}{{ (index .Messages 0).Content }}{{ end }}<|eot_id|>
{{- range $i, $m := .Messages }}
{{- if or (ne $m.Role "system") $i }}<|start_header_id|>{{ $m.Role }}<|end_header_id|>

{{ $m.Content }}<|eot_id|>{{ end }}
{{- end }}<|start_header_id|>assistant<|end_header_id|>

"""
"""Llama 3.1 and 3.2, whose system message begins with dates."""

GEMMA = """\
{{- $system := "" }}
{{- $begun := false }}
{{- range .Messages }}
{{- if eq .Role "system" }}{{ $system = .Content }}{{ $begun = true }}
{{- else if eq .Role "user" }}<start_of_turn>user
{{ if $begun }}{{ $system }}

{{ $begun = false }}{{ end }}{{ .Content }}<end_of_turn>
{{ else }}<start_of_turn>model
{{ .Content }}<end_of_turn>
{{ end }}
{{- end }}<start_of_turn>model
"""
