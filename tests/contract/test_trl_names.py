"""A release of TRL that moves a name is found out, and a run then goes TRL's own way and says so."""

import inspect

import pytest
import torch
import trl
from trl import GRPOTrainer
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
from trl.trainer import grpo_trainer

from praison_agent_rl.errors import ModelError
from praison_agent_rl.rewards import Reward
from praison_agent_rl.training import trl_names
from praison_agent_rl.training.grpo import PolicyTrainer, train_grpo
from praison_agent_rl.training.sampling import SignalTrainer
from praison_agent_rl.training.scoring import ScoringTrainer
from praison_agent_rl.training.skipping import SkippingTrainer
from praison_agent_rl.training.trl_names import AROUND, READ, STEP, log_probabilities, told
from tests.model.test_grpo import TOOL, WITH_TOOLS, adapter_of, lower_case, notes, planned, rows_of


def parameters(function):
    return list(inspect.signature(function).parameters)


# --- the release that is installed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STEP)
def test_a_step_is_made_by_methods_whose_first_parameters_are_ours(name):
    assert parameters(getattr(GRPOTrainer, name))[: len(STEP[name]) + 1] == ["self", *STEP[name]]
    assert name in {**vars(PolicyTrainer), **vars(SkippingTrainer)}  # and is overridden


def test_the_arguments_of_scoring_are_passed_on_in_their_order():
    assert parameters(PolicyTrainer._shared_scores)[1:8] == list(STEP["_get_per_token_logps_and_entropies"])


@pytest.mark.parametrize("name", AROUND)
def test_around_a_step_are_methods_whose_first_parameters_are_ours(name):
    wanted, without = AROUND[name]
    assert parameters(getattr(GRPOTrainer, name))[: len(wanted) + 1] == ["self", *wanted]
    ours = next(vars(each)[name] for each in (PolicyTrainer, ScoringTrainer, SignalTrainer) if name in vars(each))
    assert len(parameters(ours)) == len(parameters(getattr(GRPOTrainer, name))) and without
    assert told(PolicyTrainer) == {}


@pytest.mark.parametrize("name", READ)
def test_what_a_step_reads_is_set_by_the_trainer(name):
    assert f"self.{name} =" in inspect.getsource(GRPOTrainer)


def test_the_chunked_log_probability_is_found():
    assert log_probabilities() is ChunkedLogProbFunction


# --- one that moved a name --------------------------------------------------------------------------------------------


def release_in_which(old, new):
    """GRPOTrainer as a release would have it whose source says ``new`` where it said ``old``."""
    source = inspect.getsource(GRPOTrainer)
    assert old in source
    names = {**vars(grpo_trainer)}
    exec(source.replace(old, new), names)
    return names["GRPOTrainer"]


@pytest.fixture
def moved():
    """Put such a release in place of the one that is installed."""
    before = SignalTrainer.__bases__

    def move(old, new):
        SignalTrainer.__bases__ = (release_in_which(old, new),)

    yield move
    SignalTrainer.__bases__ = before


def trained(folder, base, tools=(), **options):
    run = planned(folder, base, tools=tools, **({"chat_template": WITH_TOOLS} if tools else {}))
    torch.manual_seed(0)
    train_grpo(run, rows_of(), [Reward(lower_case, "lower")], **options)
    return run


SCORING = "GRPOTrainer._get_per_token_logps_and_entropies(model, input_ids"
STEP_MOVES = {
    "scoring": ("_get_per_token_logps_and_entropies", "_score_tokens", SCORING),
    "an argument of scoring": ("logits_to_keep", "kept_logits", SCORING),
    "generating": ("_generate_single_turn", "_generate_once", "GRPOTrainer._generate_single_turn(prompt_ids, images"),
    "the loss": ("_compute_loss", "_policy_loss", "GRPOTrainer._compute_loss(model, inputs)"),
    "an attribute": ("eos_token_ids", "ends", "attribute 'eos_token_ids' of its trainer"),
}


@pytest.fixture(scope="module")
def by_trl(tiny_model, tmp_path_factory):
    return adapter_of(trained(tmp_path_factory.mktemp("trl") / "run", tiny_model, share=False))


@pytest.mark.parametrize("what", STEP_MOVES)
def test_where_a_name_of_the_step_moved_trl_makes_it_alone_and_that_is_said(what, tiny_model, in_tmp, moved, by_trl):
    old, new, missing = STEP_MOVES[what]
    moved(old, new)
    run = trained(in_tmp / "run", tiny_model)
    (note,) = [note for note in notes(run) if note.startswith("prompts are not shared")]
    assert f"TRL {trl.__version__} has no {missing}" in note
    found = adapter_of(run)
    assert all(torch.allclose(found[name], wanted, rtol=1e-4, atol=1e-6) for name, wanted in by_trl.items())


def test_where_the_chunked_log_probability_moved_trl_makes_the_step_alone(tiny_model, in_tmp, monkeypatch):
    monkeypatch.delattr("trl.kernels.chunked_logprob.ChunkedLogProbFunction")
    (note,) = notes(trained(in_tmp / "run", tiny_model))
    assert note.endswith(f"TRL {trl.__version__} has no trl.kernels.chunked_logprob.ChunkedLogProbFunction")


def test_a_chunked_log_probability_that_takes_other_arguments_is_none(monkeypatch):
    class Other:
        @staticmethod
        def forward(ctx, hidden, weight, bias, targets, temperature): ...

    monkeypatch.setattr("trl.kernels.chunked_logprob.ChunkedLogProbFunction", Other)
    assert log_probabilities() is None
    monkeypatch.setattr(trl_names, "_LOG_PROBABILITIES", ("trl.kernels.elsewhere", "ChunkedLogProbFunction"))
    assert log_probabilities() is None


@pytest.mark.parametrize("name", AROUND)
def test_where_a_name_around_the_step_moved_the_run_says_what_it_does_without(name, tiny_model, in_tmp, moved):
    moved(name, f"{name}_since")
    wanted, without = AROUND[name]
    said = notes(trained(in_tmp / "run", tiny_model))
    assert f"TRL {trl.__version__} has no GRPOTrainer.{name}({', '.join(wanted)}): {without}" in said


def test_without_the_method_that_renders_prompts_a_run_with_tools_is_refused(tiny_model, in_tmp, moved):
    moved("_tokenize_prompts", "_render_prompts")
    with pytest.raises(ModelError, match="without the tools that the agent is shown; take the release of TRL"):
        trained(in_tmp / "run", tiny_model, tools=[TOOL])
