"""Read what loggers wrote, with the services' own packages. Runs in their environment.

In:   a directory: the output of a run, and `otlp/` with the bodies of requests
Out:  on stdout, JSON: W&B's rows and artifacts, TensorBoard's scalars, OTLP's spans and metrics
"""
# Installed in that environment only.
# pyright: reportMissingImports=false, reportMissingModuleSource=false

import json
import sys
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hone.integrations.loggers.wandb import read_records


def wandb_files(folder: Path) -> dict[str, Any]:
    rows, artifacts, ids, exits = [], [], set(), []
    for path in sorted(folder.glob("loggers/wandb/offline-run-*/run-*.wandb")):
        for record in read_records(path.read_bytes()):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                items = record.history.item
                rows.append(
                    {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
                )
            elif kind == "artifact" and record.artifact.type == "model":
                one = record.artifact
                files = sorted(entry.path for entry in one.manifest.contents)
                artifacts.append([one.name, sorted(one.aliases), files, one.client_id])
            elif kind == "run":
                ids.add((record.run.run_id, record.run.project))
            elif kind == "exit":
                exits.append(record.exit.exit_code)
    tables = [json.loads(p.read_text()) for p in folder.rglob("*.table.json")]
    content = {"rows": rows, "artifacts": artifacts, "ids": sorted(ids), "tables": tables}
    return content | {"exits": exits}


def tensorboard_files(folder: Path) -> dict[str, list[list[float]]]:
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {
        tag: [[one.step, one.value, one.wall_time] for one in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def otlp_bodies(folder: Path) -> dict[str, Any]:
    kinds = {"traces": ExportTraceServiceRequest, "metrics": ExportMetricsServiceRequest}
    return {
        path.name: MessageToDict(kinds[path.name.partition(".")[0]].FromString(path.read_bytes()))
        for path in sorted((folder / "otlp").iterdir())
    }


if __name__ == "__main__":
    place = Path(sys.argv[1])
    read = {
        "wandb": wandb_files(place),
        "tensorboard": tensorboard_files(place),
        "otlp": otlp_bodies(place),
    }
    sys.stdout.write(json.dumps(read))
