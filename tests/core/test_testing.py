"""The test kit finds what is wrong with a result, and drives a backend as the scheduler would."""

from dataclasses import replace

import numpy as np
import pytest

from slotline.config import EngineConfig
from slotline.model import Model
from slotline.plan import FEEDBACK, LogprobColumns, Status
from slotline.testing import Conformance, StepDriver, Work, check_result
from slotline.testing.sim import SimBackend, sim_answer

VOCAB = 50


@pytest.fixture
def driver():
    backend = SimBackend(depth=2, vocab_size=VOCAB)
    model = Model(name="sim", tokenizer=None, vocab_size=VOCAB, context_length=256)
    made = StepDriver(backend, backend.load(EngineConfig.of("sim", block_size=4), model))
    yield made
    backend.close()


# The driver


def test_driver_keeps_the_books(driver):
    driver.admit(0, [1, 2, 3, 4, 5], seed=9)
    assert driver.decode(0, 6) == sim_answer([1, 2, 3, 4, 5], 9, 6, VOCAB)


def test_driver_gives_blocks_back(driver):
    for _ in range(500):  # more than the pool could hold at once
        driver.admit(1, list(range(12)))
        driver.decode(1, 1)
        driver.end(1)


def test_driver_feeds_back_what_it_was_not_told(driver):
    driver.admit(0, [1, 2, 3])
    token = driver.decode(0, 1)[0]
    driver.tell(0, token)
    plan, _ = driver.launch(Work(0, 1))
    assert plan.token_ids.tolist() == [token]
    plan, _ = driver.launch(Work(0, 1))
    assert plan.token_ids.tolist() == [FEEDBACK]


def test_driver_continues_a_preempted_row(driver):
    expected = sim_answer([1, 2], 3, 5, VOCAB)
    driver.admit(0, [1, 2], output=expected[:3], seed=3)
    assert driver.setups[0].prompt_len == 2
    assert driver.decode(0, 2) == expected[3:]


@pytest.mark.parametrize("waits", [(True, False), (False, True, True), (True, True, False)])
def test_driver_asks_again_where_a_row_waits(driver, waits):
    expected = sim_answer([1, 2, 3, 4, 5], 9, 6, VOCAB)
    driver.backend.waits = waits
    driver.admit(0, [1, 2, 3, 4, 5], seed=9)
    assert driver.decode(0, 6) == expected
    driver.end(0)
    driver.admit(0, [1, 2, 3, 4, 5], seed=9)
    launched, got = [driver.launch(Work(0, 5))], []
    while len(got) < 6:  # two in flight: what goes on from a token that did not come is void
        launched.append(driver.launch(Work(0, 1)))
        result = driver.fetch(launched.pop(0))
        got += result.tokens[0, : result.n_tokens[0]].tolist()
    assert got == expected


# What check_result finds


@pytest.fixture
def step(driver):
    """A plan of three rows, one of which does not sample, with a good result and the rows' set-ups."""
    for row in (0, 1, 2):
        driver.admit(row, [row + 1] * 4, stop_ids=[VOCAB - 1])
    plan, handle = driver.launch(Work(2, 4), Work(0, 2, sample=False), Work(1, 4))
    tokens = np.array([[7], [0], [VOCAB - 1]], np.int32)
    status = np.array([Status.OK, Status.OK, Status.STOP], np.int8)
    return plan, replace(handle.result(), tokens=tokens, status=status), [driver.setups[row] for row in (2, 0, 1)]


def test_a_good_result_passes(step):
    check_result(*step, VOCAB)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_id": 9}, "step_id"),
        ({"rows": ints(0, 1, 2)}, "plan's order"),
        ({"epoch": np.array([1, 2, 3])}, "epochs"),
        ({"tokens": ints(7, 0, 49)}, "not \\[R, T\\]"),
        ({"n_tokens": ints(1, 0)}, "not \\[R\\]"),
        ({"n_tokens": ints(2, 0, 1)}, "n_tokens is 2"),
        ({"n_tokens": ints(1, 1, 1)}, "does not sample"),
        ({"n_tokens": ints(0, 0, 1)}, "status OK has no token"),
        ({"status": ints(Status.DEAD, 0, Status.STOP)}, "status DEAD has tokens"),
        ({"status": ints(Status.WAIT, 0, Status.STOP)}, "status WAIT has tokens"),
        ({"status": ints(0, Status.WAIT, Status.STOP)}, "has nothing to wait for"),
        ({"status": ints(Status.OK, 0, Status.OK)}, "the last token is 49, the status OK"),
        ({"status": ints(Status.STOP, 0, Status.STOP)}, "the last token is 7, the status STOP"),
        ({"tokens": ints(50, 0, 49)[:, None]}, "outside the vocabulary"),
        ({"logprobs": LogprobColumns.empty(3)}, "one position per valid token"),
        ({"prompt_counts": ints(0, 0, 0)}, "no prompt_logprobs"),
        ({"prompt_counts": ints(1, 0, 0), "prompt_logprobs": LogprobColumns.empty(2)}, "one position per count"),
        ({"prompt_counts": ints(3, 0, 0), "prompt_logprobs": LogprobColumns.empty(3)}, "did not ask"),
    ],
)
def test_a_bad_result_is_found(step, change, message):
    plan, result, setups = step
    with pytest.raises(AssertionError, match=message):
        check_result(plan, replace(result, **change), setups, VOCAB)


def table(*positions: tuple[list[int], list[float], list[int]]) -> LogprobColumns:
    parts = [
        LogprobColumns(ints(0, len(ids)), ints(*ids), np.array(values, np.float32), ints(*ranks))
        for ids, values, ranks in positions
    ]
    return LogprobColumns.concat(parts)


GOOD = ([7, 3, 4], [-2.0, -0.5, -1.0], [5, 1, 2])
NONE = ([], [], [])


@pytest.mark.parametrize(
    ("position", "message"),
    [
        (GOOD, None),
        (([7, 3], [-0.5, -1.0], [1, 2]), None),
        (NONE, "first entry is not the token 7"),
        (([3, 7], [-0.5, -1.0], [1, 2]), "first entry is not the token 7"),
        (([7, 3, 4, 5], [-3.0, -0.5, -1.0, -1.5], [9, 1, 2, 3]), "4 entries where 2"),
        (([7, 3, 3], [-2.0, -0.5, -0.5], [5, 1, 1]), "listed twice"),
        (([7, 3, 50], [-2.0, -0.5, -1.0], [5, 1, 2]), "outside the vocabulary"),
        (([7, 3, 4], [-2.0, -0.5, -np.inf], [5, 1, 2]), "no logarithm"),
        (([7, 3, 4], [0.5, -0.5, -1.0], [5, 1, 2]), "no logarithm"),
        (([7, 3, 4], [-2.0, -1.0, -0.5], [5, 1, 2]), "falling order"),
        (([7, 3, 4], [-2.0, -0.5, -1.0], [5, 2, 1]), "rising order"),
        (([7, 3, 4], [-2.0, -0.5, -1.0], [0, 1, 2]), "rising order"),
        (([7, 3, 4], [-2.0, -0.5, -1.0], [5, 3, 4]), "most likely candidate is missing"),
    ],
)
def test_logprobs_are_checked(step, position, message):
    plan, result, setups = step
    setups = [replace(setups[0], logprobs=2), *setups[1:]]
    changed = replace(result, logprobs=table(position, NONE))
    if message is None:
        check_result(plan, changed, setups, VOCAB)
        return
    with pytest.raises(AssertionError, match=message):
        check_result(plan, changed, setups, VOCAB)


def test_missing_and_unasked_logprobs_are_found(step):
    plan, result, setups = step
    asking = [replace(setups[0], logprobs=2), *setups[1:]]
    with pytest.raises(AssertionError, match=r"rows \[0\] asked for logprobs"):
        check_result(plan, result, asking, VOCAB)
    unasked = replace(result, logprobs=table(GOOD, ([49], [-1.0], [1])))
    with pytest.raises(AssertionError, match="did not ask has logprobs"):
        check_result(plan, unasked, asking, VOCAB)


@pytest.mark.parametrize(("counts", "found"), [((3, 0, 0), None), ((2, 0, 0), "2 prompt positions")])
def test_prompt_logprobs_are_checked(step, counts, found):
    plan, result, setups = step
    asking = [replace(setups[0], prompt_logprobs=0), *setups[1:]]
    columns = table(*[([3], [-1.0], [1])] * sum(counts))
    changed = replace(result, prompt_counts=ints(*counts), prompt_logprobs=columns)
    if found is None:
        check_result(plan, changed, asking, VOCAB)
        return
    with pytest.raises(AssertionError, match=found):
        check_result(plan, changed, asking, VOCAB)


# The class line


def test_settings_stand_on_the_class_line_or_in_the_body():
    class OnTheLine(Conformance, backend="one", max_slots=2):
        pass

    class InTheBody(Conformance):
        backend = "two"

    class Derived(OnTheLine, max_model_len=99):
        pass

    assert OnTheLine().config("m").max_slots == 2 and OnTheLine.backend == "one"
    assert InTheBody().config("m").backend == "two"
    assert Derived().config("m", max_slots=3) == Derived().config("m").with_options(max_slots=3)
    assert Derived().config("m").max_model_len == 99 and OnTheLine().config("m").max_model_len is None
