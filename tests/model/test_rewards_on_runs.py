"""In TRL's trainer a reward is given the run of each completion of the batch in work, or one that is made of it."""

import pytest

from praison_agent_rl.records import Call, Run
from praison_agent_rl.rewards import Reward
from tests.model.test_grpo import planned, rows_of, trainer_for

pytestmark = pytest.mark.usefixtures("one_thread")


def each_call(completions, run, final_answer):
    return [[one.seconds + len(said) for _ in one.calls] for one, said in zip(run, final_answer, strict=True)]


def a_run(seconds, *replies):
    messages = [{"role": "assistant", "content": text} for text in replies]
    calls = [Call(id=str(place), time=1.0, messages=[], reply=message) for place, message in enumerate(messages)]
    return Run(id="r", time=1.0, seconds=seconds, calls=calls)


def test_a_reward_is_given_the_runs_of_the_batch_in_work_and_its_steps_are_kept(tiny_model, in_tmp):
    run = planned(in_tmp / "run", tiny_model, max_steps=1)
    trainer = trainer_for(run, tiny_model, rewards=[Reward(each_call, "each_call")])
    rows = rows_of(["one", "two"])
    given = (rows, [row["prompt"] for row in rows], [[{"role": "assistant", "content": "abc"}]] * 2, [[1], [2]])
    assert trainer._calculate_rewards(*given).tolist() == [[3.0], [3.0]]
    trainer.runs = [a_run(2.0, "first", "x"), a_run(3.0, "second", "yy", "zzzz")]
    assert trainer._calculate_rewards(*given).tolist() == [[6.0], [21.0]]
    assert trainer.caller.steps() == {"each_call": [[3.0, 3.0], [7.0, 7.0, 7.0]]}
    trainer.runs = None
    assert trainer._calculate_rewards(*given).tolist() == [[3.0], [3.0]]
