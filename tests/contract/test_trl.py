"""The names of TRL, transformers and peft that this package overrides or calls are there, and take what it gives."""

import inspect
import re

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner
from transformers import DynamicCache, LlamaConfig
from trl import GRPOTrainer
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
from trl.trainer.utils import RepeatSampler, is_async_callable

from praison_agent_rl.rewards import Reward
from praison_agent_rl.training.grpo import PolicyTrainer
from praison_agent_rl.training.sampling import EpochSampler, Signals


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_trl_tokenizes_prompts_in_a_method_of_its_own():
    assert parameters(GRPOTrainer._tokenize_prompts) == ["self", "prompts"]
    assert parameters(PolicyTrainer._tokenize_prompts) == ["self", "prompts"]
    returned = inspect.getsource(GRPOTrainer._tokenize_prompts)
    assert "return prompt_ids, images, multimodal_fields" in returned


def test_trl_scores_completions_in_a_method_that_takes_pictures_last():
    # all that follows is of pictures: passed on by name, and not shared where it is given
    rest = list(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters.values())[8:]
    assert rest and all(parameter.default is None for parameter in rest)


def test_trl_calls_rewards_in_a_method_of_its_own_and_takes_ours_for_plain_functions():
    wanted = ["self", "inputs", "prompts", "completions", "completion_ids_list"]
    assert parameters(GRPOTrainer._calculate_rewards) == parameters(PolicyTrainer._calculate_rewards) == wanted
    source = inspect.getsource(GRPOTrainer._calculate_rewards)
    passed = re.findall(r'\breward_kwargs\["(\w+)"\] = ', source)
    assert passed == ["trainer_state", "log_extra", "log_metric", "environments"]
    assert 'key not in ["prompt", "completion", "completion_ids"]' in source
    assert parameters(GRPOTrainer._log_completion_extra) == ["self", "column", "values"]
    assert parameters(GRPOTrainer._log_metric) == ["self", "name", "value"]

    async def judge(completions):
        return [1.0] * len(completions)

    assert is_async_callable(judge) and not is_async_callable(Reward(judge, "judge"))  # else TRL would await it


def test_trl_takes_rollouts_and_runs_tools_in_methods_of_their_own():
    assert parameters(GRPOTrainer._generate) == parameters(PolicyTrainer._generate) == ["self", "prompts"]
    loop = ["prompts", "prompt_ids", "completion_ids", "completions", "logprobs", "images", "multimodal_fields"]
    assert parameters(GRPOTrainer._tool_call_loop) == ["self", *loop]
    source = inspect.getsource(GRPOTrainer._generate)
    assert "output = self.rollout_func(prompts, self)" in source and 'extra_fields.pop("env_mask", None)' in source
    returned = "prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images, tool_images"
    assert f"return {returned}" in source


def test_trl_looks_tools_up_by_name_in_two_dictionaries_for_each_rollout():
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    for lists in ("self._sync_tool_dicts", "self._async_tool_dicts"):
        assert f"{lists} = []" in source and f"{lists}.append(" in source
    source = inspect.getsource(GRPOTrainer._tool_call_loop)
    looked_up = """
                            if name in sync_tool_dict:
                                tool_call_results.append((name, sync_tool_dict[name](**function["arguments"])))
                            elif name in async_tool_dict:
                                async_coros.append((name, async_tool_dict[name](**function["arguments"])))
"""
    assert looked_up in source
    for kind in ("sync", "async"):
        assert f"{kind}_tool_dict = self._{kind}_tool_dicts[idx_with_tool]" in source
    seven = "tool_mask, completions, completion_ids, logprobs, tool_call_count, tool_failure_count, tool_images"
    assert source.rstrip().endswith(f"return {seven}")
    taken = re.search(r"\(\s+([\w,\s]+?),\s+\) = self\._tool_call_loop\(", inspect.getsource(GRPOTrainer._generate))
    assert taken and ", ".join(taken[1].replace(",", " ").split()) == seven


def test_trl_resets_environments_before_it_generates_and_goes_by_the_functions_of_their_class():
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert source.index("observation = environment.reset(**reset_kwargs)") < source.index("= self._generate(prompts)")
    assert "in inspect.getmembers(type(environment), predicate=inspect.isfunction)" in source
    assert "self.environments.append(pool[index])" in source
    assert 'prompts[i] = prompt[:-1] + [{**prompt[-1], "content": content + observation}]' in source


def test_trl_orders_prompts_with_a_sampler_that_can_be_made_again():
    assert parameters(GRPOTrainer._get_train_sampler) == ["self", "dataset"]
    wanted = ["self", "data_source", "mini_repeat_count", "batch_size", "repeat_count", "shuffle", "seed"]
    assert parameters(RepeatSampler.__init__) == wanted
    theirs = RepeatSampler(range(6), 2, batch_size=3, repeat_count=2, shuffle=True, seed=5)
    ours = EpochSampler(range(6), 2, batch_size=3, repeat_count=2, shuffle=True, seed=5)
    ours.signals = Signals()
    first = list(ours)
    assert first == list(theirs)  # the first pass is TRL's own
    ours.signals.turn = 1
    assert list(ours) != first
    ours.signals.turn = 0
    assert list(ours) == first
    ordered = EpochSampler(range(4), 1, batch_size=2, shuffle=False)
    ordered.signals = ours.signals
    assert list(ordered) == [0, 1, 2, 3]


def test_trl_trainers_have_the_attributes_that_the_overrides_read():
    source = inspect.getsource(GRPOTrainer)
    for name in (
        "_tokenizer",
        "generation_config",
        "eos_token_ids",
        "temperature",
        "use_vllm",
        "use_transformers_continuous_batching",
    ):
        assert f"self.{name} =" in source, name


def test_the_chunked_log_probability_takes_nine_arguments_and_gives_what_softmax_gives():
    wanted = ["ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size"]
    assert parameters(ChunkedLogProbFunction.forward) == [*wanted, "final_logit_softcapping", "logit_scale", "outputs"]
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(5, 8, requires_grad=True), torch.randn(11, 8), torch.randn(11)
    targets = torch.tensor([0, 3, 10, 3, 7])
    log_probs, entropy, *others = ChunkedLogProbFunction.apply(
        hidden, weight, bias, targets, 0.5, 4, None, 1.0, ("log_probs", "entropy")
    )
    assert others == [None, None, None]
    wanted = ((hidden @ weight.T + bias) / 0.5).log_softmax(1)
    torch.testing.assert_close(log_probs, wanted[range(5), targets], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, -(wanted.exp() * wanted).sum(1), rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad((log_probs + 0.1 * entropy).sum(), hidden, retain_graph=True)[0]
    exact = torch.autograd.grad((wanted[range(5), targets] - 0.1 * (wanted.exp() * wanted).sum(1)).sum(), hidden)[0]
    torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5)


def test_the_cache_of_transformers_repeats_and_selects_rows():
    assert parameters(DynamicCache.batch_repeat_interleave) == ["self", "repeats"]
    assert parameters(DynamicCache.batch_select_indices) == ["self", "indices"]
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, hidden_size=2)
    cache = DynamicCache(config=config)
    keys = torch.arange(4.0).view(2, 1, 1, 2)
    cache.update(keys, keys + 10, 0)
    cache.batch_repeat_interleave(2)
    assert cache.layers[0].keys[:, 0, 0, 0].tolist() == [0, 0, 2, 2]
    cache.batch_select_indices(torch.tensor([3, 0, 3]))
    assert cache.layers[0].keys[:, 0, 0, 0].tolist() == [2, 0, 2]
    assert cache.layers[0].values[:, 0, 0, 0].tolist() == [12, 10, 12]


def test_peft_merges_into_copies_and_takes_adapters_out_again():
    assert "safe_merge" in parameters(BaseTuner.merge_adapter)
    assert parameters(BaseTuner.unmerge_adapter) == ["self"]
    assert "get_base_model" in dir(PeftModel)
