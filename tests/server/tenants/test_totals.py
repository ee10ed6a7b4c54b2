"""Reports of several processes are added up as if one process had counted everything."""

from hypothesis import given
from hypothesis import strategies as st

from server.link.messages import Done
from server.processes.remote.http_processes import added, ended, total
from server.scheduling.lane_statistics import LaneStatistics, SlotStatistics
from server.tenants.frontend import ModelReport, Report
from server.tenants.statistics import ModelStatistics

IDLE, NO_SLOTS = LaneStatistics(0, 0, 0, 0), SlotStatistics(0, 0, 0)


def report(statistics: ModelStatistics, lane: LaneStatistics = IDLE) -> Report:
    return Report([ModelReport("m", "1", statistics, 0)], (), lane, NO_SLOTS)


def done(began: int, rows: int = 0) -> Done:
    return Done(0, (), None, began, began + 7, rows)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(0, 10**9), st.booleans()), max_size=20))
def test_the_sum_is_what_one_process_would_have_counted(counted: list[tuple[int, int, int, bool]]) -> None:
    processes, alone = [ModelStatistics() for _ in range(3)], ModelStatistics()
    for who, rows, at, good in counted:
        for each in (processes[who], alone):
            if good:
                each.succeeded(at, at + 5, done(at + 9), at + 20, rows)
                response = each.response(rows)
                assert response
                response.count += 1
            else:
                each.failed(at, "REJECTED")
    lead, *helpers = map(report, processes)
    (found,) = total(lead, helpers).served
    alone.last = max([each.last for each in processes])
    assert found.statistics == alone


def test_a_batch_of_several_processes_is_one_execution() -> None:
    lead, helper = ModelStatistics(), ModelStatistics()
    lead.count_run(done(9, 3))  # For the helper's first request,
    for _ in range(2):
        helper.succeeded(0, 5, done(9, 3), 20, 1)
    lead.succeeded(0, 5, done(9, 3), 20, 1)  # and this is one of its own.
    (found,) = total(report(lead), [report(helper)]).served
    assert (found.statistics.inferences, found.statistics.executions) == (3, 1)


def test_what_helpers_counted_that_have_ended_stays() -> None:
    counted = [LaneStatistics(1, 1, 1, number, number, number, ran=number) for number in (1, 2, 4)]
    reports = [report(ModelStatistics(joined_rows=3), lane) for lane in counted[1:]]
    assert ended(reports, known=()).served == [], "a process may report whatever it wants"
    past = ended(reports, known={("m", "1")})
    found = total(report(ModelStatistics(joined_rows=5), counted[0]), [past])
    assert found.lane == LaneStatistics(1, 1, 1, 7, 7, 7, ran=1), "the lead's, which runs the works of all"
    assert found.served[0].statistics.joined_rows == 11


def test_the_sum_of_one_is_the_same() -> None:
    statistics = ModelStatistics()
    statistics.succeeded(1, 2, done(3), 20, 2)
    assert added([statistics]) == statistics
