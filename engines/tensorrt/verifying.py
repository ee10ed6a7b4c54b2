"""Judges an engine's answers for each set of shapes before clients get any: see `engines.verification`."""

import hashlib
import logging
import os
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from tempfile import gettempdir
from threading import Lock, Thread
from uuid import uuid4

from ..errors import Cancelled, EngineError, ExecutionFailed
from ..signature import Shape, Signature
from ..verification.order import Answered, Reference, ReferenceRequest, read
from ..verification.rule import coarsest, explained
from ..verification.samples import harmless
from ..verification.steady import PART, Repeat, repeated
from ..verification.verdicts import Verdict, Verdicts, shapes_text
from .building.builds import Builds

log = logging.getLogger("greenlane.engines")

Shapes = tuple[Shape, ...]


class WrongAnswer(ExecutionFailed):
    """The library answers these shapes wrongly, or nothing is known of that though it has to be, and there is no other way."""


class Verifier:
    """The verdicts of one engine. Any thread may call. `onnx` is what its answers are compared with, None if it is not there.

    `source` is the digest of that file, "" for any. `required`: what cannot be compared counts as wrong.
    """

    def __init__(
        self,
        path: Path,
        onnx: Path | None,
        source: str,
        signature: Signature,
        builds: Builds,
        verdicts: Verdicts,
        required: bool,
    ) -> None:
        self.verdicts = verdicts
        self.routes: dict[Shapes, Shapes] = {}
        """The shapes that wrong ones are run with."""
        self.refused: dict[Shapes, str] = {}
        """Why shapes are refused."""
        self._path = path
        self._onnx = onnx
        self._source = source
        self._signature = signature
        self._builds = builds
        self._required = required
        self._coarse: frozenset[str] = frozenset()
        self._expected: dict[Shapes, Future[Reference]] = {}
        self._lock = Lock()

    def expect(self, sets: Iterable[Shapes]) -> None:
        """Have the references of these sets computed, by one child, while the caller goes on; not those that another verifier
        of the same file expects.
        """
        ordered = sorted({shapes for shapes in sets if self.verdicts.get(shapes) is None})  # Small ones first.
        future: Future[Reference] = Future()
        if self._onnx is None:
            return
        with self._lock:
            self._expected |= {each: self._builds.expected((self._onnx, self._source, each), future) for each in ordered}
            unknown = tuple(shapes for shapes in ordered if self._expected[shapes] is future)
        if not unknown:
            return

        def compute() -> None:
            try:
                future.set_result(self._ask(unknown))
            except BaseException as error:
                future.set_exception(error)

        Thread(target=compute, name=f"reference of {self._path.name}", daemon=True).start()

    def lacks(self, shapes: Shapes) -> bool:
        """Whether `fetch` would have a reference computed now. Does not block."""
        known = self.verdicts.get(shapes) is not None or shapes in self.refused or shapes in self._expected
        return self._onnx is not None and not known

    def prefetch(self, shapes: Shapes) -> None:
        """Have the reference of these shapes computed, for the next `fetch`. Blocks for seconds. Raises Cancelled."""
        found = self._ask((shapes,))
        future: Future[Reference] = Future()
        future.set_result(found)
        with self._lock:
            self._expected.setdefault(shapes, future)

    def fetch(self, shapes: Shapes) -> Answered | None:
        """The reference for these shapes, None where the verdict is known. Blocks for seconds. Raises Cancelled."""
        if self.verdicts.get(shapes) is not None:
            return None
        with self._lock:
            expected = self._expected.pop(shapes, None)
        self._coarse, found = expected.result() if expected else self._ask((shapes,))
        return found[shapes]

    def judge(self, shapes: Shapes, reference: Answered | None, repeat: Repeat | None) -> bool:
        """Whether these shapes may be run, by the verdict that is known, or else by comparing what `repeat` yields: each answer
        with the reference, where there is one, and with the first one. `repeat` is None if it cannot be called.

        Blocks. Raises what `repeat` raises, and Cancelled.
        """
        verdict = self.verdicts.get(shapes)
        if verdict is None:
            verdict = self._verdict(shapes, reference, repeat)
            self.verdicts.put(shapes, verdict)
            if verdict.word != "right":
                level = logging.WARNING if verdict.word == "wrong" or self._required else logging.INFO
                log.log(level, "%s: shape %s: %s", self._path, shapes_text(shapes), verdict.why)
        return verdict.word == "right" or (verdict.word == "unverified" and not self._required)

    def route(self, shapes: Shapes, other: Shapes) -> None:
        """Wrong shapes are run with others, which are right."""
        if self.routes.get(shapes) != other:
            self.routes[shapes] = other
            log.warning("%s: shape %s runs with %s", self._path, shapes_text(shapes), shapes_text(other))

    def refuse(self, shapes: Shapes) -> WrongAnswer:
        """There is no way to run these shapes: the error, which is raised for them from now on."""
        verdict = self.verdicts.get(shapes) or Verdict("unverified")
        advice = "change its shape, or see [models.NAME] verify"
        text = f"{self._path.name} does not answer shape {shapes_text(shapes)}: {verdict.why}; {advice}"
        if shapes not in self.refused:
            log.warning("%s: shape %s is refused", self._path, shapes_text(shapes))
        self.refused[shapes] = text
        return WrongAnswer(text)

    def describe(self) -> dict[str, object]:
        """For `Executor.describe`: how many sets were right, and each other with what is done about it."""
        found = self.verdicts.all()
        others = [
            {
                "shapes": [list(shape) for shape in shapes],
                "verdict": verdict.word,
                "why": verdict.why,
                **({"runs_as": [list(shape) for shape in self.routes[shapes]]} if shapes in self.routes else {}),
                **({"refused": True} if shapes in self.refused else {}),
            }
            for shapes, verdict in found.items()
            if verdict.word != "right"
        ]
        return {"right": len(found) - len(others), "others": others}

    def notes(self) -> list[str]:
        """A text for each set of shapes that is wrong."""
        wrong = [(shapes, each) for shapes, each in self.verdicts.all().items() if each.word == "wrong"]
        return [f"shape {shapes_text(shapes)} {self._done(shapes)}: {verdict.why}" for shapes, verdict in wrong]

    def _done(self, shapes: Shapes) -> str:
        if shapes in self.refused:
            return "is refused"
        other = self.routes.get(shapes)
        return f"runs with {shapes_text(other)}" if other else "is not run"

    def _verdict(self, shapes: Shapes, reference: Answered | None, repeat: Repeat | None) -> Verdict:
        sample = reference.sample if reference else None
        unknown = Verdict("unverified", why=f"not verified: {reference.why if reference else 'there is no reference'}")
        if repeat is None:
            return unknown
        inputs = sample.inputs if sample else harmless(self._signature.inputs, shapes)
        expected, precision = sample.outputs if sample else None, coarsest(self._coarse, rounds=True)
        tried = repeated(repeat, inputs, self._signature.outputs, expected, precision)
        found, spread = tried.found, tried.spread
        if tried.steady and (found is None or found.agrees):
            return Verdict("right", found.error, found.tolerance) if found else unknown
        if found is None:
            return Verdict("wrong", spread.error, spread.tolerance / PART, tried.why_not())
        again = self._ask((shapes,), rounded=True).answers[shapes]
        if tried.steady:
            ill = again.sample is None or found.error <= explained(again.sensitivity)
        else:  # A network that draws random numbers is as unsteady in the reference.
            ill = again.sample is not None and spread.error <= PART * again.sensitivity
        if ill:
            why = again.why or f"rounding its inputs alone changes the reference by {again.sensitivity:.2g}"
            return Verdict("unverified", found.error, found.tolerance, f"not verified: {why}")
        if not tried.steady:
            return Verdict("wrong", spread.error, spread.tolerance / PART, tried.why_not())
        why = f"output {found.output!r} is off by {found.error:.2g} from ONNX Runtime's (tolerance {found.tolerance:.2g})"
        return Verdict("wrong", found.error, found.tolerance, why)

    def _ask(self, sets: tuple[Shapes, ...], rounded: bool = False) -> Reference:
        """Have a child compute references. Blocks. Raises Cancelled; other failures are the reason in each answer."""
        if self._onnx is None:
            return Reference(self._coarse, dict.fromkeys(sets, Answered(None, "there is no ONNX file to compare with", 0.0)))
        target = Path(gettempdir()) / f"greenlane-reference-{os.getpid()}-{uuid4().hex}.npz"
        request = ReferenceRequest(self._onnx, self._source, self._signature, sets, target, rounded)
        try:
            self._builds.compute_reference(request)
            coarse, found = read(request)
            answers = {shapes: each._replace(why=self._without_path(each.why)) for shapes, each in found.items()}
            return Reference(coarse, answers)
        except Cancelled:
            raise
        except (EngineError, OSError, ValueError) as error:
            target.unlink(missing_ok=True)
            return Reference(self._coarse, dict.fromkeys(sets, Answered(None, self._without_path(str(error)), 0.0)))

    def _without_path(self, text: str) -> str:
        """A text that clients may see, without the folder of the file."""
        return text.replace(f"{self._onnx.parent}/", "") if self._onnx else text


def verdicts_file(folder: Path, *facts: str) -> Path:
    """Where verdicts are kept that depend on these facts."""
    return folder / f"answers-{hashlib.sha256(chr(0).join(facts).encode()).hexdigest()[:32]}.json"
