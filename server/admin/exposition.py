"""Metrics as text: what `generate_latest` of prometheus_client writes, in less time, as it is asked for each second.

That one sorts, escapes and checks names of each line again. Ours are known, so only the values of labels are escaped.
"""

from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

_ENDINGS = {"counter": "_total"}


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
