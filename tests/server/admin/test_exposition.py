"""The text of metrics is that of prometheus_client's own function, for all that families of metrics can have."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    UnknownMetricFamily,
)
from prometheus_client.registry import Collector

from server.admin.exposition import text


class Given(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


def same(*metrics: Metric) -> bool:
    return text(metrics).encode() == generate_latest(Given([*metrics]))  # type: ignore[arg-type]


@given(st.floats() | st.integers(-(10**18), 10**18) | st.booleans(), st.text(), st.text())
def test_any_value_label_and_meaning_is_written_as_the_library_does(value: float, label: str, about: str) -> None:
    gauge = GaugeMetricFamily("gauge", about, labels=["b", "a"])
    gauge.add_metric([label, "x"], value)
    gauge.add_metric(["y", label], 0)
    assert same(gauge)


@pytest.mark.parametrize("kind", [GaugeMetricFamily, CounterMetricFamily, UnknownMetricFamily])
def test_so_is_each_type(kind: type[GaugeMetricFamily]) -> None:
    assert same(kind("name", "about", value=1.5), kind("empty", "about", labels=["a"]))


def test_so_is_a_histogram() -> None:
    family = HistogramMetricFamily("name", "about", labels=["model"])
    family.add_metric(["m"], [("0.001", 1), ("1", 12345678), ("+Inf", 12345679)], 2.5)
    assert same(family)
