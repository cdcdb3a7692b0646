"""Load the components that a YAML file can name: hone's own, and those of installed plugins.

In:   the entry points of group `hone.components`; the toolkit that hone's own components bring
Out:  a filled registry

hone's own components are those of `hone.composition`, which imports every module with a component.
The command line loads it, and for programs that use the SDK it is hone's own entry point. It is loaded
first, so that no plugin takes a name of hone. Nothing here imports a component: the configuration
knows no workflow, evaluator or trainer.

A plugin that cannot be imported does not stop a run that does not need it. The error about an
unknown `_type` repeats the reason, because that is when a user needs it. The toolkit is imported
only for a `_type` that hone does not have, because importing it takes seconds.
"""

import logging
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Any, Protocol

from pydantic import ValidationInfo

from hone.errors import ConfigError

GROUP = "hone.components"
PACKAGE = "hone-rl"
TOOLKIT = "nvidia-nat-core"
"""The package of NeMo Agent Toolkit."""

logger = logging.getLogger(__name__)


class Toolkit(Protocol):
    """The bridge to NeMo Agent Toolkit, which is imported when one of these is called."""

    def register(self) -> tuple[str, ...]:
        """Register its components; one message for each plugin of it that failed."""
        ...

    def check_section(self, name: str, value: Any) -> None:
        """Raise pydantic's ValidationError for a section that it does not accept."""
        ...


_toolkits: list[Toolkit] = []


def register_toolkit(toolkit: Toolkit) -> None:
    """Called once, by hone's own components."""
    _toolkits[:] = [toolkit]


_composition: list[Callable[[], None]] = []


def compose_with(load: Callable[[], None]) -> None:
    """Load hone's own components with this function, as the command line does."""
    _composition[:] = [load]


@cache
def discover() -> tuple[str, ...]:
    """Load them all, once; returns one message for each plugin that failed."""
    entries = entry_points(group=GROUP)
    own = [entry for entry in entries if entry.dist is not None and entry.dist.name == PACKAGE]
    if _composition:
        _composition[0]()
    elif own:
        own[0].load()
    elif not _toolkits:
        raise ConfigError(
            f"the package {PACKAGE} is not installed, only its files are on the path, so its components "
            "cannot be found: install it with pip, or import hone.composition first"
        )
    return _load_all(entry for entry in entries if entry not in own)


def load_group(group: str) -> tuple[str, ...]:
    """Import the modules of a group of entry points; returns one message for each that failed."""
    return _load_all(entry_points(group=group))


def _load_all(entries: Iterable[EntryPoint]) -> tuple[str, ...]:
    failed = []
    for entry in sorted(entries, key=lambda e: e.name):
        reason = _load(entry)
        if reason is not None:
            failed.append(reason)
            logger.warning("%s", reason)
    return tuple(failed)


@cache
def is_toolkit_installed() -> bool:
    """Whether NeMo Agent Toolkit is installed in this environment."""
    try:
        return bool(version(TOOLKIT))
    except PackageNotFoundError:
        return False


@cache
def load_toolkit() -> tuple[str, ...] | None:
    """Register the components of NeMo Agent Toolkit, once; None where it is not installed.

    Returns one message for each of its plugins that failed.
    """
    discover()  # first, so that hone and its plugins get their names
    if not is_toolkit_installed():
        return None
    return _toolkits[0].register()


def check_toolkit_section(value: Any, info: ValidationInfo) -> Any:
    """A section of NeMo Agent Toolkit, checked by the toolkit; an empty one needs no toolkit."""
    if not value:
        return {}
    if load_toolkit() is None:
        raise ValueError(
            "belongs to NeMo Agent Toolkit, which is not installed in this environment: pip install "
            "'hone-rl[nat]', or remove it and do the same in the code of your function"
        )
    _toolkits[0].check_section(str(info.field_name), value)
    return value


def _load(entry: EntryPoint) -> str | None:
    try:
        entry.load()
    except Exception as error:  # noqa: BLE001  # a third party's module may raise anything
        package = entry.dist.name if entry.dist else "?"
        return (
            f"plugin {entry.name!r} of package {package!r} could not be imported "
            f"({entry.value}: {type(error).__name__}: {error})"
        )
    return None
