"""Every exception this package raises, as one tree.

    ServerlessGpuError
    ├── UsageError                 the call itself is wrong; refused before anything starts
    │   ├── InvalidOption          (TypeError)   unknown option, or an option of the wrong type
    │   ├── InvalidValue           (ValueError)  right type, impossible value
    │   │   ├── UnknownGpuType
    │   │   └── PolicyViolation      the run is not within its usage policy, or does not say which
    │   ├── ArgumentMismatch       (TypeError)   arguments do not bind to the function's signature
    │   ├── NotDistributable       (TypeError)   not a plain callable
    │   ├── NotPicklable           (TypeError)   something the function captured cannot travel
    │   ├── RayMissing             (ImportError) ray_launch without a Ray that can make a cluster
    │   └── SecretMissing          a secret that is named is not there
    ├── HardwareError              this machine cannot do what was asked
    │   ├── NoGpu · GpuTypeMismatch · NotEnoughGpus
    │   └── NoSuitableNode           no node of the server could ever serve the run
    ├── StorageError               disk full, directory not writable
    ├── EnvironmentProblem         an environment cannot be captured, sent or restored
    │   ├── EnvironmentUnsupported   a kind of environment that cannot travel, or a file in it that cannot
    │   ├── EnvironmentTooLarge      over the limit; names what is largest
    │   ├── EnvironmentMissing       the store has no such snapshot
    │   ├── EnvironmentRejected      what was sent is not what a snapshot may be
    │   ├── EnvironmentCorrupt       what was stored is not what its address says, twice
    │   └── StoreUnavailable         the store does not answer, or refuses
    ├── AgentUnavailable           the node's agent does not answer
    ├── ServerProblem              a server refused, or is not there
    │   ├── ServerNotConfigured      remote=True without a server
    │   ├── ServerUnavailable        it does not answer, or cannot now
    │   ├── NotAuthenticated · NotAllowed · NotFound
    │   ├── IdempotencyConflict      a run of this identifier exists and is another one
    │   ├── StaleAttempt             a report about an attempt that is not the current one
    │   ├── AlreadyFinished          a stop for a run that has ended
    │   ├── HashMismatch             bytes arrived that are not what their name says
    │   ├── TooLarge                 a body, label or page over its limit
    │   ├── AuditBroken              the audit, or a copy of it, is not what was written down
    │   └── ServerStorageFull        the server's disk or store has no room
    ├── SessionEnded               a call in a session that has ended
    └── RunError                   a run started and did not succeed
        ├── RemoteError            a rank raised, and its exception cannot be rebuilt here
        ├── RankCrashed            a rank died of a signal
        ├── OutOfMemory            a rank was ended by the kernel for host memory
        ├── CollectiveHang         ranks waited for others that did not come, longer than hang_timeout=
        ├── RunTimedOut · RunCancelled · NodeLost · BudgetExhausted
        ├── RuntimeLost            the ranks' parent process died on a node that goes on
        ├── CommandFailed          a submitted command ended with an exit code other than 0
        ├── EngineHeadLost         the run's Ray cluster lost its head, or a node
        ├── ResultNotSerializable · ResultTooLarge   the function finished, its value cannot travel
        ├── ResultUnavailableHere  the value arrived, this process cannot load it
        └── UntrustedResult        the value is somebody else's, and loading it would run their code

An `Exception` raised by user code is *not* in this tree: it reaches the caller as its own type. A class without a
message of its own says its docstring's first line, so each class must explain itself. `code` is stable: it goes over
the wire and into documentation; `status` is what an HTTP API answers for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar


class ServerlessGpuError(Exception):
    """Something in serverless-gpu failed."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init_subclass__(
        cls, *, code: str | None = None, status: int | None = None, retryable: bool | None = None, **others: Any
    ) -> None:
        """Set what the class statement gives; the rest is inherited."""
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
        # Rebuilt without __init__: subclasses may take more arguments than the message.
        return (_rebuild, (type(self), self.args), self.__dict__)


def _rebuild(cls: type[ServerlessGpuError], args: tuple[object, ...]) -> ServerlessGpuError:
    error = cls.__new__(cls, *args)
    error.args = args
    return error


class UsageError(ServerlessGpuError, code="usage", status=400):
    """The call is not valid, and nothing was started."""


class InvalidOption(UsageError, TypeError, code="invalid_option"):
    """An option does not exist or has the wrong type."""


class InvalidValue(UsageError, ValueError, code="invalid_value"):
    """A value is of the right type but not possible."""


class UnknownGpuType(InvalidValue, code="unknown_gpu_type"):
    """The GPU type is not in the catalogue."""


class PolicyViolation(InvalidValue, code="policy_violation"):
    """The run is not within the usage policy that it is under, or does not say which of several it is."""


class ArgumentMismatch(UsageError, TypeError, code="argument_mismatch"):
    """The arguments do not fit the function's signature."""


class NotDistributable(UsageError, TypeError, code="not_distributable"):
    """This object cannot be run on several ranks."""


class NotPicklable(UsageError, TypeError, code="not_picklable"):
    """Something the function needs cannot be sent to another process."""


class RayMissing(UsageError, ImportError, code="ray_missing"):
    """The caller's environment has no Ray that a cluster can be made with."""


class SecretMissing(UsageError, code="secret_missing"):
    """A secret that is named does not exist, or is not for this run."""


class HardwareError(ServerlessGpuError, code="hardware", status=409):
    """This machine does not have what the run needs."""


class NoGpu(HardwareError, code="no_gpu"):
    """This machine has no usable GPU."""


class GpuTypeMismatch(HardwareError, code="gpu_type_mismatch"):
    """This machine has GPUs of another type."""


class NotEnoughGpus(HardwareError, code="not_enough_gpus"):
    """The run asks for more GPUs than this machine has."""


class NoSuitableNode(HardwareError, code="no_suitable_node"):
    """No node of the server could ever serve the run, so it was not queued.

    Attributes:
        gpus: how many devices were asked for, or None for all of a node's.
        gpu_type: of which type, or None.
        pool: in which pool, or "".
        choices: requests that some node could serve: mappings with ``gpus``, ``gpu_type``, ``pool`` and ``env``, each
            only where it differs from what was asked for.
    """

    gpus: int | None = None
    gpu_type: str | None = None
    pool: str = ""
    choices: Sequence[Mapping[str, int | str]] = ()


class StorageError(ServerlessGpuError, code="storage", status=507):
    """A file or directory could not be written."""


class EnvironmentProblem(ServerlessGpuError, code="environment"):
    """The environment cannot be captured or restored."""


class EnvironmentUnsupported(EnvironmentProblem, code="environment_unsupported", status=422):
    """This environment, or a file in it, cannot be captured."""


class EnvironmentTooLarge(EnvironmentProblem, code="environment_too_large", status=413):
    """The environment is over the size limit."""


class EnvironmentMissing(EnvironmentProblem, code="environment_missing", status=404):
    """The store does not have this snapshot."""


class EnvironmentRejected(EnvironmentProblem, code="environment_rejected", status=422):
    """A unit or snapshot breaks the rules of what it may hold, and nothing of it was used."""


class EnvironmentCorrupt(EnvironmentProblem, code="env_corrupt"):
    """Stored bytes are not what their address says, also when they were fetched again."""


class StoreUnavailable(EnvironmentProblem, code="store_unavailable", status=503, retryable=True):
    """The store of environments does not answer, or refuses."""


class AgentUnavailable(ServerlessGpuError, code="agent_unavailable", status=503, retryable=True):
    """The agent of this node does not answer."""


class ServerProblem(ServerlessGpuError, code="server"):
    """The server refused, or something went wrong in it."""


class ServerNotConfigured(ServerProblem, code="server_not_configured", status=400):
    """No server is configured for remote runs.

    Attributes:
        is_missing: whether there is none at all; else its file cannot be read.
    """

    is_missing: bool = False


class ServerUnavailable(ServerProblem, code="server_unavailable", status=503, retryable=True):
    """The server does not answer, or cannot do this now."""


class NotAuthenticated(ServerProblem, code="not_authenticated", status=401):
    """The request has no valid token."""


class NotAllowed(ServerProblem, code="not_allowed", status=403):
    """The token's owner may not do this."""


class NotFound(ServerProblem, code="not_found", status=404):
    """There is no such thing, or the token's owner may not see it."""


class AuditBroken(ServerProblem, code="audit_broken"):
    """The audit, or a copy of it, is not what was written down."""


class IdempotencyConflict(ServerProblem, code="idempotency_conflict", status=409):
    """A run with this identifier exists and was asked for differently."""


class StaleAttempt(ServerProblem, code="stale_attempt", status=409):
    """A report came about an attempt that is not the run's current one."""


class AlreadyFinished(ServerProblem, code="already_finished", status=409):
    """The run has ended already."""


class HashMismatch(ServerProblem, code="hash_mismatch", status=422):
    """The bytes that arrived are not those their name says."""


class TooLarge(ServerProblem, code="too_large", status=413):
    """A request is over a limit of the server."""


class ServerStorageFull(ServerProblem, code="storage_full", status=503):
    """The server has no room to store this."""


class SessionEnded(ServerlessGpuError, code="session_ended", status=409):
    """The session has ended."""


class RunError(ServerlessGpuError, code="run_failed"):
    """A run ended without success.

    Attributes:
        run_id: the run.
        rank: global rank that failed first, or None when no single rank did.
        reason: the machine-readable `Reason` value, for example ``"rank_signal"``.
        log_tail: last lines that rank wrote.
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
    """A rank raised an exception that cannot be rebuilt in this process."""


class RankCrashed(RunError, code="rank_crashed"):
    """A rank was ended by a signal or left without a result."""


class OutOfMemory(RunError, code="out_of_memory"):
    """A rank was ended because host memory ran out."""


class CollectiveHang(RunError, code="collective_hang"):
    """The run was silent and at least one rank stood still, for as long as hang_timeout allows.

    Attributes:
        ranks_waiting: global ranks that seem to wait for others: in a collective, a backward pass, at a socket; where
            none is, the most that stand in one place.
        ranks_elsewhere: global ranks that do not, those that had returned among them; empty when all wait.
    """

    ranks_waiting: Sequence[int] = ()
    ranks_elsewhere: Sequence[int] = ()


class RunTimedOut(RunError, code="timed_out"):
    """The run reached its time limit."""


class RunCancelled(RunError, code="cancelled"):
    """The run was cancelled."""


class NodeLost(RunError, code="node_lost"):
    """The process that looked after the run is gone."""


class RuntimeLost(RunError, code="runtime_lost"):
    """The ranks' parent process died on a node that goes on: the run failed, and does not continue by itself."""


class BudgetExhausted(RunError, code="budget_exhausted", status=402):
    """A budget is used up: the run was stopped, or was not taken."""


class CommandFailed(RunError, code="command_failed"):
    """A submitted command ended with an exit code other than 0.

    Attributes:
        exit_code: of the first that did.
    """

    exit_code: int = 1


class EngineHeadLost(RunError, code="engine_head_lost"):
    """A process died without which the run's Ray cluster cannot go on: of its head, or a node's raylet."""


class ResultNotSerializable(RunError, code="result_unserialisable"):
    """The function finished, but its result cannot be sent back."""


class ResultTooLarge(RunError, code="result_too_large"):
    """The function finished, but its result is over the size limit."""


class ResultUnavailableHere(RunError, code="result_unavailable_here"):
    """The result arrived, but this process cannot load it."""


class UntrustedResult(RunError, code="untrusted_result"):
    """The result was made by another principal, and loading it would run their code here."""


def error_class(code: str) -> type[ServerlessGpuError]:
    """Return the class with a code, `ServerlessGpuError` for a code this version does not know."""
    queue: list[type[ServerlessGpuError]] = [ServerlessGpuError]
    for cls in queue:
        if cls.code == code:
            return cls
        queue.extend(cls.__subclasses__())
    return ServerlessGpuError
