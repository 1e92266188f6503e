"""Exception hierarchy of serverless-gpu.

    ServerlessGpuError
    ├── UsageError                 the call is not valid; the client refuses it before anything starts
    │   ├── InvalidOption          (TypeError)   unknown option, or an option of the wrong type
    │   ├── InvalidValue           (ValueError)  right type, impossible value
    │   │   ├── UnknownGpuType
    │   │   └── PolicyViolation      the run breaks its usage policy, or does not name its policy
    │   ├── ArgumentMismatch       (TypeError)   arguments do not bind to the function's signature
    │   ├── NotDistributable       (TypeError)   not a plain callable
    │   ├── NotPicklable           (TypeError)   pickle cannot serialize something that the function captured
    │   ├── RayMissing             (ImportError) ray_launch without a Ray that can start a cluster
    │   └── SecretMissing          the named secret does not exist
    ├── HardwareError              this machine lacks something that the run needs
    │   ├── NoGpu · GpuTypeMismatch · NotEnoughGpus
    │   └── NoSuitableNode           no node of the server could ever serve the run
    ├── StorageError               disk full, directory not writable
    ├── EnvironmentProblem         an environment cannot be captured, sent or restored
    │   ├── EnvironmentUnsupported   an unsupported kind of environment, or an unsupported file in it
    │   ├── EnvironmentTooLarge      over the size limit; the message names the largest parts
    │   ├── EnvironmentMissing       the store does not have this snapshot
    │   ├── EnvironmentRejected      a sent unit or snapshot has invalid content
    │   ├── EnvironmentCorrupt       stored bytes do not match their address, twice
    │   └── StoreUnavailable         the store does not answer, or refuses the request
    ├── AgentUnavailable           the node's agent does not answer
    ├── EndpointRefused            a run refuses a connection to a port, a socket or a new program
    ├── IsolationUnavailable       this node cannot isolate the principal of a run
    ├── ServerProblem              a server refused a request, or failed
    │   ├── ServerNotConfigured      remote=True without a server
    │   ├── ServerUnavailable        the server does not answer, or cannot serve the request now
    │   ├── NotAuthenticated · NotAllowed · NotFound
    │   ├── IdempotencyConflict      another run has this identifier
    │   ├── StaleAttempt             a report about an attempt that is not the current one
    │   ├── AlreadyFinished          a stop request for a run that has ended
    │   ├── HashMismatch             received bytes do not match the digest in their name
    │   ├── TooLarge                 a body, label or page over its limit
    │   ├── TooManyRequests          more sign-in attempts than a rate limit permits
    │   ├── AuditBroken              the audit log, or a copy of it, has changed since the server wrote it
    │   └── ServerStorageFull        the server's disk or store is full
    ├── SessionEnded               a call in a session that has ended
    └── RunError                   a run started and did not succeed
        ├── RemoteError            a rank raised an exception that this process cannot rebuild
        ├── RankCrashed            a signal killed a rank
        ├── OutOfMemory            the kernel killed a rank because host memory ran out
        ├── CollectiveHang         ranks waited for other ranks longer than hang_timeout=
        ├── RunTimedOut · RunCancelled · NodeLost · BudgetExhausted
        ├── RuntimeLost            the ranks' parent process died while its node kept running
        ├── CommandFailed          a submitted command ended with an exit code other than 0
        ├── EngineHeadLost         the run's Ray cluster lost its head, or a node
        ├── ResultNotSerializable · ResultTooLarge   the function finished, but its result cannot be sent
        ├── ResultUnavailableHere  the result arrived, but this process cannot load it
        └── UntrustedResult        loading would run code of another principal

Exceptions of user code are *not* part of the hierarchy. The caller receives a user exception with its original type. An
exception without a message uses the first line of its class's docstring as its message. The error `code` of a class is
stable, because the server's API sends the code. `status` is the HTTP status code with which the API reports the
exception.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar


class ServerlessGpuError(Exception):
    """serverless-gpu failed."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init_subclass__(
        cls, *, code: str | None = None, status: int | None = None, retryable: bool | None = None, **others: Any
    ) -> None:
        """Set the class attributes that the class statement passes as keywords.

        A class inherits all other attributes from its parent.
        """
        super().__init_subclass__(**others)
        for name, value in (("code", code), ("status", status), ("retryable", retryable)):
            if value is not None:
                setattr(cls, name, value)

    def __init__(self, message: str = "", *, hint: str = "") -> None:
        self.message = message or (type(self).__doc__ or "").partition("\n")[0]
        self.hint = hint
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Unpickling does not call __init__, because subclasses may take more arguments than the message.
        return (_rebuild, (type(self), self.args), self.__dict__)


def _rebuild(cls: type[ServerlessGpuError], args: tuple[object, ...]) -> ServerlessGpuError:
    error = cls.__new__(cls, *args)
    error.args = args
    return error


class UsageError(ServerlessGpuError, code="usage", status=400):
    """The call is not valid, so the client started no run."""


class InvalidOption(UsageError, TypeError, code="invalid_option"):
    """An option does not exist or has the wrong type."""


class InvalidValue(UsageError, ValueError, code="invalid_value"):
    """A value has the right type but is not valid."""


class UnknownGpuType(InvalidValue, code="unknown_gpu_type"):
    """The GPU type is not in the catalogue."""


class PolicyViolation(InvalidValue, code="policy_violation"):
    """The run breaks its usage policy, or does not select one of several policies."""


class ArgumentMismatch(UsageError, TypeError, code="argument_mismatch"):
    """The arguments do not fit the function's signature."""


class NotDistributable(UsageError, TypeError, code="not_distributable"):
    """This object cannot run on several ranks."""


class NotPicklable(UsageError, TypeError, code="not_picklable"):
    """Pickle cannot serialize something that the function needs."""


class RayMissing(UsageError, ImportError, code="ray_missing"):
    """The caller's environment has no Ray that can start a cluster."""


class SecretMissing(UsageError, code="secret_missing"):
    """The named secret does not exist, or this run may not read it."""


class HardwareError(ServerlessGpuError, code="hardware", status=409):
    """This machine does not have what the run needs."""


class NoGpu(HardwareError, code="no_gpu"):
    """This machine has no usable GPU."""


class GpuTypeMismatch(HardwareError, code="gpu_type_mismatch"):
    """This machine has GPUs of another type."""


class NotEnoughGpus(HardwareError, code="not_enough_gpus"):
    """The run requests more GPUs than this machine has."""


class NoSuitableNode(HardwareError, code="no_suitable_node"):
    """No node of the server could ever serve the run, so the server did not queue the run.

    Attributes:
        gpus: number of requested devices, or None for all devices of a node.
        gpu_type: requested type, or None.
        pool: requested pool, or "".
        choices: requests that some node could serve. Each choice is a mapping with ``gpus``, ``gpu_type``, ``pool`` and
            ``env``, limited to the differences from the request.
    """

    gpus: int | None = None
    gpu_type: str | None = None
    pool: str = ""
    choices: Sequence[Mapping[str, int | str]] = ()


class StorageError(ServerlessGpuError, code="storage", status=507):
    """A file or directory cannot be written."""


class EnvironmentProblem(ServerlessGpuError, code="environment"):
    """The environment cannot be captured or restored."""


class EnvironmentUnsupported(EnvironmentProblem, code="environment_unsupported", status=422):
    """This environment, or a file in it, cannot be captured."""


class EnvironmentTooLarge(EnvironmentProblem, code="environment_too_large", status=413):
    """The environment is over the size limit."""


class EnvironmentMissing(EnvironmentProblem, code="environment_missing", status=404):
    """The store does not have this snapshot."""


class EnvironmentRejected(EnvironmentProblem, code="environment_rejected", status=422):
    """A unit or snapshot has invalid content, so the receiver rejected it as a whole."""


class EnvironmentCorrupt(EnvironmentProblem, code="env_corrupt"):
    """The stored bytes do not match their digest, even after a second download."""


class StoreUnavailable(EnvironmentProblem, code="store_unavailable", status=503, retryable=True):
    """The environment store does not answer or refuses the request."""


class AgentUnavailable(ServerlessGpuError, code="agent_unavailable", status=503, retryable=True):
    """The agent of this node does not answer."""


class EndpointRefused(ServerlessGpuError, code="endpoint_refused", status=409):
    """A run refuses a connection to a port, a socket or a new program."""


class IsolationUnavailable(ServerlessGpuError, code="isolation_unavailable", status=503):
    """This node cannot isolate the principal of a run from other principals."""


class ServerProblem(ServerlessGpuError, code="server"):
    """The server refused the request or failed."""


class ServerNotConfigured(ServerProblem, code="server_not_configured", status=400):
    """No server is configured for remote runs.

    Attributes:
        is_missing: True if no configuration exists, or False if its file cannot be read.
    """

    is_missing: bool = False


class ServerUnavailable(ServerProblem, code="server_unavailable", status=503, retryable=True):
    """The server does not answer, or cannot serve the request now."""


class NotAuthenticated(ServerProblem, code="not_authenticated", status=401):
    """The request has no valid token."""


class NotAllowed(ServerProblem, code="not_allowed", status=403):
    """The token's owner has no permission for this request."""


class NotFound(ServerProblem, code="not_found", status=404):
    """The requested object does not exist, or the token's owner may not see it."""


class AuditBroken(ServerProblem, code="audit_broken"):
    """The audit log, or a copy of it, has changed since the server wrote it."""


class IdempotencyConflict(ServerProblem, code="idempotency_conflict", status=409):
    """Another run has this identifier."""


class StaleAttempt(ServerProblem, code="stale_attempt", status=409):
    """The report concerns an outdated attempt of the run."""


class AlreadyFinished(ServerProblem, code="already_finished", status=409):
    """The run has already ended."""


class HashMismatch(ServerProblem, code="hash_mismatch", status=422):
    """The received bytes do not match the digest in their name."""


class TooLarge(ServerProblem, code="too_large", status=413):
    """A request exceeds a limit of the server."""


class TooManyRequests(ServerProblem, code="too_many_requests", status=429):
    """The client exceeds a rate limit of the server."""


class ServerStorageFull(ServerProblem, code="storage_full", status=503):
    """The server's disk or store is full."""


class SessionEnded(ServerlessGpuError, code="session_ended", status=409):
    """The session has ended."""


class RunError(ServerlessGpuError, code="run_failed"):
    """A run ended without success.

    Attributes:
        run_id: identifier of the run.
        rank: global rank that failed first, or None if no single rank failed first.
        reason: the machine-readable `Reason` value, for example ``"rank_signal"``.
        log_tail: last lines that the rank wrote.
    """

    def __init__(
        self,
        message: str = "",
        *,
        hint: str = "",
        run_id: str = "",
        rank: int | None = None,
        reason: str = "",
        log_tail: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.run_id = run_id
        self.rank = rank
        self.reason = reason
        self.log_tail = log_tail


class RemoteError(RunError, code="remote_error"):
    """A rank raised an exception that this process cannot rebuild."""


class RankCrashed(RunError, code="rank_crashed"):
    """A signal killed a rank, or a rank exited without a result."""


class OutOfMemory(RunError, code="out_of_memory"):
    """The kernel killed a rank because host memory ran out."""


class CollectiveHang(RunError, code="collective_hang"):
    """The run wrote no output and at least one rank made no progress within hang_timeout.

    Attributes:
        ranks_waiting: global ranks that seem to wait for other ranks: in a collective, in a backward pass or at a
            socket. If no rank seems to wait, the largest group of ranks at the same code location.
        ranks_elsewhere: all other global ranks, including ranks that had returned. Empty if all ranks wait.
    """

    ranks_waiting: Sequence[int] = ()
    ranks_elsewhere: Sequence[int] = ()


class RunTimedOut(RunError, code="timed_out"):
    """The run reached its time limit."""


class RunCancelled(RunError, code="cancelled"):
    """The run was cancelled."""


class NodeLost(RunError, code="node_lost"):
    """The run's supervisor or node is gone."""


class RuntimeLost(RunError, code="runtime_lost"):
    """The ranks' parent process died while its node kept running, so the run failed."""


class BudgetExhausted(RunError, code="budget_exhausted", status=402):
    """The server stopped or refused the run because a budget is used up."""


class CommandFailed(RunError, code="command_failed"):
    """A submitted command ended with an exit code other than 0.

    Attributes:
        exit_code: exit code of the first rank that failed.
    """

    exit_code: int = 1


class EngineHeadLost(RunError, code="engine_head_lost"):
    """The run's Ray cluster lost its head process or a node's raylet."""


class ResultNotSerializable(RunError, code="result_unserialisable"):
    """The function finished, but its result cannot be serialized."""


class ResultTooLarge(RunError, code="result_too_large"):
    """The function finished, but its result is over the size limit."""


class ResultUnavailableHere(RunError, code="result_unavailable_here"):
    """The result arrived, but this process cannot load it."""


class UntrustedResult(RunError, code="untrusted_result"):
    """Loading the result would run another principal's code in this process."""


def error_class(code: str) -> type[ServerlessGpuError]:
    """Return the exception class for an error code, or `ServerlessGpuError` for an unknown code."""
    queue: list[type[ServerlessGpuError]] = [ServerlessGpuError]
    for cls in queue:
        if cls.code == code:
            return cls
        queue.extend(cls.__subclasses__())
    return ServerlessGpuError
