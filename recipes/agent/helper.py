"""What the configuration names: the agent of ``examples/two_tools.py`` and its reward. Training asks no other model."""

from examples.two_tools import make_agent
from examples.two_tools import right_tool as right_tool  # told on

agent = make_agent(model="openai/elder", base_url="http://127.0.0.1:9/v1", api_key="none")
