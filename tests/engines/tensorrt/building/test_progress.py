import io

from hypothesis import given
from hypothesis import strategies as st

from engines.tensorrt.building.progress import BuildWatch, Printer, Step, Tracker


def test_an_inner_phase_is_a_part_of_one_step_of_the_phase_around_it() -> None:
    tracker = Tracker()
    tracker.start("outer", 4)
    assert tracker.step("outer", 0) == Step("outer", 0.25)
    tracker.start("inner", 2)
    assert tracker.step("inner", 0) == Step("inner", 0.375)
    tracker.finish("inner")
    assert tracker.step("outer", 1) == Step("outer", 0.5)
    tracker.step("outer", 3)
    assert tracker.step("outer", 3).share == 1.0


@given(st.lists(st.tuples(st.sampled_from(["start", "step", "finish"]), st.sampled_from("abc"), st.integers(1, 5))))
def test_the_share_never_falls_and_stays_between_0_and_1(events: list[tuple[str, str, int]]) -> None:
    tracker, share = Tracker(), 0.0
    for event, name, number in events:
        if event == "start":
            tracker.start(name, number)
        elif event == "finish":
            tracker.finish(name)
        else:
            step = tracker.step(name, number)
            assert share <= step.share <= 1.0
            share = step.share


def test_a_build_watch_passes_steps_on_until_cancelled() -> None:
    answers = iter([True, False])
    seen: list[Step] = []
    watch = BuildWatch(lambda step: seen.append(step) or next(answers))
    watch.start("phase", 2)
    assert watch.step("phase", 0)
    assert not watch.step("phase", 1)
    assert watch.cancelled
    assert not watch.step("phase", 1)  # The callback is not called again.
    watch.finish("phase")
    assert seen == [Step("phase", 0.5), Step("phase", 1.0)]
    assert watch.error is None


def test_a_watch_keeps_what_is_raised_and_stops() -> None:
    def fail(step: Step) -> bool:
        raise KeyboardInterrupt

    watch = BuildWatch(fail)
    assert not watch.step("phase", 0)
    assert watch.cancelled
    assert isinstance(watch.error, KeyboardInterrupt)


def shares(*percents: int) -> list[Step]:
    return [Step("work", percent / 100) for percent in percents]


def test_without_a_terminal_a_line_is_printed_for_every_tenth() -> None:
    stream = io.StringIO()
    printer = Printer(stream)
    for step in shares(0, 5, 11, 12, 45, 100):
        printer(step)
    printer.clear()
    assert stream.getvalue() == "  0% work\n 11% work\n 45% work\n100% work\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_one_line_is_written_over_and_removed() -> None:
    stream = Terminal()
    printer = Printer(stream)
    for step in shares(1, 2):
        printer(step)
    printer.clear()
    assert stream.getvalue() == "\r\x1b[K  1% work\r\x1b[K  2% work\r\x1b[K"
