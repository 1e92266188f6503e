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
from typing import ClassVar


class ServerlessGpuError(Exception):
    """Something in serverless-gpu failed."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

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


class UsageError(ServerlessGpuError):
    """The call is not valid, and nothing was started."""

    code = "usage"
    status = 400


class InvalidOption(UsageError, TypeError):
    """An option does not exist or has the wrong type."""

    code = "invalid_option"


class InvalidValue(UsageError, ValueError):
    """A value is of the right type but not possible."""

    code = "invalid_value"


class UnknownGpuType(InvalidValue):
    """The GPU type is not in the catalogue."""

    code = "unknown_gpu_type"


class PolicyViolation(InvalidValue):
    """The run is not within the usage policy that it is under, or does not say which of several it is."""

    code = "policy_violation"


class ArgumentMismatch(UsageError, TypeError):
    """The arguments do not fit the function's signature."""

    code = "argument_mismatch"


class NotDistributable(UsageError, TypeError):
    """This object cannot be run on several ranks."""

    code = "not_distributable"


class NotPicklable(UsageError, TypeError):
    """Something the function needs cannot be sent to another process."""

    code = "not_picklable"


class RayMissing(UsageError, ImportError):
    """The caller's environment has no Ray that a cluster can be made with."""

    code = "ray_missing"


class SecretMissing(UsageError):
    """A secret that is named does not exist, or is not for this run."""

    code = "secret_missing"


class HardwareError(ServerlessGpuError):
    """This machine does not have what the run needs."""

    code = "hardware"
    status = 409


class NoGpu(HardwareError):
    """This machine has no usable GPU."""

    code = "no_gpu"


class GpuTypeMismatch(HardwareError):
    """This machine has GPUs of another type."""

    code = "gpu_type_mismatch"


class NotEnoughGpus(HardwareError):
    """The run asks for more GPUs than this machine has."""

    code = "not_enough_gpus"


class NoSuitableNode(HardwareError):
    """No node of the server could ever serve the run, so it was not queued.

    Attributes:
        gpus: how many devices were asked for, or None for all of a node's.
        gpu_type: of which type, or None.
        pool: in which pool, or "".
        choices: requests that some node could serve: mappings with ``gpus``, ``gpu_type``, ``pool`` and ``env``, each
            only where it differs from what was asked for.
    """

    code = "no_suitable_node"
    gpus: int | None = None
    gpu_type: str | None = None
    pool: str = ""
    choices: Sequence[Mapping[str, int | str]] = ()


class StorageError(ServerlessGpuError):
    """A file or directory could not be written."""

    code = "storage"
    status = 507


class EnvironmentProblem(ServerlessGpuError):
    """The environment cannot be captured or restored."""

    code = "environment"


class EnvironmentUnsupported(EnvironmentProblem):
    """This environment, or a file in it, cannot be captured."""

    code = "environment_unsupported"
    status = 422


class EnvironmentTooLarge(EnvironmentProblem):
    """The environment is over the size limit."""

    code = "environment_too_large"
    status = 413


class EnvironmentMissing(EnvironmentProblem):
    """The store does not have this snapshot."""

    code = "environment_missing"
    status = 404


class EnvironmentRejected(EnvironmentProblem):
    """A unit or snapshot breaks the rules of what it may hold, and nothing of it was used."""

    code = "environment_rejected"
    status = 422


class EnvironmentCorrupt(EnvironmentProblem):
    """Stored bytes are not what their address says, also when they were fetched again."""

    code = "env_corrupt"


class StoreUnavailable(EnvironmentProblem):
    """The store of environments does not answer, or refuses."""

    code = "store_unavailable"
    status = 503
    retryable = True


class AgentUnavailable(ServerlessGpuError):
    """The agent of this node does not answer."""

    code = "agent_unavailable"
    status = 503
    retryable = True


class ServerProblem(ServerlessGpuError):
    """The server refused, or something went wrong in it."""

    code = "server"


class ServerNotConfigured(ServerProblem):
    """No server is configured for remote runs.

    Attributes:
        is_missing: whether there is none at all; else its file cannot be read.
    """

    code = "server_not_configured"
    status = 400
    is_missing: bool = False


class ServerUnavailable(ServerProblem):
    """The server does not answer, or cannot do this now."""

    code = "server_unavailable"
    status = 503
    retryable = True


class NotAuthenticated(ServerProblem):
    """The request has no valid token."""

    code = "not_authenticated"
    status = 401


class NotAllowed(ServerProblem):
    """The token's owner may not do this."""

    code = "not_allowed"
    status = 403


class NotFound(ServerProblem):
    """There is no such thing, or the token's owner may not see it."""

    code = "not_found"
    status = 404


class AuditBroken(ServerProblem):
    """The audit, or a copy of it, is not what was written down."""

    code = "audit_broken"


class IdempotencyConflict(ServerProblem):
    """A run with this identifier exists and was asked for differently."""

    code = "idempotency_conflict"
    status = 409


class StaleAttempt(ServerProblem):
    """A report came about an attempt that is not the run's current one."""

    code = "stale_attempt"
    status = 409


class AlreadyFinished(ServerProblem):
    """The run has ended already."""

    code = "already_finished"
    status = 409


class HashMismatch(ServerProblem):
    """The bytes that arrived are not those their name says."""

    code = "hash_mismatch"
    status = 422


class TooLarge(ServerProblem):
    """A request is over a limit of the server."""

    code = "too_large"
    status = 413


class ServerStorageFull(ServerProblem):
    """The server has no room to store this."""

    code = "storage_full"
    status = 503


class SessionEnded(ServerlessGpuError):
    """The session has ended."""

    code = "session_ended"
    status = 409


class RunError(ServerlessGpuError):
    """A run ended without success.

    Attributes:
        run_id: the run.
        rank: global rank that failed first, or None when no single rank did.
        reason: the machine-readable `Reason` value, for example ``"rank_signal"``.
        log_tail: last lines that rank wrote.
    """

    code = "run_failed"

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


class RemoteError(RunError):
    """A rank raised an exception that cannot be rebuilt in this process."""

    code = "remote_error"


class RankCrashed(RunError):
    """A rank was ended by a signal or left without a result."""

    code = "rank_crashed"


class OutOfMemory(RunError):
    """A rank was ended because host memory ran out."""

    code = "out_of_memory"


class CollectiveHang(RunError):
    """The run was silent and at least one rank stood still, for as long as hang_timeout allows.

    Attributes:
        ranks_waiting: global ranks that seem to wait for others: in a collective, a backward pass, at a socket; where
            none is, the most that stand in one place.
        ranks_elsewhere: global ranks that do not, those that had returned among them; empty when all wait.
    """

    code = "collective_hang"
    ranks_waiting: Sequence[int] = ()
    ranks_elsewhere: Sequence[int] = ()


class RunTimedOut(RunError):
    """The run reached its time limit."""

    code = "timed_out"


class RunCancelled(RunError):
    """The run was cancelled."""

    code = "cancelled"


class NodeLost(RunError):
    """The process that looked after the run is gone."""

    code = "node_lost"


class RuntimeLost(RunError):
    """The ranks' parent process died on a node that goes on: the run failed, and does not continue by itself."""

    code = "runtime_lost"


class BudgetExhausted(RunError):
    """A budget is used up: the run was stopped, or was not taken."""

    code = "budget_exhausted"
    status = 402


class CommandFailed(RunError):
    """A submitted command ended with an exit code other than 0.

    Attributes:
        exit_code: of the first that did.
    """

    code = "command_failed"
    exit_code: int = 1


class EngineHeadLost(RunError):
    """A process died without which the run's Ray cluster cannot go on: of its head, or a node's raylet."""

    code = "engine_head_lost"


class ResultNotSerializable(RunError):
    """The function finished, but its result cannot be sent back."""

    code = "result_unserialisable"


class ResultTooLarge(RunError):
    """The function finished, but its result is over the size limit."""

    code = "result_too_large"


class ResultUnavailableHere(RunError):
    """The result arrived, but this process cannot load it."""

    code = "result_unavailable_here"


class UntrustedResult(RunError):
    """The result was made by another principal, and loading it would run their code here."""

    code = "untrusted_result"


def error_class(code: str) -> type[ServerlessGpuError]:
    """Return the class with a code, `ServerlessGpuError` for a code this version does not know."""
    queue: list[type[ServerlessGpuError]] = [ServerlessGpuError]
    for cls in queue:
        if cls.code == code:
            return cls
        queue.extend(cls.__subclasses__())
    return ServerlessGpuError
