"""Run specifications: validates user options and builds a RunSpec.

The module validates all options before any process starts. The spec also records options that only a server can
enforce, so that the same code is valid with `remote=True`.
"""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from numbers import Real
from typing import Literal, TypedDict

import msgspec

from serverless_gpu.errors import InvalidOption, InvalidValue
from serverless_gpu.model import secrets
from serverless_gpu.model.hardware import CPU, GpuType, find_type
from serverless_gpu.model.lifecycle.attempt import UNSAVED_MAX, Limits
from serverless_gpu.units import format_bytes, parse_duration_s


class Tracking(msgspec.Struct, frozen=True, kw_only=True):
    """The MLflow destination of a run, as the client resolved it at the call.

    Either `uri` or `store` names the destination. Without `uri` and `store`, the destination is the MLflow server of
    the home directory.

    Attributes:
        uri: address of an MLflow server, http or https, without credentials. Credentials stay in the caller's
            variables.
        store: the caller's MLflow store without a server (``sqlite:////…``, a directory). The node starts a server for
            the store.
        experiment: name of the experiment, which tracking creates if missing, or "" if `experiment_id` is set.
        experiment_id: identifier of an existing experiment.
        run_id: an existing MLflow run to continue, which its creator ends. "" creates a new MLflow run.
        parent_id: identifier of the parent MLflow run, or "".
        run_name: name of a new MLflow run.
        tags: tags about the source: user, program, commit.
        params: parameters of the call, as text.
    """

    uri: str = ""
    store: str = ""
    experiment: str = ""
    experiment_id: str = ""
    run_id: str = ""
    parent_id: str = ""
    run_name: str = ""
    tags: dict[str, str] = {}
    params: dict[str, str] = {}


SPEC_VERSION = 2
BLOB_PART_BYTES = 16 << 20
RANKS_MAX = 100_000
ARGUMENTS_MAX = 10_000
TAGS_MAX = 64
TAG_CHARACTERS_MAX = 256
DEFAULT_GRACE_S = 30.0
DEFAULT_HANG_WARNING_S = 600.0
HANG_WARNING = "SERVERLESS_GPU_HANG_WARNING"
SECONDS_MAX = 10 * 366 * 86_400
MEMORY_BYTES_MIN = 64 << 20  # Minimum memory limit. A Python interpreter with NumPy already uses 40 MiB.

OnInterrupt = Literal["cancel", "detach"]
ProcessGroup = Literal["nccl", "gloo"]
Environment = Literal["live", "snapshot"]
AskedEnvironment = Literal["live", "snapshot", "auto"]


class Priority(StrEnum):
    """Priority classes of the queue."""

    CRITICAL = "CRITICAL"
    NORMAL = "NORMAL"
    BEST_EFFORT = "BEST_EFFORT"


class SessionOptions(TypedDict, total=False):
    """Options that a session accepts for plain functions, in addition to its own parameters."""

    num_gpus: int
    tags: Mapping[str, str]
    policy: str
    pool: str
    team: str
    priority: str
    retries: int
    retry_on_infra: bool
    resume: bool
    env: Environment
    secrets: Sequence[str] | Mapping[str, str | None]
    cpus: int
    memory: int | str
    ranks_log: Literal["all"] | Sequence[int]
    tracking: bool
    quiet: bool
    grace: float | str
    hang_timeout: float | str
    on_interrupt: OnInterrupt
    init: ProcessGroup | None
    same_node: bool
    ignore_busy: bool


class Options(SessionOptions, total=False):
    """Options that `distributed` accepts in addition to `gpus`, `gpu_type`, `remote` and `timeout`."""

    idle_timeout: float | str
    wait: bool


class BlobReference(msgspec.Struct, frozen=True, kw_only=True):
    """A reference to bytes in the server's store.

    Attributes:
        size: number of bytes.
        parts: BLAKE3 digest (64 hexadecimal digits) of each chunk of `BLOB_PART_BYTES`. The last chunk may be shorter.
    """

    size: int
    parts: tuple[str, ...]


class Function(msgspec.Struct, frozen=True, kw_only=True, tag="function"):
    """A payload that calls a function in every rank.

    Attributes:
        call: the pickled call, or None if the request or the run directory contains the pickled call.
    """

    call: BlobReference | None = None


class Command(msgspec.Struct, frozen=True, kw_only=True, tag="command"):
    """A payload that runs a program.

    Attributes:
        argv: the program and its arguments. The rank looks up a program without a slash on its PATH.
        per: "rank" starts one process per rank. "node" starts one process per node, with all devices of the node.
        tty: True to start the program on a pseudo-terminal, to which the owner connects. The run stores no output.
    """

    argv: tuple[str, ...]
    per: Literal["rank", "node"] = "rank"
    tty: bool = False


class Kernel(msgspec.Struct, frozen=True, kw_only=True, tag="kernel"):
    """A payload for a notebook kernel, which is not implemented yet."""


Payload = Function | Command | Kernel


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """The resources that a gang needs.

    Attributes:
        gpus: number of GPUs with one rank each, or None for every GPU of the node.
        gpu_type: canonical type name, or None for the type of the machine.
        cpus: cores per gang, or None for an even share.
        memory_bytes: host memory limit of the gang, or None.
        same_node: True if the gang must fit on one node.
        ignore_busy: True to also allocate GPUs that other programs use.
    """

    gpus: int | None = None
    gpu_type: str | None = None
    cpus: int | None = None
    memory_bytes: int | None = None
    same_node: bool = False
    ignore_busy: bool = False


OBJECT_STORE_BYTES_MIN = 80_000_000  # Minimum size of a Ray object store, because Ray refuses less than 75 MiB.
OBJECT_STORE_BYTES_MAX = 200_000_000_000


class RayCluster(msgspec.Struct, frozen=True, kw_only=True):
    """The private Ray cluster that a run requests.

    Attributes:
        dashboard: True to start Ray's web dashboard, on the loopback interface of the head node.
        object_store_bytes: size of each node's object store, or None for a share of the memory.
    """

    dashboard: bool = False
    object_store_bytes: int | None = None

    def text(self) -> str:
        """Return the request as text, such as ``Ray cluster with dashboard, object store 20.0 GB``."""
        store = "" if self.object_store_bytes is None else f"object store {format_bytes(self.object_store_bytes)}"
        extras = ", ".join(filter(None, ("dashboard" if self.dashboard else "", store)))
        return f"Ray cluster with {extras}" if extras else "Ray cluster"


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The specification of one run, without the bytes of its payload.

    Attributes:
        timeout_s: time limit from the start of user code, in seconds, or None.
        grace_s: seconds between SIGTERM and SIGKILL when the supervisor stops the run.
        ranks_log: global ranks whose output the client shows live, or None for all ranks.
        hang_timeout_s: seconds without a sign of progress until the supervisor ends the run, or None.
        hang_warning_s: seconds without a sign of progress until a warning, or 0 for no warning.
        environment: "live" imports the caller's files in place, "snapshot" a restored copy. The client replaces "auto"
            once it knows if the run uses its own machine.
        payload: the function, command or kernel that the run executes.
        secrets: names of secrets that the run receives as files. `secret_variables` maps secrets to variables with the
            same values.
        idle_timeout_s: seconds without work on any device until the supervisor stops the run, or None for never.
        tracker: MLflow destination, as the client resolved `tracking` at the call, or None without tracking.
        ray: the Ray cluster that the run creates on its nodes, with the function as driver, or None without Ray.
        retry_on_infra: True to run user code again a few times after a GPU or node failure, without `retries`.
        max_run_s: maximum seconds of an attempt, from the usage policy or the server, or None without a server.
        total_run_s: maximum seconds of user code over all attempts, from the usage policy, or None.
        attempts_max: maximum number of attempts that begin user code, from the usage policy, or None.
        init: backend of the process group that each rank joins before the function begins, or None.
        policies: mandatory usage policies that the server applies in addition to `policy`.
        wait: True to queue the run even if no known node could ever serve it.
        unsaved_max: consecutive attempts without a new checkpoint after which `resume` stops, from the usage policy.
    """

    spec_version: int = SPEC_VERSION
    name: str = ""
    resources: Resources = Resources()
    remote: bool = False
    timeout_s: float | None = None
    grace_s: float = DEFAULT_GRACE_S
    tags: dict[str, str] = {}
    policy: str | None = None
    pool: str | None = None
    team: str | None = None
    priority: Priority = Priority.NORMAL
    retries: int = 0
    resume: bool = False
    secrets: tuple[str, ...] = ()
    secret_variables: dict[str, str] = {}
    ranks_log: tuple[int, ...] | None = (0,)
    tracking: bool = True
    quiet: bool = False
    on_interrupt: OnInterrupt = "cancel"
    hang_timeout_s: float | None = None
    hang_warning_s: float = DEFAULT_HANG_WARNING_S
    environment: AskedEnvironment = "live"
    payload: Payload = Function()
    idle_timeout_s: float | None = None
    tracker: Tracking | None = None
    ray: RayCluster | None = None
    retry_on_infra: bool = False
    max_run_s: float | None = None
    total_run_s: float | None = None
    attempts_max: int | None = None
    unsaved_max: int = UNSAVED_MAX
    policies: tuple[str, ...] = ()
    wait: bool = False
    init: ProcessGroup | None = None

    @property
    def limit_s(self) -> float | None:
        """Return the time limit of user code in one attempt, in seconds, or None without a limit."""
        limits = [limit for limit in (self.timeout_s, self.max_run_s) if limit is not None]
        return min(limits, default=None)

    @property
    def limited_by(self) -> str:
        """Return the usage policies that limit the run's time, or "the server", as text for messages."""
        names = [repr(name) for name in (self.policy, *self.policies) if name]
        if not names:
            return "the server"
        return f"usage polic{'y' if len(names) == 1 else 'ies'} {', '.join(names)}"

    @property
    def is_capped(self) -> bool:
        """Return True if `max_run_s` instead of the user's `timeout` limits an attempt."""
        return self.max_run_s is not None and self.limit_s != self.timeout_s

    @property
    def per_node(self) -> bool:
        """Return True if one process per node uses all devices and starts further processes."""
        return self.ray is not None or (isinstance(self.payload, Command) and self.payload.per == "node")

    def processes(self, world_size: int) -> int:
        """Return the number of user processes that a node starts for `world_size` devices."""
        return 1 if self.per_node else world_size

    def limits(self) -> Limits:
        """Return the time limits that the attempt's lifecycle applies."""
        # Hang detection ignores a Ray driver, which may wait in one call for hours while its tasks make progress.
        warning_s, hang_s = (self.hang_warning_s, self.hang_timeout_s) if self.ray is None else (0, None)
        return Limits(
            timeout_ns=None if self.limit_s is None else round(self.limit_s * 1e9),
            grace_ns=round(self.grace_s * 1e9),
            hang_warning_ns=round(warning_s * 1e9) or None,
            hang_timeout_ns=None if hang_s is None else round(hang_s * 1e9),
        )


def make_spec(
    gpus: object,
    gpu_type: object,
    remote: object,
    timeout: object,
    options: Mapping[str, object],
    own: Sequence[GpuType],
) -> RunSpec:
    """Return the RunSpec for the options of a user.

    `options` contains all options that are not parameters of `make_spec`. Raises InvalidOption for an unknown option or
    a wrong type, and InvalidValue for an invalid value.
    """
    _refuse_unknown(options)
    asked = dict(options)
    if "num_gpus" in asked:
        alias = asked.pop("num_gpus")
        if gpus is not None and gpus != alias:
            raise InvalidValue(
                f"gpus={gpus!r} and num_gpus={alias!r} disagree", hint="num_gpus is an alias of gpus: give one of them"
            )
        gpus = alias
    if gpu_type is not None and not isinstance(gpu_type, str):
        raise InvalidOption(f"gpu_type must be a string such as 'H100', not {gpu_type!r}")
    resources = Resources(
        gpus=None if gpus is None else _whole("gpus", gpus, 1, RANKS_MAX),
        gpu_type=None if gpu_type is None else find_type(gpu_type, own).name,
        cpus=None if asked.get("cpus") is None else _whole("cpus", asked["cpus"], 1, RANKS_MAX),
        memory_bytes=None if asked.get("memory") is None else _memory(asked["memory"]),
        same_node=flag("same_node", asked.get("same_node", False)),
        ignore_busy=flag("ignore_busy", asked.get("ignore_busy", False)),
    )
    names, variables = secrets.read(asked.get("secrets", ()))
    return RunSpec(
        resources=resources,
        remote=flag("remote", remote),
        timeout_s=_seconds_or_none("timeout", timeout),
        grace_s=seconds("grace", asked.get("grace", DEFAULT_GRACE_S)),
        tags=_tags(asked.get("tags", {})),
        policy=_name("policy", asked.get("policy")),
        pool=_name("pool", asked.get("pool")),
        team=_name("team", asked.get("team")),
        priority=_priority(asked.get("priority", Priority.NORMAL)),
        retries=_whole("retries", asked.get("retries", 0), 0, 100),
        retry_on_infra=flag("retry_on_infra", asked.get("retry_on_infra", False)),
        resume=flag("resume", asked.get("resume", False)),
        secrets=names,
        secret_variables=variables,
        ranks_log=_ranks_log(asked.get("ranks_log", (0,))),
        tracking=flag("tracking", asked.get("tracking", True)),
        quiet=flag("quiet", asked.get("quiet", False)),
        on_interrupt=_on_interrupt(asked.get("on_interrupt", "cancel")),
        hang_timeout_s=_seconds_or_none("hang_timeout", asked.get("hang_timeout")),
        environment=_environment(asked.get("env"), remote is True),
        idle_timeout_s=_seconds_or_none("idle_timeout", asked.get("idle_timeout")),
        wait=flag("wait", asked.get("wait", False)),
        init=_process_group(asked.get("init"), resources.gpu_type),
    )


def check_command(command: Command) -> None:
    """Raise an error for a program that no node can start. Raises InvalidValue."""
    if not command.argv or not command.argv[0]:
        raise InvalidValue("a command needs a program", hint="for example: python train.py")
    if len(command.argv) > ARGUMENTS_MAX:
        raise InvalidValue(f"a command has up to {ARGUMENTS_MAX} arguments, not {len(command.argv)}")
    for argument in command.argv:
        if "\0" in argument or not is_text(argument):
            raise InvalidValue(f"argument {argument[:80]!r} contains a zero byte, or is not UTF-8")


def is_text(value: str) -> bool:
    """Return True if UTF-8 can encode a string. UTF-8 cannot encode lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def hang_warning_s(text: str | None) -> float:
    """Return the seconds without progress until a warning, from `SERVERLESS_GPU_HANG_WARNING`.

    Returns 0 for no warning. Raises InvalidValue if the text is not a number of seconds.
    """
    if not text:
        return DEFAULT_HANG_WARNING_S
    value = -1.0
    with contextlib.suppress(ValueError):
        value = float(text)
    if not 0 <= value <= SECONDS_MAX:  # The range check also refuses NaN.
        raise InvalidValue(f"{HANG_WARNING}={text!r} is not a number of seconds", hint="use 0 to disable the warning")
    return value


def _refuse_unknown(options: Mapping[str, object]) -> None:
    valid = sorted({"gpus", "gpu_type", "remote", "timeout", *Options.__annotations__})
    for name in options:
        if name not in valid:
            near = difflib.get_close_matches(name, valid, n=1, cutoff=0.7)
            guess = f" (did you mean {near[0]!r}?)" if near else ""
            raise InvalidOption(f"there is no option {name!r}{guess}", hint="valid options: " + ", ".join(valid))


def _environment(value: object, remote: bool) -> AskedEnvironment:
    if value is None:
        return "auto" if remote else "live"
    if value == "live":
        return "live"
    if value == "snapshot":
        return "snapshot"
    if not isinstance(value, str):
        raise InvalidOption(f"env must be 'live' or 'snapshot', not {value!r}")
    raise InvalidValue(
        f"env={value!r} is not valid",
        hint="'live' imports the caller's files in place, 'snapshot' imports a copy of them from the time of the call",
    )


def flag(name: str, value: object) -> bool:
    """Return a boolean option. Raises InvalidOption for any value except True and False."""
    if not isinstance(value, bool):
        raise InvalidOption(f"{name} must be True or False, not {value!r}")
    return value


def _whole(name: str, value: object, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidOption(f"{name} must be a whole number, not {value!r}")
    if not least <= value <= most:
        raise InvalidValue(f"{name} must be between {least} and {most}, not {value}")
    return value


def seconds(name: str, value: object) -> float:
    """Return a duration in seconds, from a number or from a text with a unit such as ``"5m"``.

    Raises InvalidOption for a wrong type or text. Raises InvalidValue unless the duration is positive and at most ten
    years.
    """
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = parse_duration_s(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidOption(f"{name} must be seconds, or text such as '5m', not {value!r}")
    if not 0 < value < float("inf"):  # The range check also refuses NaN.
        raise InvalidValue(f"{name} must be a positive number of seconds, not {value}")
    if value > SECONDS_MAX:
        raise InvalidValue(f"{name} must be at most {SECONDS_MAX} seconds, ten years")
    return float(value)


def patience(name: str, value: object) -> float | None:
    """Return a maximum wait in seconds, or None for no limit. Negative values become 0.

    Raises InvalidOption when the value is not a number, and InvalidValue for NaN.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):  # `Real` includes NumPy's numbers.
        raise InvalidOption(f"{name} must be a number of seconds or None, not {value!r}")
    limit_s = float(value)
    if math.isnan(limit_s):
        raise InvalidValue(f"{name} must be a number of seconds or None, not {limit_s}")
    return max(0.0, limit_s) if limit_s <= SECONDS_MAX else None


def _seconds_or_none(name: str, value: object) -> float | None:
    return None if value is None else seconds(name, value)


_BYTE_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}


def parse_bytes(name: str, value: object) -> int:
    """Return a number of bytes, from an integer or from a string such as ``"64GiB"``.

    Error messages contain `name`, the name of the option. Raises InvalidOption for a wrong type or text. Raises
    InvalidValue for less than 1 byte or more than 1 EiB.
    """
    if isinstance(value, str):
        text = value.strip().upper().removesuffix("B")
        digits = text.rstrip("KMGTI")
        unit = _BYTE_UNITS.get(text[len(digits) :])
        with contextlib.suppress(ValueError, OverflowError):
            value = round(float(digits) * unit) if unit else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidOption(f"{name} must be a number of bytes or a string such as '64GiB', not {value!r}")
    return _whole(name, value, 1, 2**60)


def _memory(value: object) -> int:
    """Return a host memory limit in bytes. Raises an error if the limit is too small for an interpreter."""
    found = parse_bytes("memory", value)
    if found < MEMORY_BYTES_MIN:
        raise InvalidValue(
            f"memory={value!r} is less than the {MEMORY_BYTES_MIN // 2**20} MiB that an interpreter needs",
            hint="write a unit, for example 8GiB, because a number without a unit is in bytes",
        )
    return found


def _name(name: str, value: object) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise InvalidOption(f"{name} must be a non-empty string, not {value!r}")
    return value


def _tags(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise InvalidOption(f"tags must be a dictionary of strings, not {value!r}")
    if len(value) > TAGS_MAX:
        raise InvalidValue(f"{len(value)} tags are over the limit of {TAGS_MAX}")
    for key, text in value.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise InvalidOption(f"tags must be strings, not {key!r}: {text!r}")
        if max(len(key), len(text)) > TAG_CHARACTERS_MAX:
            raise InvalidValue(f"tag {key[:40]!r} is longer than {TAG_CHARACTERS_MAX} characters")
    return dict(value)


def _priority(value: object) -> Priority:
    try:
        return Priority(str(value).upper())
    except ValueError:
        raise InvalidValue(f"priority must be one of {', '.join(Priority)}, not {value!r}") from None


def _ranks_log(value: object) -> tuple[int, ...] | None:
    if value == "all":
        return None
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InvalidOption(f"ranks_log must be 'all' or a list of ranks, not {value!r}")
    return tuple(_whole("ranks_log", rank, 0, RANKS_MAX) for rank in value)


def _on_interrupt(value: object) -> OnInterrupt:
    if value == "cancel":
        return "cancel"
    if value == "detach":
        return "detach"
    raise InvalidValue(f"on_interrupt must be 'cancel' or 'detach', not {value!r}")


def _process_group(value: object, gpu_type: str | None) -> ProcessGroup | None:
    if value is None:
        return None
    if value == "gloo":
        return "gloo"
    if value == "nccl":
        if gpu_type == CPU:
            raise no_nccl("CPU slots")
        return "nccl"
    if not isinstance(value, str):
        raise InvalidOption(f"init must be 'nccl', 'gloo' or None, not {value!r}")
    raise InvalidValue(
        f"init must be 'nccl', 'gloo' or None, not {value!r}",
        hint="use 'nccl' for GPUs, 'gloo' for CPUs, or None if the function creates the process group",
    )


def no_nccl(devices: str) -> InvalidValue:
    """Return the error for `init="nccl"` on devices without CUDA."""
    return InvalidValue(
        f"init='nccl' needs GPUs with CUDA, but the run has {devices}",
        hint="write init='gloo', or choose GPUs with gpu_type=",
    )
