"""ModelInfer and ModelStreamInfer: from messages to answers."""

import asyncio
from asyncio import CancelledError
from typing import Any

from grpc.aio import EOF, BaseError

from ..errors import ClientGone, QueueFull, Unavailable, refuse
from ..inference.in_parts import InferenceInParts
from ..tenants.auth import Tenancy
from ..tenants.service import Tenant
from .messages import ModelInferResponse, ModelStreamInferResponse
from .run import Run, empty_end
from .tenant_port import TenantPort, shortened
from .unread import KeptAnswer


class Infer:
    """Serves the inferences of one tenant's port. Belongs to the event loop."""

    def __init__(self, tenant_port: TenantPort) -> None:
        self._tenant_port = tenant_port
        self._streams = 0
        self._idle: set[asyncio.Future[Any]] = set()
        self._stopping = False

    async def unary(self, context: Any) -> bytes:
        """ModelInfer. A flood is refused before its tensors have arrived."""
        tenant = self._tenant_port.tenant(context)
        tenant.lane.admission.check_room()
        tenant.lane.admission.check_limits()
        run = Run(tenant, self._tenant_port.service.limits)
        try:
            data = await self._tenant_port.read(context)
            await run.begin(data, context.time_remaining(), self._tenant_port.traceparent(context))
            del data
            done = await run.next()
            answer = await run.encode(done)
            self._tenant_port.kept.keep_until_done(context, len(answer))
        except CancelledError:
            run.cancel(context.time_remaining())
            raise
        except Exception as error:
            raise run.fail(error) from None
        queued, executed = run.succeed(done)
        context.set_trailing_metadata((("server-timing", f"queue;dur={queued:.3f}, execute;dur={executed:.3f}"),))
        return answer

    async def stream(self, context: Any) -> None:
        """ModelStreamInfer: the answer to each request, or an error message, in their order; it may come in parts."""
        tenant = self._tenant_port.tenant(context)
        if self._streams >= self._tenant_port.readers:
            text = f"{self._streams} streams are open, in each of which a message may arrive"
            raise QueueFull(f"{text}; as many fit into tenants.{tenant.name}.memory by server.max_body")
        self._streams += 1
        try:
            tenancy = self._tenant_port.service.tenancy
            while await self._answer_next(tenant, context, tenancy):
                pass
        finally:
            self._streams -= 1

    def stop(self) -> None:
        """End the streams that are not being answered, and the others after their answer."""
        self._stopping = True
        for each in self._idle:
            each.cancel()

    async def _next(self, context: Any) -> Any:
        """The next message of a stream, or EOF. Raises Unavailable if the server stops."""
        if not self._stopping:
            reading = asyncio.ensure_future(context.read())
            self._idle.add(reading)
            try:
                return await reading
            except CancelledError:
                if not self._stopping:
                    raise
            finally:
                self._idle.discard(reading)
        raise Unavailable("the server is stopping")

    async def _answer_next(self, tenant: Tenant, context: Any, tenancy: Tenancy) -> bool:
        """Write the answer to the next message of a stream, each part when the client has room for it; False at its end.

        `tenancy` is what admitted the stream. Raises Unauthorized where its key is valid no more.
        """
        message = await self._next(context)
        if message is EOF:
            return False
        if self._tenant_port.service.tenancy is not tenancy:  # Reloaded: the stream's key may be valid no more.
            self._tenant_port.tenant(context)
        run = Run(tenant, self._tenant_port.service.limits, InferenceInParts)
        try:
            await run.begin(message, context.time_remaining(), self._tenant_port.traceparent(context))
            del message
            while (done := await run.next()).outputs and run.in_parts:
                await _write(context, *self._keep(context, infer_response=await run.encode(done, final=False)))
                run.proceed()
            last = None
            if not run.in_parts:
                last = self._keep(context, infer_response=await run.encode(done, final=True))
            elif run.wants_empty_end:
                last = self._keep(context, infer_response=empty_end(run.served, run.id))
        except CancelledError:
            run.cancel(context.time_remaining())
            raise
        except ClientGone as error:
            raise run.fail(error) from None
        except Exception as error:
            text = shortened(refuse(run.fail(error), tenant.name).text)
            unnamed = ModelInferResponse(id=run.id).SerializeToString()
            await _write(context, *self._keep(context, error_message=text, infer_response=unnamed))
            return True
        run.succeed(done)
        if last is not None:
            await _write(context, *last)
        return True

    def _keep(self, context: Any, **fields: Any) -> tuple[bytes, KeptAnswer]:
        """A message of a stream, which counts as unread from now on. Raises MemoryFull."""
        message: bytes = ModelStreamInferResponse(**fields).SerializeToString()
        return message, self._tenant_port.kept.keep(context, len(message))


async def _write(context: Any, message: bytes, kept: KeptAnswer) -> None:
    """Write a message once the client has room for it. Raises ClientGone if it is gone, also where that took too long."""
    try:
        await context.write(message)
    except BaseError as error:
        raise ClientGone("the client has disconnected") from error
    finally:
        kept.done()
