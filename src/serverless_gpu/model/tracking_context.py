"""The tracking context of a run: its MLflow destination, as the client found it, and its content.

Values and rules; who speaks to MLflow is `serverless_gpu.tracking`, who does so for a run is the node's monitor.
"""

from __future__ import annotations

import msgspec


class Tracking(msgspec.Struct, frozen=True, kw_only=True):
    """The MLflow destination of a run, as its client resolved it at the call.

    One of `uri` and `store` says where; with neither it is the home's own MLflow server.

    Attributes:
        uri: of an MLflow server, http or https, without credentials: those stay in the caller's variables.
        store: of the caller's, with no server in front of it (``sqlite:////…``, a directory): the node's home puts one
            there.
        experiment: name; made if it is not there. "" where `experiment_id` says which.
        experiment_id: of one that is there.
        run_id: an MLflow run that is continued and stays its maker's to end; "" makes one.
        parent_id: the MLflow run below which it is nested, or "".
        run_name: of a run that is made.
        tags: of the source: user, program, commit.
        params: of the call, as text.
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
