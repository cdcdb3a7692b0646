"""The groups of a job as bytes: what the server stores, and the learner's process reads.

In:   TrajectoryGroups
Out:  compressed JSON, and the same groups again

Packing and unpacking a large job takes seconds and holds the interpreter's lock. The server hands
the bytes on as they are; unpack them in another process where the event loop must go on.
"""

import json
import zlib
from collections.abc import Sequence

from hone.trajectory import TrajectoryGroup


def pack_groups(groups: Sequence[TrajectoryGroup]) -> bytes:
    # Plain json and not pydantic's: a NaN must come back as one, for the learner to refuse.
    plain = json.dumps([group.model_dump() for group in groups])
    return zlib.compress(plain.encode(), 1)


def unpack_groups(packed: bytes) -> list[TrajectoryGroup]:
    return [TrajectoryGroup(**group) for group in json.loads(zlib.decompress(packed))]
