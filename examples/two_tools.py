"""An agent learns which of its two tools to call, on a model that is made on the spot; a few minutes on two cores.

    python examples/two_tools.py [STEPS]

The model is tiny and knows little: it calls either tool, or none, and repeats what a tool gave. What is recorded are
runs of the agent on another model, which calls either tool, half of the time the wrong one. From those it starts
(``warm_start``), and then the real agent, with its tools and all that it sends, makes the rollouts of GRPO
(``rollout: agent``). On two cores of an AMD EPYC, in 5 min 51 s: 0.46 -> 0.98 on 48 held-out prompts.
"""

import json
import os
import random
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from praisonaiagents import Agent

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: else a busy core makes it many times slower

import praison_agent_rl as rl
from praison_agent_rl.agent_rollouts.tool_texts import keep_response_template
from praison_agent_rl.sent import sent_requests
from praison_agent_rl.templates import ready_template

THINGS = ["sun", "moon", "cat", "dog", "tree", "sea", "bird", "fish"]
PLACES = [f"place{number}" for number in range(16)]
SIZES = {thing: f"size{number}" for number, thing in enumerate(THINGS)}
COLOURS = {thing: f"colour{number}" for number, thing in enumerate(THINGS)}
TOOLS = {"size": "size_of", "colour": "colour_of"}
UNKNOWN = "<unk>"


@rl.pure
def size_of(thing: str) -> str:
    """How big a thing is.

    Args:
        thing: What is asked about.
    """
    return SIZES.get(thing, "unknown")


@rl.pure
def colour_of(thing: str) -> str:
    """Which colour a thing has.

    Args:
        thing: What is asked about.
    """
    return COLOURS.get(thing, "unknown")


def right_tool(
    prompts: list[str], completions: list[str], tool_calls: list[Any], final_answer: list[str], **_: Any
) -> list[float]:
    """1 for an answer that is what the right tool gave, after exactly that call."""
    return [
        float([call["name"] for call in calls] == [wanted(prompt)] and answer.strip() == result_of(prompt))
        for prompt, calls, answer in zip(prompts, tool_calls, final_answer, strict=True)
    ]


def questions() -> list[str]:
    """Every question: which of two things is asked, of what, and where."""
    return [f"at {place} of {thing} {what}" for what in TOOLS for thing in THINGS for place in PLACES]


def wanted(prompt: str) -> str:
    """The tool that a question is for."""
    return TOOLS[prompt.split()[-1]]


def result_of(prompt: str) -> str:
    """What that tool gives."""
    *_, thing, what = prompt.split()
    return (SIZES if what == "size" else COLOURS)[thing]


def make_agent(**model: Any) -> Agent:
    """The agent, answered by ``model``."""
    return Agent(name="Two tools", instructions="Use a tool.", llm=model, tools=[size_of, colour_of], rules=False)


def call_of(tool: str, thing: str) -> dict[str, Any]:
    """A message of the assistant that calls a tool."""
    function = {"name": tool, "arguments": json.dumps({"thing": thing})}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


# --- the model: a few words, taught in a minute ----------------------------------------------------------------------


def make_model(folder: Path) -> Path:
    """A model of 0.2 million parameters that calls a tool or none, at random, and repeats what a tool gave."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=1024, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    _teach(model, tokenizer)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(do_sample=True, **ends)  # else the server ignores a temperature
    model.save_pretrained(folder)
    keep_response_template(tokenizer)  # so that the server finds the calls in what the model says
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*THINGS, *PLACES, *SIZES.values(), *COLOURS.values(), *TOOLS, "of", "at", "user", "assistant", "system"]
    words += [json.dumps(result) for result in (*SIZES.values(), *COLOURS.values())]  # as the framework tells them
    call = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", '{"name":', '"arguments":']
    call += [f'"{name}",' for name in TOOLS.values()] + ['{"thing":'] + [f'"{thing}"}}}}' for thing in THINGS]
    special = ["<pad>", "<|im_start|>", "<|im_end|>", UNKNOWN]
    raw = Tokenizer(models.WordLevel({w: n for n, w in enumerate([*special, *words, *call])}, unk_token=UNKNOWN))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.add_special_tokens(special[:3])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<pad>")
    tokenizer.chat_template = ready_template("chatml_tools")
    return tokenizer


def _teach(model: Any, tokenizer: Any, steps: int = 800) -> None:
    import torch

    asked = sent_requests(
        make_agent(model="openai/none", base_url="http://127.0.0.1:9/v1", api_key="none"), ["at place0 of sun size"]
    )[0]
    rng, optimiser = random.Random(0), torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        # what it has known once, and forgotten, is learned again sooner
        batch = [_example(rng, tokenizer, asked, knows=step < steps * 3 // 4) for _ in range(32)]
        width = max(len(ids) for ids, _ in batch)
        pad = tokenizer.pad_token_id
        ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in batch])
        labels = torch.tensor([[-100] * start + ids[start:] + [-100] * (width - len(ids)) for ids, start in batch])
        loss = model(input_ids=ids, attention_mask=(ids != pad).long(), labels=labels).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        if step % 100 == 99:
            print(f"teaching the model: step {step + 1}, loss {float(loss.detach()):.2f}")


def _example(rng: random.Random, tokenizer: Any, asked: Any, *, knows: bool) -> tuple[list[int], int]:
    """Tokens of a turn of a conversation, and where the model's own begin; who ``knows`` calls the right tool."""
    thing, what = rng.choice(THINGS), rng.choice(list(TOOLS))
    question = f"at {rng.choice(PLACES)} of {{}} {what}"
    messages = [dict(message) for message in asked.messages]
    for message in messages:
        if message["role"] == "user":
            message["content"] = question.format(thing)
    tool = TOOLS[what] if knows else rng.choice(list(TOOLS.values()))
    reply: dict[str, Any] = call_of(tool, thing)
    if rng.random() < 0.5:
        result = (SIZES if tool == "size_of" else COLOURS)[thing]
        messages += [call_of(tool, thing), {"role": "tool", "content": json.dumps(result)}]
        reply = {"role": "assistant", "content": result}
    elif rng.random() < 0.3:
        reply = {"role": "assistant", "content": rng.choice([*SIZES.values(), *COLOURS.values()])}
    return _tokens(tokenizer, messages, reply, asked.tools)


def _tokens(tokenizer: Any, messages: list[Any], reply: Any, tools: list[Any]) -> tuple[list[int], int]:
    from praison_agent_rl.models import render_messages

    prompt = render_messages(tokenizer, messages, tools)
    return render_messages(tokenizer, [*messages, reply], tools, opened=False), len(prompt)


# --- what is recorded ------------------------------------------------------------------------------------------------


class Elder(BaseHTTPRequestHandler):
    """Another model that the agent ran on before: it calls one of the tools, any, and says what that gave."""

    def do_POST(self) -> None:
        """Answer a chat request."""
        messages = json.loads(self.rfile.read(int(self.headers["content-length"])))["messages"]
        message: dict[str, Any] = {"role": "assistant", "content": messages[-1]["content"].strip('"')}
        if messages[-1]["role"] == "user":
            message = call_of(random.choice(list(TOOLS.values())), messages[-1]["content"].split()[-2])
        finish = "tool_calls" if "tool_calls" in message else "stop"
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        reply = {"id": "0", "object": "chat.completion", "created": 0, "model": "elder", "usage": usage}
        body = json.dumps({**reply, "choices": [{"index": 0, "message": message, "finish_reason": finish}]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Stay silent."""


def record(asked: list[str]) -> Agent:
    """An agent whose answers to some questions were recorded; what they were is given to nobody but the warm start."""
    elder = ThreadingHTTPServer(("127.0.0.1", 0), Elder)
    threading.Thread(target=elder.serve_forever, daemon=True).start()
    agent = make_agent(model="openai/elder", base_url=f"http://127.0.0.1:{elder.server_port}/v1", api_key="none")
    with agent.record():
        for question in asked:
            agent.clear_history()
            agent.chat(question)
    return agent


def main() -> None:
    """Make the model, record, improve."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    folder = make_model(Path(tempfile.mkdtemp()) / "two_tools")
    asked = questions()
    random.Random(0).shuffle(asked)
    agent = record(asked[:64])
    result = agent.improve(
        method="grpo",
        data=asked,
        base_model=str(folder),
        reward_funcs=["two_tools:right_tool"],
        rollout="agent",
        warm_start=20,
        held_out=48,
        max_steps=steps,
        num_generations=8,
        per_device_train_batch_size=32,  # 4 questions
        max_completion_length=24,
        learning_rate=3e-3,
    )
    print(result)
    print(f"report: {result.report}")


if __name__ == "__main__":
    main()
