"""Right answers in words, numbers and formulas, with the values worked out by hand."""

import threading
import time
from fractions import Fraction

import pytest

from praison_agent_rl.errors import RewardError
from praison_agent_rl.reward_library import accuracy, contains, exact, fuzzy, math_equal, mathematics, numeric
from praison_agent_rl.reward_library.quantities import amounts
from praison_agent_rl.reward_library.reading import final_answer


@pytest.mark.parametrize(
    ("text", "piece", "marked"),
    [
        ("Paris", "Paris", False),
        ("<answer>Rome</answer> no: <answer>\nParis </answer> !", "Paris", True),
        ('<ANSWER id="1">Paris</ANSWER>', "Paris", True),
        ("<answer>Paris", "Paris", True),  # cut off
        ("<answer></answer>", "", True),
        (r"So \boxed{1} or \boxed{\frac{1}{2}}.", r"\frac{1}{2}", True),
        (r"<answer>\boxed{4}</answer>", "4", True),
        (r"\boxed{4", "4", True),
        ("2+2\n#### 4", "4", True),
        ("so it is #### 4\n\n", "4", True),
        ("#### First step\nWe add.", "#### First step\nWe add.", False),  # a heading
        ("<think>Rome? <answer>Rome</answer></think>Paris", "Paris", False),
        ("Rome?</think>Paris", "Paris", False),  # the prompt opened the reasoning
        ("<think>Rome?", "", False),  # no answer yet
        ("<answers>Rome</answers>", "<answers>Rome</answers>", False),
    ],
)
def test_the_answer_is_read_where_it_is_marked(text, piece, marked):
    assert final_answer(text) == (piece, marked)


@pytest.mark.parametrize(
    ("given", "right", "expected"),
    [
        ("paris.", "Paris", 1.0),
        ("  “Paris” ", "Paris", 1.0),
        ("**Paris**", "Paris", 1.0),
        ("New\n York", "new york", 1.0),
        ("It's", "It’s", 1.0),
        ("Straße", "STRASSE", 1.0),
        ("Paris, France", "Paris", 0.0),
        ("Parisian", "Paris", 0.0),
        ("-2", "2", 0.0),
        (".5", "5", 0.0),
        ("C++", "C", 0.0),
        ("C#", "C", 0.0),
        ("...", "...", 1.0),
        ("", "Paris", 0.0),
        (r"\boxed{\text{Paris}}", "Paris", 1.0),
        ("true", True, 1.0),
        ("Cafe", "Café", 0.0),
        ("Cafe\u0301", "Café", 1.0),  # another way to write the same letter
        ("東京。", "東京。", 1.0),
    ],
)
def test_exact_takes_marks_around_and_letter_case_for_nothing(given, right, expected):
    assert exact([given], [right]) == [expected]


def test_exact_can_mind_letter_case_and_read_another_tag():
    assert exact(["paris", "Paris"], ["Paris"] * 2, case=True) == [0.0, 1.0]
    assert exact(["<result>Paris</result>"], ["Paris"], tag="result") == [1.0]


@pytest.mark.parametrize(
    ("given", "right", "expected"),
    [
        ("The capital is Paris!", "paris", 1.0),
        ("Comparison", "Paris", 0.0),
        ("2.5 and -5, 1,500 or 5,3", 5, 0.0),
        ("It is 5.", 5, 1.0),
        ("5-5", "5", 1.0),
        ("x=-5", "-5", 1.0),
        ("10-5", "5", 1.0),
        ("答案是巴黎。", "巴黎", 1.0),
        ("New  York City", "new york", 1.0),
        ("<think>Paris</think>Rome", "Paris", 0.0),
        ("Paris. <answer>Rome</answer>", "Paris", 0.0),
        ("C++ it is", "C++", 1.0),
        ("a_b", "a", 0.0),
        ("", "a", 0.0),
    ],
)
def test_contains_wants_whole_words_and_whole_numbers(given, right, expected):
    assert contains([given], [right]) == [expected]


def test_contains_pays_for_any_accepted_answer_or_for_the_share_of_them():
    given, right = ["red and blue", "green"], [["red", "blue", "green", "white"]] * 2
    assert contains(given, right) == [1.0, 1.0]
    assert contains(given, right, every=True) == [0.5, 0.25]


def test_fuzzy_is_twice_the_common_letters_by_all_letters_for_the_closest_answer():
    # "pariss" and "paris": 11 letters, 1 to delete: 1 - 1/11
    assert fuzzy(["Pariss"], [["Rome", "Paris"]]) == [pytest.approx(10 / 11)]
    assert fuzzy(["Pariss"], ["Paris"], least=0.95) == [0.0]
    assert fuzzy(["york new"], ["New York"], method="token_sort_ratio") == [1.0]
    assert fuzzy(["I say Paris now"], ["Paris"], method="partial_ratio") == [1.0]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,234.50", [1234.5]),
        ("1.234,50", [1234.5]),
        ("1.234", [1.234]),
        ("1,234", [1234]),
        ("0,125", [0.125]),
        ("3,5", [3.5]),
        ("1,2,3", [1, 2, 3]),
        ("1.000.000", [1000000]),
        ("1 234 567,5", [1234567.5]),
        ("1\u202f234", [1234]),
        ("1'234.5", [1234.5]),
        ("1e3", [1000]),
        ("-1.5E-3", [-0.0015]),
        ("2.5 x 10^3", [2500]),
        (r"$2.5 \times 10^{-3}$", [0.0025]),
        ("10⁻³", [0.001]),
        ("2^10", [1024]),
        ("3/4", [0.75]),
        ("1 1/2", [1.5]),
        ("2½", [2.5]),
        (r"\frac{3}{4}", [0.75]),
        (r"-\dfrac34", [-0.75]),
        ("-2", [-2]),
        ("−2", [-2]),
        ("+2", [2]),
        ("(-2)", [-2]),
        ("5-3", [5, 3]),
        ("10–20", [10, 20]),
        (".5", [0.5]),
        ("5.", [5]),
        ("1{,}234", [1234]),
        ("3 million", [3000000]),
        ("**42**", [42]),
        ("1.2.3", []),
        ("192.168.0.1", []),
        ("x2 H2O", []),
        ("1e5000", []),
        ("12e5000", []),
        ("9^999999", []),
        ("99**9999", []),
        ("0^-1", []),
        ("1/0", []),
        ("m^2 m^{-2} m²", []),
        ("1" * 500, []),
        ("", []),
        ("minus two", []),
    ],
)
def test_numbers_are_read_as_people_write_them(text, values):
    assert [float(one.value) for one in amounts(text)] == pytest.approx(values)


def test_a_decimal_comma_can_be_said_to_be_one():
    assert [one.value for one in amounts("1.234 and 1,234", decimal=",")] == [1234, Fraction(1234, 1000)]


@pytest.mark.parametrize(
    ("given", "right", "expected"),
    [
        ("The answer is 42.", 42, 1.0),
        ("The answer is 42, since 6*7 is it and 6 < 7.", 42, 1.0),
        ("6*7 = 42", 42, 1.0),
        ("#### 1,234", "1234", 1.0),
        ("no idea", 42, 0.0),
        ("1 2 3 42 43", 42, 0.0),  # a list of guesses: the last one counts
        ("1234567", 1234568, 0.0),
        ("0.30000000000000004", 0.3, 1.0),
        ("-2", 2, 0.0),
        ("0", 0, 1.0),
        ("0.0000001", 0, 0.0),
        ("0.75", "75%", 1.0),
        ("75", "75%", 1.0),
        ("75 %", "0.75", 1.0),
        ("75%", 75, 1.0),
        ("7.5%", "75%", 0.0),
        ("3/4", "75 percent", 1.0),
        ("1500 m", "1.5 km", 1.0),
        ("1500", "1.5 km", 0.0),
        ("1.5", "1.5 km", 1.0),
        ("1.5 kg", "1.5 km", 0.0),
        ("1.5 km", 1.5, 1.0),
        ("90 minutes", "1.5 hours", 1.0),
        ("36 km/h", "10 m/s", 1.0),
        ("50 °F", "10 °C", 1.0),
        ("2 m²", "20000 cm^2", 1.0),
        ("$5", "5 dollars", 1.0),
        ("5 €", "$5", 0.0),
        ("5 pounds", "£5", 1.0),
        ("3 apples", "3 pears", 1.0),  # no units: words around
        ("12 in", "1 ft", 1.0),
        ("5 in all", "5 km", 1.0),  # no inch
        (r"$5$ km", "5 km", 1.0),
        (r"\boxed{5\text{ km}}", "5000 m", 1.0),
        ("75%", "75 km", 0.0),
        ("5", ["4", "5"], 1.0),
        ("It took 3 days in 2024. Answer: 3", 3, 1.0),
    ],
)
def test_numbers_are_equal_whatever_they_are_written_in(given, right, expected):
    assert numeric([given], [right]) == [expected]


def test_a_right_answer_that_is_no_number_gives_no_score():
    assert numeric(["5", "5"], ["Paris", ["Paris", "5"]]) == [None, 1.0]


def test_the_tolerance_is_a_share_of_the_right_number():
    assert numeric(["3.14"], [3.14159]) == [0.0]
    assert numeric(["3.14", "3.1"], [3.14159] * 2, tolerance=0.001) == [1.0, 0.0]
    assert numeric(["99", "98.9"], [100, 100], tolerance=0.01) == [1.0, 0.0]


def test_a_unit_can_be_required():
    given = ["1.5", "1.5 km", "1500 m", "75", "75%", "0.75"]
    right = ["1.5 km"] * 3 + ["75%"] * 3
    assert numeric(given, right, units="required") == [0.0, 1.0, 1.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("given", "right", "expected"),
    [
        (r"\boxed{\frac12}", "0.5", 1.0),
        ("The answer is $1 + x^2$", "x^2+1", 1.0),
        ("<answer>(a+b)^2</answer>", "a^2+2ab+b^2", 1.0),
        (r"It is \boxed{2\sqrt{2}}.", r"\sqrt{8}", 1.0),
        (r"$\{2, 1\}$", r"$\{1, 2\}$", 1.0),
        ("3 apples", 3, 1.0),
        ("$x^3$", "x^2", 0.0),
        ("", "4", 0.0),
        ("4", "Paris", None),
        ("$((((", "4", 0.0),
    ],
)
def test_formulas_are_equal_by_math_verify(given, right, expected):
    assert math_equal([given], [right]) == [expected]


def test_a_formula_that_cannot_be_calculated_costs_its_seconds_and_the_next_is_compared_again():
    texts = ["$9^{9^{9^9}}$", "$4$"]
    assert math_equal(texts, ["4", "4"], seconds=2) == [0.0, 1.0]


def test_formulas_are_compared_off_the_main_thread_too():
    found = []

    def compare(reward):
        found.append(reward([r"\boxed{4}"] * 3, ["4", "5", "4"]))

    threads = [threading.Thread(target=compare, args=(reward,)) for reward in (math_equal, accuracy)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[1.0, 0.0, 1.0]] * 2


def test_the_process_for_formulas_is_started_again_after_it_was_ended():
    process = mathematics.MathProcess()
    request = {"what": "math_equal", "given": {"text": "4", "marked": False}, "right": ["4"], "seconds": 30}
    assert process.ask(request) == 1.0
    first = process._process
    first.kill()
    first.wait()
    assert process.ask(request) == 1.0 and process._process is not first
    process.close()
    assert process._process is None


def test_a_process_for_formulas_that_cannot_start_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(mathematics, "__file__", str(tmp_path / "mathematics.py"))
    with pytest.raises(RewardError, match="the process that compares formulas did not start"):
        mathematics.MathProcess().ask({})


def test_a_damaged_math_verify_is_told_and_not_scored(monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise OSError('no disk')")
    monkeypatch.syspath_prepend(tmp_path)
    process = mathematics.MathProcess()
    with pytest.raises(RewardError, match="the process that compares formulas failed: OSError: no disk"):
        process.ask({"what": "math_equal", "given": {"text": "4", "marked": False}, "right": ["4"], "seconds": 30})
    process.close()


def test_accuracy_reads_latex_only_as_trl_does():
    assert accuracy([r"\boxed{0.5}", "The final answer is $0.5$.", "0.5"], [r"\frac{1}{2}"] * 3) == [1.0, 1.0, 0.0]
    assert accuracy([r"\boxed{4}", r"\boxed{4}"], ["Paris", ["5", "4"]]) == [None, 1.0]


@pytest.mark.parametrize("reward", [exact, contains, fuzzy, numeric])
@pytest.mark.parametrize("piece", ["1", "1,", "111,", "<answer>", "<answer ", "\\boxed{", "(-", "9^", "Paris ", "$1$"])
def test_a_huge_text_takes_no_time_that_grows_out_of_bounds(reward, piece):
    """Twice the text takes about twice the time, not four times; a text of 100,000 letters well under seconds."""
    started = time.process_time()
    assert reward([piece * (100_000 // len(piece))], ["Paris"])[0] in (0.0, 1.0, None) or reward is fuzzy
    assert time.process_time() - started < 10


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("1.5 Million", 1_500_000, 1.0),
        ("5 BILLION", 5 * 10**9, 1.0),
        ("$5M", 5_000_000, 1.0),
        ("$5M", 5, 0.0),
        ("€1.2bn", 1_200_000_000, 1.0),
        ("5k", 5000, 1.0),
        ("5 K", "5 kelvin", 1.0),  # a unit, and no thousand
        ("5m", "5 meters", 1.0),
        ("5t", "5 t", 1.0),
        ("EUR 1.234,50", "€1234.5", 1.0),
        ("EUR 5", "$5", 0.0),
        ("£5", "5 pounds", 1.0),
        ("minus 5", -5, 1.0),
        ("minus 5", 5, 0.0),
        ("10 minus 5", 5, 1.0),
        ("negative $5", -5, 1.0),
        (r"\sqrt{16}", 16, 0.0),
        (r"2\sqrt{3}", 2, 0.0),
        (r"\sqrt[3]{8}", 8, 0.0),
        ("2√3", 2, 0.0),
        ("2π", 2, 0.0),
        ("2", "2π", None),
        ("25π = 78.5", 78.5, 1.0),
        ("It is 42 km [1].", "42 km", 1.0),
        ("42 [1, 3]", 42, 1.0),
        ("Question 3 is [42]", 42, 1.0),
        ("[42]", 42, 1.0),
        ("The answer is not 42 but 43.", 43, 1.0),
        ("The answer is not 42 but 43.", 42, 0.0),
        ("The answer is not 42.", 42, 0.0),
        ("**Answer**: 42, found in 3 steps", 42, 1.0),
    ],
)
def test_numbers_as_agents_write_them_are_what_they_mean(text, answer, score):
    assert numeric([text], [answer]) == [score]


@pytest.mark.parametrize(
    ("reward", "text", "answer", "score"),
    [
        (exact, "10²", "102", 0.0),
        (exact, "10²", "10^2", 1.0),
        (exact, "H₂O", "H2O", 1.0),
        (exact, "Par\u200bis", "Paris", 1.0),
        (contains, "10² m", "102", 0.0),
        (contains, "I use C++ and C#.", "C", 0.0),
        (contains, "C, not C++", "C", 1.0),
        (contains, "in İstanbul", "istanbul", 1.0),
        (math_equal, r"\boxed{\$5}", "5", 1.0),
    ],
)
def test_marks_that_change_a_word_count_and_unseen_ones_do_not(reward, text, answer, score):
    assert reward([text], [answer]) == [score]


@pytest.mark.parametrize("method", ["ratio", "partial_ratio", "token_sort_ratio", "token_set_ratio"])
def test_a_letter_or_a_word_of_the_answer_is_not_the_answer(method):
    answers = ["Paris", "the capital of France"]
    assert all(score < 0.5 for score in fuzzy(["P", "the"], answers, method=method))
    assert fuzzy(answers, answers, method=method) == [1.0, 1.0]
