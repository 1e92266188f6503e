"""Defines bodies for parts of payloads and outputs, and for objects of captured environments.

    POST /blobs/missing        DigestList → DigestList      the parts that the client must send
    PUT  /blobs/{digest}       bytes, up to BLOB_PART_BYTES → 204; durable, and checked against its name (BLAKE3)

A client uploads a blob in parts, so that an interrupted upload can continue with the missing parts. A `BlobReference`
lists the parts of a blob. No route returns a blob part by its digest alone. Nodes read payloads through routes of the
attempt. Clients read outputs through routes of the run. The server keeps digests secret, because any run whose payload
names a digest can read the part.

    GET    /environments/objects/{key}?start&length          → bytes
    PUT    /environments/objects/{key}                       bytes → 204
    POST   /environments/present         KeyList → KeyList   the existing keys
    POST   /environments/repair          KeyList → KeyList   checks keys; removes and returns unusable objects
    POST   /environments/condemned       KeyList → CondemnedAnswer             the condemned keys
    GET    /environments/list/{prefix}                       → StoredList      (operators)
    POST   /environments/delete          KeyList → 204                         (operators)
    GET    /environments/free                                → Free
    GET    /environments?limit&cursor                        → EnvironmentPage  environments of runs, by last use
    GET    /environments/snapshots/{address}                 → EnvironmentView  units, owners and latest runs
    GET    /environments/diff?old&new                        → EnvironmentDiff

Object keys have the format that `environment.stores.base` defines. Any caller with a key can read the object, so only
operators may list keys. Only operators read the records of garbage collection (`gc/…`).
"""

from __future__ import annotations

from serverless_gpu.wire.base import Answer, Request

NAMES_MAX = 10_000
"""Maximum number of digests or keys in one request."""


class DigestList(Request, frozen=True, kw_only=True):
    """A list of BLAKE3 digests of payload parts."""

    digests: tuple[str, ...]


class KeyList(Request, frozen=True, kw_only=True):
    """A list of keys in an environment store."""

    keys: tuple[str, ...]


class CondemnedAnswer(Answer, frozen=True, kw_only=True):
    """The garbage-collection state of the requested keys.

    Attributes:
        keys: condemned keys, whose objects garbage collection will delete.
        collecting: True if garbage collection may be deleting objects now.
    """

    keys: tuple[str, ...]
    collecting: bool


class StoredView(Answer, frozen=True, kw_only=True):
    """The key and the properties of one object in an environment store."""

    key: str
    size: int
    put_ns: int


class StoredList(Answer, frozen=True, kw_only=True):
    """A list of objects in an environment store."""

    objects: tuple[StoredView, ...]


class Free(Answer, frozen=True, kw_only=True):
    """The free space of the environment store in bytes, or None if unknown."""

    bytes: int | None


class SnapshotView(Answer, frozen=True, kw_only=True):
    """Content of an environment.

    Attributes:
        python: implementation and version of the interpreter.
        size: total size of all files in bytes. `files` is their number.
        units: number of units, such as distributions and directories of code.
        captured_ns: time of the capture in nanoseconds since 1970, or None if unknown.
    """

    python: str
    size: int
    files: int
    units: int
    captured_ns: int | None


class EnvironmentSummary(Answer, frozen=True, kw_only=True):
    """An environment in a list.

    Attributes:
        runs: number of runs that the caller may see. `first_ns` and `last_ns` are the times of the first and last run.
        snapshot: content, or None if the server has not read the snapshot yet or the store no longer has it.
    """

    address: str
    runs: int
    first_ns: int
    last_ns: int
    snapshot: SnapshotView | None


class EnvironmentPage(Answer, frozen=True, kw_only=True):
    """A page of environments.

    Attributes:
        cursor: cursor of the next page, or "" on the last page.
    """

    environments: tuple[EnvironmentSummary, ...]
    cursor: str = ""


class EnvironmentUnit(Answer, frozen=True, kw_only=True):
    """A unit of an environment.

    Attributes:
        kind: "distribution", "unowned" or "code".
        root: kind of the directory that contains the unit: "own", "library" or "code".
        size: total size of the files in bytes. `files` is their number.
    """

    address: str
    kind: str
    name: str
    version: str
    size: int
    files: int
    root: str


class EnvironmentOwner(Answer, frozen=True, kw_only=True):
    """An owner of runs in an environment."""

    owner: str
    runs: int
    last_ns: int


class EnvironmentRunView(Answer, frozen=True, kw_only=True):
    """A run in an environment."""

    run_id: str
    name: str
    owner: str
    state: str
    created_ns: int


class EnvironmentView(Answer, frozen=True, kw_only=True):
    """An environment.

    Attributes:
        runs: number of runs that the caller may see. `first_ns` and `last_ns` are the times of the first and last run.
        units: largest units, largest first.
        owners: owners of runs, by last use.
        latest: latest runs, newest first.
        interpreter: the interpreter with its platform.
        left_out: messages about files that the capture omitted.
        variables: names of the start-up variables that the environment sets.
    """

    address: str
    snapshot: SnapshotView
    runs: int
    first_ns: int | None
    last_ns: int | None
    units: tuple[EnvironmentUnit, ...]
    owners: tuple[EnvironmentOwner, ...]
    latest: tuple[EnvironmentRunView, ...]
    interpreter: str
    left_out: tuple[str, ...]
    variables: tuple[str, ...]


class EnvironmentDiff(Answer, frozen=True, kw_only=True):
    """The differences between two environments.

    Attributes:
        changes: differences as sentences.
        count: number of differences, which can be larger than the list.
        variables_added: names of start-up variables that only the new environment sets.
        variables_removed: names of start-up variables that only the old environment sets.
    """

    old: str
    new: str
    changes: tuple[str, ...]
    count: int
    variables_added: tuple[str, ...] = ()
    variables_removed: tuple[str, ...] = ()
