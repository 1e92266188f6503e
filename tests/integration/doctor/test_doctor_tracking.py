"""The doctor's checks of tracking: where it would go, whether that answers, how the home's own servers are."""

from __future__ import annotations

from pathlib import Path

from serverless_gpu.doctor.facts import TrackingServer
from serverless_gpu.doctor.probes.servers import look_at_tracking
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.mlflow_server.server import ServerRecord, place_of


def test_what_is_looked_at(home: Path) -> None:
    place = place_of(Home(home))
    place.make()
    place.note(ServerRecord(stage="failed", port=26570, problem="no flask"))
    seen = look_at_tracking(
        {"SERVERLESS_GPU_HOME": str(home), "MLFLOW_TRACKING_URI": "http://ada:word@127.0.0.1:1/mlflow"}
    )
    assert (seen.off, seen.uri) == ("", "http://…@127.0.0.1:1/mlflow")
    assert "refused" in str(seen.away)
    file = str(place.directory / "mlflow.db")
    assert seen.servers == (
        TrackingServer(
            uri="http://127.0.0.1:26570", stage="failed", problem="no flask", database=f"sqlite:///{file}", file=file
        ),
    )
    off = look_at_tracking({"SERVERLESS_GPU_HOME": str(home), "SERVERLESS_GPU_TRACKING": "0"})
    assert (off.off, off.uri, off.away) == ("SERVERLESS_GPU_TRACKING=0", "", None)
