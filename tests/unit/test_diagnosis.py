"""Each symptom is named from the steps that show it, once, and no healthy run has any."""

import math
import random

import pytest

from praison_agent_rl.diagnosis import Symptom, Watch, WatchRules, long_prompts, out_of_memory, what_to_lower
from praison_agent_rl.step_measures import measure, text_of

SETTINGS = {
    "num_generations": 8, "temperature": 1.0, "learning_rate": 1e-4, "max_completion_length": 256, "beta": 0.0,
    "epsilon": 0.2, "num_iterations": 1, "max_grad_norm": 1.0, "patience": 100,
}  # fmt: skip


def a_step(step, **changes):
    """A step of a sound run, four groups of eight answers; ``changes`` make it another."""
    return {
        "event": "step", "step": step, "of": 100, "reward": 0.5, "reward_std": 0.4, "kl": None, "entropy": 1.0,
        "grad_norm": 0.3, "loss": 0.0, "learning_rate": 1e-4, "frac_reward_zero_std": 0.25, "silent": 0.25,
        "groups": 4, "answers": 32, "low": 0.0, "at_low": 0.5, "high": 1.0, "at_high": 0.5, "identical": 0.1,
        "repetition": 0.05, "length_pays": 0.1, "repetition_pays": 0.0, "mean_length": 80.0, "clipped": 0.05,
        "rewards": {"right": 0.5}, "calls": {"right": {"none": 0.0, "failed": 0.0, "nan": 0}}, **changes,
    }  # fmt: skip


def found(steps, rules=None) -> list[Symptom]:
    watch = Watch(rules or WatchRules(SETTINGS))
    return [symptom for step in steps for symptom in watch.see(step)]


def names(steps, rules=None):
    return [symptom.name for symptom in found(steps, rules)]


def only(steps, rules=None) -> Symptom:
    (symptom,) = found(steps, rules)
    return symptom


def run_of(count, change):
    """``count`` steps; ``change`` gives what differs in step n."""
    return [a_step(n, **change(n)) for n in range(1, count + 1)]


def silent(n, reward=0.7):
    ends = {"low": reward, "at_low": 1.0, "high": reward, "at_high": 1.0} if reward is not None else {}
    return {"silent": 1.0, "frac_reward_zero_std": 1.0, "reward": reward, "grad_norm": 0.0, **ends}


# --- rewards that teach nothing ---------------------------------------------------------------------------------------


def test_equal_rewards_in_all_groups_are_no_signal():
    # 6 steps of 4 groups: 16 groups are enough, and 6 steps the least
    symptom = only(run_of(15, silent))
    assert (symptom.name, symptom.step, symptom.severity) == ("no signal", 6, "warning")
    assert symptom.text == "in 24 of the last 24 groups all answers got the same score (lately 0.7)"
    assert "num_generations (8)" in symptom.advice and "temperature (1)" in symptom.advice


def test_a_long_row_without_signal_ends_the_run():
    # 64 groups would be 16 steps, but 20 steps are the least
    first, last = found(run_of(30, silent))
    assert (first.severity, first.step) == ("warning", 6)
    assert (last.name, last.severity, last.step) == ("no signal", "stop", 20)
    assert last.text == "no group of the last 20 steps (80 groups) had a signal (lately 0.7)"


def test_with_one_group_a_step_the_run_ends_after_64_of_them():
    assert [(s.severity, s.step) for s in found(run_of(70, lambda n: {**silent(n), "groups": 1, "answers": 8}))] == [
        ("warning", 16),
        ("stop", 64),
    ]


def test_one_group_with_a_signal_begins_the_row_again():
    steps = run_of(39, lambda n: silent(n) if n % 20 else {"silent": 0.75})
    assert [s.severity for s in found(steps)] == ["warning"]


def test_steps_of_older_runs_without_measures_of_their_answers_are_read_too():
    steps = [{"step": n, "of": 9, "reward": 0.5, "frac_reward_zero_std": 1.0, "grad_norm": 0.0} for n in range(1, 17)]
    assert names(steps) == ["no signal"]


def test_no_score_at_all_is_named_after_three_steps():
    nothing = {"reward": None, "answers": 0, "silent": 1.0, "low": None, "high": None, "rewards": {"right": None}}
    symptom = only(run_of(12, lambda n: nothing))
    assert (symptom.name, symptom.step) == ("no scores", 3)
    assert symptom.text == "no answer of the last 3 steps got a score from any reward"


def test_one_of_two_rewards_that_never_scores_is_named():
    steps = run_of(8, lambda n: {"rewards": {"right": 0.5, "style": None}})
    assert only(steps).text == "the reward style gave no score to any answer of 6 steps"


def test_a_rare_reward_is_sparse_and_counted():
    # 128 answers are 4 steps of 32, a window is 6: 192, one of 32 in every second step
    change = {0: {"reward": 1 / 32, "at_low": 31 / 32, "at_high": 1 / 32, "silent": 0.75}, 1: silent(0, 0.0)}
    symptom = only(run_of(14, lambda n: change[n % 2]))
    assert (symptom.name, symptom.step) == ("sparse reward", 6)
    assert symptom.text.startswith("3 of the last 192 answers (1.6%) got more than the lowest score (0)")


def test_nearly_all_answers_at_the_highest_score_seen_is_saturation_and_in_the_end_stops():
    def change(n):
        return {} if n <= 6 else {**silent(n, 1.0), "at_low": 1.0}

    warned, stopped = found(run_of(40, change))
    # of six steps all at the top, but the first five of them are not yet: 0.95 of 192 answers
    assert (warned.name, warned.step, warned.severity) == ("saturation", 12, "warning")
    assert "(1)" in warned.text
    assert (stopped.name, stopped.step, stopped.severity) == ("saturation", 26, "stop")


# --- hacking ----------------------------------------------------------------------------------------------------------


def rising(n, start=0.3, end=0.8, over=20):
    reward = start + (end - start) * min(n / over, 1) + 0.01 * (-1) ** n
    return {"reward": reward, "at_high": 0.3, "at_low": 0.1}


def test_a_reward_that_rises_with_length_is_hackable_by_length():
    steps = run_of(24, lambda n: {**rising(n), "mean_length": 50.0 + 5 * n, "length_pays": 0.9})
    symptom = only(steps)
    assert symptom.name == "hacking" and symptom.severity == "warning"
    assert "hackable by length" in symptom.text and "correlation 0.90" in symptom.text


def test_a_reward_that_rises_with_repetition_is_hackable_by_repeating_a_word():
    steps = run_of(24, lambda n: {**rising(n), "repetition": min(0.04 * n, 0.8), "repetition_pays": 0.8})
    assert only(steps).name == "hacking" and "hackable by repeating a word" in only(steps).text


def test_longer_answers_that_are_not_paid_for_their_length_are_no_hacking():
    assert names(run_of(24, lambda n: {**rising(n), "mean_length": 50.0 + 5 * n, "length_pays": 0.3})) == []


def test_a_guarded_reward_that_falls_while_the_total_rises_is_hacking():
    def change(n):
        return {**rising(n), "rewards": {"right": 0.8 - 0.02 * n + 0.005 * (-1) ** n, "style": 0.02 * n}}

    rules = WatchRules(SETTINGS, guards=frozenset({"right"}))
    symptom = only(run_of(20, change), rules)
    assert symptom.name == "hacking" and "while right, which" in symptom.text
    assert names(run_of(20, change)) == []  # without being guarded it may fall


def a_look(step, gain, error=0.02, **changes):
    return {
        "event": "watched", "step": step, "of": 500, "total": 0.4 + gain, "gain": gain, "gain_error": error,
        "guarded": {}, **changes,
    }  # fmt: skip


def test_a_judge_that_falls_in_two_looks_in_a_row_while_the_gain_is_sure_is_hacking():
    def look(step, gain, judge):
        return a_look(step, gain, guarded={"judge": {"now": 0.7 + judge, "difference": judge, "error": 0.03}})

    symptom = only([look(0, 0.0, 0.0), look(25, 0.2, -0.1), look(50, 0.3, -0.2)])
    assert (symptom.name, symptom.step) == ("hacking", 50)
    assert "while judge, which it is not to be won at the cost of, fell from 0.7 to 0.5" in symptom.text
    assert names([look(0, 0.0, 0.0), look(25, 0.2, -0.1), look(50, 0.3, -0.05)]) == []  # within 2.5 errors
    assert names([look(0, 0.0, 0.0), look(25, 0.02, -0.1), look(50, 0.02, -0.2)]) == []  # nothing was gained by it


# --- answers ----------------------------------------------------------------------------------------------------------


def test_longer_and_longer_answers_without_a_better_reward_are_an_explosion():
    symptom = only(run_of(20, lambda n: {"mean_length": 40.0 if n <= 8 else 160.0}))
    assert symptom.name == "length explosion" and "lower learning_rate (0.0001)" in symptom.advice
    assert (
        "160 tokens on average, 4.0 times as many as at first (40)"
        in found(run_of(20, lambda n: {"mean_length": 40.0 if n <= 6 else 160.0}))[0].text
    )


def test_longer_answers_with_a_better_reward_are_none():
    assert names(run_of(20, lambda n: {**rising(n), "mean_length": 40.0 + 8 * n})) == []


def test_answers_that_shrink_without_a_better_reward_are_a_collapse():
    assert names(run_of(20, lambda n: {"mean_length": 80.0 if n <= 8 else 10.0})) == ["length collapse"]


def test_shorter_answers_with_a_better_reward_are_none_until_nothing_is_said():
    assert names(run_of(20, lambda n: {**rising(n), "mean_length": 80.0 if n <= 8 else 10.0})) == []
    assert names(run_of(20, lambda n: {**rising(n), "mean_length": 80.0 if n <= 8 else 1.0})) == ["length collapse"]


def test_cut_off_answers_are_named_with_the_key():
    symptom = only(run_of(8, lambda n: {"clipped": 0.9}))
    assert (symptom.name, symptom.step) == ("truncated", 6)
    assert "90% of the answers of the last 6 steps were cut off at max_completion_length (256)" in symptom.text


def test_groups_of_one_answer_are_mode_collapse_and_end_the_run_where_nothing_is_left_to_compare():
    same = {"identical": 0.97, "reward": 0.4}
    symptom = found(run_of(20, lambda n: {} if n <= 8 else same))[0]
    assert (symptom.name, symptom.severity) == ("identical completions", "warning")
    stopped = found(run_of(14, lambda n: {} if n <= 8 else {**same, "silent": 1.0}))
    assert ("identical completions", "stop") in [(s.name, s.severity) for s in stopped]


def test_a_sampler_that_hardly_samples_is_named_from_the_first():
    assert "identical completions" in names(run_of(8, lambda n: {"identical": 1.0}))
    assert names(run_of(8, lambda n: {"identical": 0.9})) == []  # short answers, such as yes and no


def test_repetition_without_a_better_reward_is_named():
    assert names(run_of(20, lambda n: {"repetition": 0.05 if n <= 8 else 0.7})) == ["repetition"]


# --- updates ----------------------------------------------------------------------------------------------------------


def test_entropy_that_falls_to_nothing_at_a_middling_reward_is_a_collapse():
    symptom = only(run_of(12, lambda n: {"entropy": 1.0 if n <= 6 else 0.01}))
    assert (symptom.name, symptom.severity) == ("entropy collapse", "warning")
    assert symptom.text.startswith("the entropy fell from 1 to 0.01 nats a token")


def test_entropy_that_falls_while_all_is_right_is_none():
    sure = {"entropy": 0.01, "reward": 0.97, "at_high": 0.9, "at_low": 0.02}
    assert names(run_of(20, lambda n: {} if n <= 6 else sure)) == []


def test_a_kl_that_jumps_is_named_and_one_that_grows_is_not():
    assert names(run_of(20, lambda n: {"kl": 0.02 * n})) == []
    symptom = only(run_of(20, lambda n: {"kl": 4.0 if n == 15 else 0.05}))
    assert (symptom.name, symptom.step) == ("kl spike", 15)


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"clip_ratio": 0.4}, "40% of the tokens were outside the clip range of epsilon (0.2)"),
        ({"logp_difference": 0.5}, "sampler and trainer differ by 0.5 nats a token"),
        ({"importance_ratio": 0.3}, "the mean importance ratio is 0.3"),
    ],
)
def test_training_on_what_another_policy_sampled_is_named(metrics, said):
    symptom = only(run_of(8, lambda n: metrics))
    assert symptom.name == "off-policy drift" and said in symptom.text


def test_usual_clip_ratios_and_differences_of_rounding_are_none():
    assert names(run_of(20, lambda n: {"clip_ratio": 0.08, "logp_difference": 0.03, "importance_ratio": 0.97})) == []


def test_nan_stops_at_once():
    symptom = found(run_of(5, lambda n: {"nan": ["grad_norm", "weights"]} if n == 3 else {}))[0]
    assert (symptom.name, symptom.step, symptom.severity) == ("nan", 3, "stop")
    assert symptom.text == "grad_norm and weights became NaN or infinite at step 3"


def test_infinite_gradients_of_float16_are_skipped_steps_unless_there_is_nothing_else():
    rules = WatchRules({**SETTINGS, "fp16": True})
    assert names(run_of(9, lambda n: {"nan": ["grad_norm"]}), rules) == []
    assert names(run_of(10, lambda n: {"nan": ["grad_norm"]}), rules) == ["nan"]
    assert names(run_of(1, lambda n: {"nan": ["weights"]}), rules) == ["nan"]


@pytest.mark.parametrize("change", [{"entropy": 0.3}, {"entropy": 3.0}, {"grad_norm": 40.0}])
def test_first_steps_that_throw_the_policy_about_at_a_high_rate_are_named(change):
    steps = run_of(8, lambda n: {} if n <= 2 else {**change, "reward": 0.45})
    rules = WatchRules({**SETTINGS, "learning_rate": 3e-3})
    symptom = next(s for s in found(steps, rules) if s.name == "learning rate too high")
    assert "learning_rate is 0.003" in symptom.text and "LoRA Without Regret" in symptom.advice
    assert "learning rate too high" not in names(steps)  # at the usual rate it is something else


# --- what breaks ------------------------------------------------------------------------------------------------------


def test_a_reward_that_fails_is_named_with_its_share_and_error():
    calls = {"right": {"none": 0, "failed": 0.25, "nan": 8, "error": "ValueError: no number in 'x'"}}
    symptom = only(run_of(6, lambda n: {"calls": calls} if n >= 4 else {}))
    assert (symptom.name, symptom.step) == ("reward failures", 4)
    assert symptom.text == (
        "the reward right gave no sound score to 25% of the answers of step 4, 8 of them NaN: "
        "ValueError: no number in 'x'"
    )


def test_few_failures_are_named_only_where_they_go_on():
    some = {"calls": {"right": {"failed": 0.1}}}
    assert names(run_of(9, lambda n: some if n == 4 else {})) == []
    assert names(run_of(9, lambda n: some if n >= 4 else {})) == ["reward failures"]  # three of six: 0.05 on average


def test_all_answers_without_score_by_failures_are_told_as_failures():
    broken = {
        "calls": {"right": {"failed": 1.0}}, "reward": None, "rewards": {"right": None}, "answers": 0, "silent": 1.0,
        "low": None, "high": None,
    }  # fmt: skip
    assert names(run_of(12, lambda n: broken)) == ["reward failures"]


def test_failing_tools_are_named():
    assert names(run_of(8, lambda n: {"tool_calls": 1.5, "tool_failures": 0.5})) == ["tool failures"]
    assert names(run_of(8, lambda n: {"tool_calls": 0.0, "tool_failures": 0.5})) == []
    assert names(run_of(8, lambda n: {"faulty_calls": 0.6})) == ["tool failures"]


def test_prompts_that_do_not_fit_are_named_from_a_twentieth_on():
    facts = {"longest": 900, "limit": 512, "key": "max_prompt_length"}
    symptom = long_prompts(5, 100, **facts)
    assert symptom.name == "long prompts" and "5 of 100 training prompts (5%)" in symptom.text
    assert "max_prompt_length" in symptom.advice
    assert long_prompts(4, 100, **facts) is None and long_prompts(0, 0, **facts) is None


def test_what_to_lower_when_memory_runs_out_is_said_in_order_with_the_numbers():
    settings = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_completion_length": 256}
    symptom = out_of_memory(WatchRules(settings), step=3, said="CUDA out of memory. Tried to allocate 2 GiB\nmore")
    assert symptom.text == "the memory ran out after step 3: CUDA out of memory. Tried to allocate 2 GiB"
    assert symptom.advice == (
        "change one after the other until it fits: 1. per_device_train_batch_size 8 -> 4 with "
        "gradient_accumulation_steps 2 -> 4 (the same updates); 2. gradient_checkpointing -> true (slower); "
        "3. max_completion_length 256 -> 128; 4. num_generations 8 -> 4; 5. load_in_4bit -> true"
    )


def test_what_was_lowered_already_is_not_said_again():
    lowest = {
        "per_device_train_batch_size": 1, "gradient_checkpointing": True, "max_completion_length": 64,
        "num_generations": 4, "load_in_4bit": True,
    }  # fmt: skip
    assert what_to_lower(lowest) == ["max_completion_length 64 -> 32"]
    assert what_to_lower({**lowest, "fast_inference": True, "gpu_memory_utilization": 0.5})[0] == (
        "gpu_memory_utilization 0.5 -> 0.25 (the share of the GPU that vLLM takes)"
    )


# --- plateau ----------------------------------------------------------------------------------------------------------


def test_a_watched_reward_that_no_longer_rises_ends_the_run_after_patience():
    rules = WatchRules(SETTINGS, patience=100)
    gains = [0.0, 0.1, 0.2, 0.19, 0.2, 0.18, 0.19, 0.2, 0.1, 0.1]
    # means of three looks: 0.1 at step 50, 0.163 at 75, 0.197 at 100, and less from there on
    symptom = only([a_look(25 * place, gain) for place, gain in enumerate(gains)], rules)
    assert (symptom.name, symptom.step, symptom.severity) == ("plateau", 200, "stop")
    assert symptom.text == "the watched reward has not risen for 100 steps: 0.5 now, at best 0.6 at step 50"


def test_without_patience_nothing_ends_a_run_and_one_lucky_look_does_not():
    assert names([a_look(step, 0.1) for step in range(0, 500, 25)], WatchRules(SETTINGS, patience=0)) == []
    assert names([a_look(step, 0.1) for step in range(0, 500, 25)], WatchRules(SETTINGS, patience=100)) == ["plateau"]
    lucky = [a_look(n * 25, 0.2 if n == 1 else 0.02 * n) for n in range(12)]
    assert names(lucky, WatchRules(SETTINGS, patience=100)) == []


# --- healthy runs -----------------------------------------------------------------------------------------------------


def healthy(seed):
    """Steps and looks of a run that learns: binary rewards of groups whose chances differ by prompt and rise."""
    rng = random.Random(seed)
    groups, length, entropy = rng.choice([1, 2, 4, 8]), rng.uniform(30, 200), rng.uniform(0.3, 1.5)
    start, gain, of = rng.uniform(0.25, 0.45), rng.uniform(0.2, 0.35), rng.choice([60, 120, 200, 300])
    grow, beta = rng.uniform(0.7, 1.6), rng.choice([0.0, 0.04])
    base = [rng.gauss(0, 0.1) for _ in range(24)]
    first = None
    for n in range(of + 1):
        p = start + gain * n / of
        if n % 25 == 0:
            totals = [sum(rng.random() < p + b for _ in range(2)) / 2 for b in base]
            first = first or totals
            paired = [new - old for new, old in zip(totals, first, strict=True)]
            mean = sum(paired) / 24
            error = math.sqrt(sum((d - mean) ** 2 for d in paired) / 23 / 24)
            judge = rng.gauss(0.1 * n / of, 0.05)
            guarded = {"judge": {"now": 0.6 + judge, "difference": judge, "error": 0.05}}
            yield a_look(n, mean, error, total=sum(totals) / 24, guarded=guarded)
        if n == 0:
            continue
        scores, quiet = [], 0
        for _ in range(groups):
            chance = min(max(rng.gauss(p, 0.25), 0.02), 0.98)
            group = [float(rng.random() < chance) for _ in range(8)]
            scores += group
            quiet += len(set(group)) == 1
        size, mean = len(scores), sum(scores) / len(scores)
        noise = lambda spread: math.exp(rng.gauss(0, spread / math.sqrt(groups)))  # noqa: E731
        yield a_step(
            n, of=of, reward=mean, groups=groups, answers=size, silent=quiet / groups,
            frac_reward_zero_std=quiet / groups, low=min(scores), high=max(scores),
            at_low=scores.count(min(scores)) / size, at_high=scores.count(max(scores)) / size,
            entropy=entropy * (1 - 0.6 * n / of) * noise(0.25), grad_norm=0.05 * min(1 + n, 8) * noise(0.4),
            kl=beta and 0.3 * n / of * noise(0.3), mean_length=length * (1 + (grow - 1) * n / of) * noise(0.15),
            clipped=min(max(rng.gauss(0.15, 0.1 / math.sqrt(groups)), 0), 1), identical=max(rng.gauss(0.15, 0.1), 0),
            repetition=max(rng.gauss(0.08, 0.03), 0), length_pays=max(min(rng.gauss(0.2, 0.35), 1), -1),
            repetition_pays=max(min(rng.gauss(0, 0.35), 1), -1), rewards={"right": mean, "style": rng.gauss(0.5, 0.1)},
            clip_ratio=abs(rng.gauss(0.01, 0.02)),
        )  # fmt: skip


def test_two_hundred_healthy_runs_name_nothing():
    rules = WatchRules({**SETTINGS, "learning_rate": 5e-4}, patience=200, guards=frozenset({"style"}))
    named = {}
    for seed in range(200):
        for symptom in found(healthy(seed), rules):
            named.setdefault(symptom.name, []).append((seed, symptom.step, symptom.text))
    assert named == {}


# --- the numbers that it is told by -----------------------------------------------------------------------------------


def test_the_measures_of_a_step_are_counted_by_group():
    texts = ["a", "a", "b b b b", "c", "d", "e"]
    got = measure(texts, [1.0, 1.0, 1.0, 0.0, 0.5, None], 3)
    assert (got["groups"], got["answers"]) == (2, 5)
    assert got["silent"] == 0.5  # the first group has equal scores
    assert (got["low"], got["at_low"]) == (0.0, 0.2) and (got["high"], got["at_high"]) == (1.0, 0.6)
    assert got["identical"] == pytest.approx(2 / 6)
    # "b b b b" repeats its word in 3 of 3 places, the others have one word
    assert got["repetition"] == pytest.approx(1 / 6)


def test_what_is_paid_is_the_correlation_within_groups():
    # lengths less their group's mean: -1, 1, -1, 1; scores: -0.5, 0.5, -0.5, 0.5, though the groups differ
    got = measure(["ab", "abcd", "a" * 10, "a" * 12], [0.0, 1.0, 5.0, 6.0], 2)
    assert got["length_pays"] == pytest.approx(1.0)
    assert measure(["ab", "cd"], [0.0, 1.0], 2)["length_pays"] is None


def test_answers_without_any_score_have_no_lowest():
    got = measure(["a", "b"], [None, None], 2)
    assert (got["silent"], got["answers"], got["low"], got["at_high"]) == (1.0, 0, None, None)


def test_the_text_of_messages_is_their_contents():
    assert text_of([{"role": "assistant", "content": "Hi"}, {"role": "tool", "content": None}]) == "Hi\n"
    assert text_of("plain") == "plain"
