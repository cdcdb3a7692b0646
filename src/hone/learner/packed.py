"""The groups of a job as bytes, for the server's store and the learner's process.

In:   TrajectoryGroups
Out:  compressed JSON, and back

Packing and unpacking a large job takes seconds and holds the GIL. The server passes the bytes on
unread; processes with an event loop let another process unpack them.
"""

import json
import zlib
from collections.abc import Sequence

from hone.trajectory import TrajectoryGroup


def pack_groups(groups: Sequence[TrajectoryGroup]) -> bytes:
    # json rather than pydantic, which would turn a NaN into null; the learner refuses NaN.
    plain = json.dumps([group.model_dump() for group in groups])
    return zlib.compress(plain.encode(), 1)


def unpack_groups(packed: bytes) -> list[TrajectoryGroup]:
    return [TrajectoryGroup(**group) for group in json.loads(zlib.decompress(packed))]
