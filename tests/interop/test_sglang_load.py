"""How many nodes a tree in SGLang gets: the chooser measures what steps cost and gain, on clocks made for the test."""

from collections import Counter

import pytest

from redrafter.interop import load
from redrafter.interop.sglang.clock import StepClock


def run(cost, tokens, rows: int, steps: int = 400, chooser=None) -> list[int]:
    """Sizes chosen on a machine where a step costs `cost(rows, width)` and gives `tokens(width)` tokens."""
    chooser, now, chosen = chooser or load.Chooser(load.ladder(64)), 0.0, []
    chooser.interrupted()
    for _ in range(steps):
        size = chooser.choose(rows)
        width = chooser.widths[size]
        chooser.began(rows, size, now)
        now += cost(rows, width)
        chooser.accepted(size, tokens(width))
        chosen.append(width)
    return chosen[-50:]


def test_one_request_gets_the_largest_tree_and_many_get_none():
    def cost(rows, width):
        return max(5.0, 0.05 * rows * width)  # a step is free up to 100 tokens

    def tokens(width):
        return 1 + 0.3 * (width.bit_length() - 1)

    assert set(run(cost, tokens, 1)) == {64}
    assert max(run(cost, tokens, 16)) < 16
    assert set(run(lambda rows, width: rows * width, tokens, 16)) == {1}


def test_a_new_load_needs_no_trial_of_every_size():
    """Times as measured on an H200 at 7B cost: after one load, the next begins near its best size."""

    def cost(rows, width):
        return 4.2 + 0.0177 * rows * width + (0.4 if width > 1 else 0)

    def tokens(width):
        return 1 + 0.55 * (width.bit_length() - 1)

    def rate(rows, width):
        return tokens(width) / cost(rows, width)

    chooser = load.Chooser(load.ladder(64))
    for rows in (1, 8, 2, 32, 16, 4):
        chosen = run(cost, tokens, rows, 40, chooser)
        best = max(rate(rows, w) for w in load.ladder(64) if load.bucket(rows) * w <= chooser.most_tokens)
        assert all(rate(rows, width) > 0.65 * best for width in chosen), rows


def test_a_wrong_prediction_is_corrected():
    """A machine that computes slowly: each token costs as much as reading the weights."""
    chosen = run(lambda rows, width: 1.0 + rows * width, lambda width: 1 + 0.5 * (width.bit_length() - 1), 4, 80)
    assert set(chosen) == {1}


def test_a_trial_that_cannot_be_measured_ends():
    """Prompts interrupt every second step, so the sizes next to the best one never get a time."""
    chooser = load.Chooser([8, 4, 1])
    for now in range(load.SETTLED + load.TRIED):
        chooser.began(4, 1, now)
        for size in (0, 1):
            chooser.accepted(size, 3.0)
    chosen = []
    for step in range(200):
        if step % 2:
            chooser.interrupted()
        chosen.append(chooser.choose(4))
        chooser.began(4, chosen[-1], 1000.0 + step)
    assert {0, 2} < set(chosen[:100]), "both neighbours are tried"
    assert set(chosen[100:]) == {1}


def test_never_more_tokens_than_were_recorded():
    chooser = load.Chooser([8, 4, 1], most_tokens=64)
    chooser.most_rows = [2, 4, None]
    assert chooser.usable(2) == [0, 1, 2]
    assert chooser.usable(3) == [1, 2]
    assert chooser.usable(100) == [2]
    chooser = load.Chooser([8, 4, 1], most_tokens=16)
    assert chooser.usable(2) == [0, 1, 2]
    assert chooser.usable(3) == [1, 2]


@pytest.mark.parametrize("better", [8, 32])
def test_sizes_next_to_the_best_are_tried_again(better):
    """What they cost may change while nobody looks."""
    cheap = {16}
    chooser = load.Chooser([32, 16, 8])

    def chosen(steps: int) -> list[int]:
        return run(lambda rows, width: 1.0 if width in cheap else 10.0, lambda width: 2.0, 1, steps, chooser)

    assert set(chosen(200)) == {16}
    cheap.add(better)
    chooser.guessed[chooser.widths.index(better)] += 1
    assert set(chosen(2 * load.AGAIN)) == {better}


def test_sizes_at_the_other_end_are_not_tried_again():
    """The largest tree is best: it has one neighbour."""
    chooser, chosen = load.Chooser([32, 16, 8]), Counter()
    for _ in range(2 * load.AGAIN):
        size = chooser.choose(1)
        chooser.took(1, size, 1.0)
        chooser.accepted(size, 5.0 - size)
        chosen[chooser.widths[size]] += 1
    assert chosen.keys() == {32, 16}
    assert chosen[16] < 2 * (load.TRIED + load.SETTLED) + load.TRIED


def test_what_a_step_costs_and_gives_now_counts():
    """After hundreds of steps, a slower machine or a harder text is noticed within a hundred."""
    for change in ({"cost": 9.0}, {"gives": 1.1}):
        now = {"cost": 2.0, "gives": 3.0}
        chooser = load.Chooser([8, 1])

        def chosen(steps: int, now=now, chooser=chooser) -> list[int]:
            return run(
                lambda rows, width: now["cost"] if width > 1 else 1.0,
                lambda width: now["gives"] if width > 1 else 1.0,
                1,
                steps,
                chooser,
            )

        assert set(chosen(2 * load.AGAIN - 100)) == {8}
        now.update(change)
        assert set(chosen(150)) == {1}, change


def test_a_time_is_that_of_its_own_kind():
    """The host begins a step while the step before, maybe of another kind, still runs."""
    chooser, now, before = load.Chooser([8, 1]), 0.0, 0
    for size in [0] * 5 + [1] * 5 + [0] * 5:
        chooser.began(1, size, now)
        now += (5.0, 1.0)[before]
        before = size
    assert {size: set(t) for (_, size), t in chooser.times.items()} == {0: {5.0}, 1: {1.0}}


def test_a_prompt_between_two_steps_is_not_counted():
    chooser = load.Chooser([4])
    for now in (0, 1, 2, 3, 4):
        chooser.began(1, 0, now)
        chooser.interrupted()
    assert not chooser.times


class Moments:
    """A device that ends what it was given only when it is told to."""

    def __init__(self) -> None:
        self.now, self.passed_until = 0.0, -1.0

    def __call__(self) -> "Moment":
        return Moment(self, self.now)


class Moment:
    def __init__(self, device: Moments, at: float) -> None:
        self.device, self.at = device, at

    def passed(self) -> bool:
        return self.at <= self.device.passed_until

    def since(self, earlier: "Moment") -> float:
        return self.at - earlier.at


def test_steps_between_prompts_are_timed():
    """A prompt before every step: each step counts, without the prompt's time."""
    device = Moments()
    clock, found = StepClock(device), []
    for step in range(5):
        clock.interrupted()
        device.now += 100  # the prompt
        clock.began(3, step % 2)
        device.now += 7 + step % 2
        clock.ended()
        device.passed_until = device.now - 1  # the step itself has not ended on the device
        found += clock.times()
    assert found == [(3, step % 2, 7 + step % 2) for step in range(4)]


def test_steps_in_a_row_last_from_end_to_end():
    """The time in which the device waits for the host is the step's too."""
    device = Moments()
    clock = StepClock(device)
    for _ in range(3):
        device.now += 2  # the host
        clock.began(1, 0)
        device.now += 5
        clock.ended()
    device.passed_until = device.now
    assert [seconds for *_, seconds in clock.times()] == [5, 7, 7]
    assert list(clock.times()) == []


def test_sizes_are_found_although_every_step_follows_a_prompt():
    """A slow machine, on which plain decoding is best with 32 requests; the twin times on the host and never learns."""

    def cost(width):
        return 1 + 0.03 * 32 * width

    def run(timed: bool) -> list[int]:
        chooser, chosen, now = load.Chooser(load.ladder(64)), [], 0.0
        for _ in range(150):
            chooser.interrupted()
            size = chooser.choose(32)
            width = chooser.widths[size]
            now += cost(width)
            if timed:
                chooser.took(32, size, cost(width))
            else:
                chooser.began(32, size, now)
            chooser.accepted(size, 1 + 0.55 * (width.bit_length() - 1))
            chosen.append(width)
        return chosen[-50:]

    best = max(load.ladder(64), key=lambda w: (1 + 0.55 * (w.bit_length() - 1)) / cost(w))
    assert best == 1
    assert set(run(timed=True)) == {best}
    assert best not in run(timed=False)
