"""The table `[server]`."""

from typing import Literal

from pydantic import Field

from .tables import Section
from .values import Digest, Duration, Endpoint, Hosts, KeepAlive, Location, Origins, Size, Text, WatchdogTime


class ServerConfig(Section, frozen=True):
    """HTTP: addresses, limits, processes and how the server ends."""

    host: Text = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="TCP port to listen on; 0 takes any that is free.")
    max_body: Size = Field(
        default=64 * 2**20,
        description="Largest request body or gRPC message, compressed or not; larger ones are refused with 413.",
    )
    max_json_tensor: Size = Field(
        default=2**20,
        description="Most JSON in one request, or over gRPC all but its raw tensors; more is refused with 413. Send large "
        "tensors in binary form.",
    )
    max_string_elements: int = Field(
        default=2**18,
        ge=1,
        description="Most elements of all BYTES tensors of one request; more are refused with 413. Each takes a "
        "microsecond and 100 bytes or more on a CPU.",
    )
    nonfinite_json: Literal["literal", "null"] = Field(
        default="literal",
        description='NaN and infinity in JSON answers: "literal" writes NaN, Infinity and -Infinity as Triton does, '
        'which strict parsers refuse; "null" writes null.',
    )
    admin_key_sha256: Digest | None = Field(
        default=None,
        repr=False,
        examples=["0" * 64],
        description="Digest of the admin key: `printf %s KEY | sha256sum`. Without it the admin API answers on the loopback "
        "interface only, and refuses web pages and requests that show that they came through a proxy. Not every proxy shows "
        "that, so set a key behind one.",
    )
    allowed_hosts: Hosts = Field(
        default=(),
        description="More names under which the admin API answers without a key. Addresses, localhost and the machine's own "
        "name always work.",
    )
    default_tenant: Text | None = Field(
        default=None,
        examples=["acme"],
        description="Tenant of requests that name none. Without it a single tenant without keys; otherwise such "
        "requests are refused with 401.",
    )
    front_cores: Literal["auto", "any"] = Field(
        default="auto",
        description='On a GPU, "auto" pins each HTTP process to up to two cores, the device\'s process to others; "any" none.',
    )
    log_format: Literal["text", "json"] = Field(default="text", description="Format of log lines.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least severe level to log.")
    audit: Location | None = Field(
        default=None,
        examples=["audit.jsonl"],
        description="File for audit lines in JSON, relative to the configuration file: calls that change something "
        'below /admin, loads and unloads, refusals for lack of a key, and reloads. "-" writes them to the log.',
    )
    keep_alive: KeepAlive = Field(
        default=75.0,
        description="How long an idle connection is kept; 5 s at most if no request on it named a tenant. Set it above the "
        "idle timeout of clients' pools and proxies, or they send requests into closed connections.",
    )
    write_timeout: Duration = Field(
        default=60.0,
        description="How long a client may take to read an answer, plus a second for each 16 KiB that it has read, or "
        'to read one part. Then its connection is closed; "0s": no limit.',
    )
    cors_origins: Origins = Field(
        default=(),
        description='Origins of web pages that may call /v1, /v2 and /rerank, such as `["https://app.example"]`, or `["*"]`. '
        "Never /admin, /metrics, or loading and unloading of models.",
    )
    strict_readiness: bool = Field(
        default=False,
        description="With true the server is not ready while any model of any tenant could not be loaded, as Triton's "
        "default is: one tenant's broken model takes the whole server out of a load balancer.",
    )
    usage_dir: Location | None = Field(
        default=None,
        examples=["usage"],
        description="Directory for what tenants were granted and used, relative to the configuration file: a CSV file "
        "for each day (UTC), with rows each minute.",
    )
    tracing_endpoint: Endpoint | None = Field(
        default=None,
        examples=["http://localhost:4318/v1/traces"],
        description="Address to which OpenTelemetry spans of inferences are sent (OTLP over HTTP). Needs greenlane[otel].",
    )
    tracing_ratio: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Share of the requests that are traced. A request with a `traceparent` follows its sampled flag, up to 100 "
        "a second of a tenant.",
    )
    tracing_service: Text = Field(default="greenlane", description="The name of this service in spans.")
    drain_grace: Duration = Field(
        default=1.0, description="Time from not ready to refusing requests at shutdown, for load balancers to notice."
    )
    drain_timeout: Duration = Field(
        default=10.0,
        description="Time after `drain_grace` by which the process ends. Half of it is for requests in flight, which are then "
        "stopped with 503.",
    )
    autopilot: Literal["off", "dry-run", "on"] = Field(
        default="off",
        description='"on" moves granules from tenants that keep their `target_p99` with fewer, or have a '
        '`min_granules`, to tenants that miss theirs. "dry-run" only says what it would move. GET /admin/moves has '
        "every move; PUT /admin/autopilot switches it.",
    )
    max_execution: Duration = Field(
        default=300.0,
        description='Longest run of one inference, or warm-up, on the device; "0s": no limit. On a CPU it is stopped with 504. '
        "What cannot be stopped, as on a GPU: five seconds later its tenant is refused with 503 until it ends, and a "
        "process that serves no other tenant (as under MPS) is replaced.",
    )
    max_pause: Duration = Field(
        default=5.0,
        description="Longest time for which a repartition may keep the tenants it moves waiting. If an inference "
        "takes longer, the repartition is refused with 409, and nothing changes.",
    )
    watchdog: WatchdogTime = Field(
        default=20.0,
        description="Longest time for which the event loop of the supervisor or of a device process may be blocked; "
        '"0s": no limit. Then the process logs its stacks and exits with status 70, to be restarted; the server is '
        "not ready after a quarter of it. A device process that is stopped for so long, and an HTTP process that does "
        'not answer for 3 s, are killed and replaced, unless this is "0s". Waits for a core or a disk do not count. '
        "Reserves SIGUSR1.",
    )
