"""Metrics from rows of labels and values, and as text: what `generate_latest` of prometheus_client writes, in less time.

Metrics are asked for each second. `generate_latest` sorts, escapes and checks names of each line again. Ours are known, so only
the values of labels are escaped.
"""

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, UnknownMetricFamily
from prometheus_client.utils import floatToGoString

_ENDINGS = {"counter": "_total"}
Rows = Iterable[tuple[Sequence[str], float]]
"""Values of labels, in the order of the labels, and the number that belongs to them."""


def gauge(name: str, about: str, labels: Sequence[str], rows: Rows) -> Metric:
    """A value that may fall."""
    return _filled(GaugeMetricFamily(name, about, labels=labels), rows)


def counter(name: str, about: str, labels: Sequence[str], rows: Rows) -> Metric:
    """A value that only grows; its lines have the suffix `_total`."""
    return _filled(CounterMetricFamily(name, about, labels=labels), rows)


def tritons_counter(name: str, about: str, labels: Sequence[str], rows: Rows) -> Metric:
    """The same without the suffix, as Triton's counters are."""
    return _filled(UnknownMetricFamily(name, about, labels=labels), rows)


def _filled(family: GaugeMetricFamily | CounterMetricFamily | UnknownMetricFamily, rows: Rows) -> Metric:
    for labels, value in rows:
        family.add_metric(labels, value)
    return family


def text(metrics: Iterable[Metric], unknown: str = "untyped") -> str:
    """The lines of these metrics, which are counters, gauges, histograms or of unknown type, without times.

    Those of unknown type are said to be of the type `unknown`.
    """
    lines = []
    for metric in metrics:
        name = metric.name + _ENDINGS.get(metric.type, "")
        about = metric.documentation.replace("\\", r"\\").replace("\n", r"\n")
        lines.append(f"# HELP {name} {about}\n# TYPE {name} {unknown if metric.type == 'unknown' else metric.type}\n")
        for sample in metric.samples:
            value = sample.value
            number = f"{value}.0" if type(value) is int and -1_000_000 < value < 1_000_000 else floatToGoString(value)  # type: ignore[no-untyped-call]
            lines.append(f"{sample.name}{_labels(sample.labels)} {number}\n")
    return "".join(lines)


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    found = [f'{name}="{labels[name]}"' for name in sorted(labels)]
    joined = ",".join(found)
    if "\\" in joined or "\n" in joined or joined.count('"') != 2 * len(found):
        joined = ",".join([f'{name}="{_escaped(labels[name])}"' for name in sorted(labels)])
    return f"{{{joined}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
