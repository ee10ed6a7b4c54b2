"""Sends messages to a gRPC port, one thread a channel, and records every wrong answer, INTERNAL, hang and disconnect."""

from threading import Thread
from time import monotonic

import grpc
import numpy as np
from tritonclient.grpc.service_pb2 import ModelInferResponse

from .attack import PATIENCE, Found
from .grpc_cases import Message, MessageMaker, read, tensors
from .models import Oracle
from .wire import Unreadable

REFUSALS = {"INVALID_ARGUMENT", "NOT_FOUND"}
METHOD = "/inference.GRPCInferenceService/ModelInfer"


class GrpcAttack(Thread):
    """Messages of one seed, one after another until a time of `time.monotonic`, or so many."""

    def __init__(
        self, address: str, maker: MessageMaker, oracle: Oracle, found: Found, until: float, most: int | None = None
    ) -> None:
        super().__init__(name="fuzz", daemon=True)
        self._address = address
        self._maker = maker
        self._oracle = oracle
        self._found = found
        self._until = until
        self._most = most

    def run(self) -> None:
        done = 0
        with grpc.insecure_channel(self._address) as channel:
            call = channel.unary_unary(METHOD)
            while monotonic() < self._until and (self._most is None or done < self._most):
                case = self._maker.case()
                status, finding = self._try(call, case)
                self._found.note(case, status, finding)
                done += 1

    def _try(self, call: grpc.UnaryUnaryMultiCallable, case: Message) -> tuple[str, str]:
        """The status of the answer, and what is wrong with it."""
        try:
            answer = call(case.message, timeout=PATIENCE)
        except grpc.RpcError as error:
            status, text = error.code().name, error.details()
            if text.startswith("Request timeout expired: ") and case.damage:
                return status, ""  # The damage was a timeout.
            if status not in REFUSALS:
                return status, f"{status}: {text[:300]}"
            return status, "" if case.damage else f"a whole message was refused with {status}: {text[:300]}"
        return "OK", self._compare(case, answer)

    def _compare(self, case: Message, data: bytes) -> str:
        try:
            request = read(case.message)
            given = tensors(request.inputs, request.raw_input_contents)
        except Unreadable as error:
            return f"answered what cannot be read: {error}"
        answer = ModelInferResponse.FromString(data)
        asked = [output.name for output in request.outputs] or self._oracle.output_names(request.model_name)
        if [output.name for output in answer.outputs] != asked:
            return f"outputs {[output.name for output in answer.outputs]} for {asked}"
        if any("classification" in output.parameters for output in request.outputs):
            return ""
        if (answer.id, answer.model_name) != (request.id, request.model_name):
            return f"{answer.model_name!r} and id {answer.id!r} for {request.model_name!r} and {request.id!r}"
        try:
            wanted = self._oracle.outputs(request.model_name, given)
        except Exception as error:  # Whatever ONNX Runtime raises.
            return f"answered what ONNX Runtime refuses: {error}"
        for name, values in tensors(answer.outputs, answer.raw_output_contents).items():
            if values.shape != wanted[name].shape or not np.array_equal(values, wanted[name], values.dtype.kind == "f"):
                return f"output {name} is {values!r}, of ONNX Runtime {wanted[name]!r}"
        return ""
