"""A tenant's gRPC port over real sockets, and Triton's own client of it; the test plays the worker."""

import asyncio
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from fastapi import Request, Response
from tritonclient.utils import InferenceServerException

from server.api import framework, model_control, trace_settings
from server.api.framework import ask
from server.config.schema import Config, ModelsConfig
from server.config.server import ServerConfig
from server.config.tenant import TenantConfig
from server.grpc.server import GrpcServer
from server.link import ring as links
from server.link.messages import Failure
from server.protocol.classification import Labels
from server.tenants.auth import digest
from server.tenants.service import Service
from tests.lanes import PlayedTenant

X = np.array([1, 2], np.float32)
MAX_BODY = 1 << 20
GLOBEX_KEY = "globex's key"


class Control:
    """Makes no changes, but keeps what was asked for; `gate` lets them end."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str | None]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def load(self, request: Request, tenant: str, name: str, config: str | None) -> Response:
        self.asked.append(("load", name, config))
        await self.gate.wait()
        return Response()

    async def unload(self, request: Request, tenant: str, name: str) -> Response:
        self.asked.append(("unload", name, None))
        return Response()


class Bench(PlayedTenant):
    """The port of tenant `acme`."""

    def __init__(self, config: Config, acme: TenantConfig, descriptors: links.Descriptors) -> None:
        super().__init__(acme, descriptors, labels=Labels({"y": b"one\ntwo\n"}))
        self.tenant.catalog.expected = None  # There are no other models.
        self.service = Service(config, [self.tenant])
        self.service.set_state("serving")
        self.control = Control()
        routes = (model_control.router, trace_settings.router)
        web = framework.build(routes, service=lambda: self.service, model_control=self.control)
        self.ask = partial(ask, web)
        self.server = GrpcServer(self.service, "acme", self.ask)
        self.address = f"127.0.0.1:{acme.grpc_port}"
        self.client = triton.InferenceServerClient(self.address)

    def infer(self, x: np.ndarray[Any, Any] = X, model: str = "m", **options: Any) -> Awaitable[triton.InferResult]:
        return self.client.infer(model, [self.input(x)], **options)

    def input(self, x: np.ndarray[Any, Any]) -> triton.InferInput:
        return triton.InferInput("x", list(x.shape), "FP32").set_data_from_numpy(x)

    async def answered(self, asked: Awaitable[Any], failure: Failure | None = None) -> Any:
        """The answer to a call whose inference ends in this way."""
        call = asyncio.ensure_future(asked)
        ticket = await self.next_ticket()
        if failure:
            self.end(ticket, failure=failure)
        else:
            self.echo(ticket)
        return await call

    async def released(self) -> None:
        """Wait until no slot is in use."""
        while self.slots_used:
            await asyncio.sleep(0)


def configuration(port: int, **acme: Any) -> Config:
    tenants = (
        TenantConfig(name="acme", granules=1, models=("*",), grpc_port=port, **{"queue": 2, "in_flight": 1, **acme}),
        TenantConfig(name="globex", granules=1, models=("*",), keys_sha256=(digest(GLOBEX_KEY),)),
        TenantConfig(name="initech", granules=1, models=("*",), grpc_port=8199),
    )
    server = ServerConfig(default_tenant="acme", max_body=MAX_BODY, max_json_tensor=1 << 17)
    models = ModelsConfig(repository=Path("/nowhere"))
    return Config(server=server, models=models, tenants={each.name: each for each in tenants}, source="c.toml")


async def refused(asked: Awaitable[Any]) -> tuple[str, str]:
    """The status and text of a refused call."""
    with pytest.raises(InferenceServerException) as refusal:
        await asked
    return str(refusal.value.status()).removeprefix("StatusCode."), refusal.value.message()
