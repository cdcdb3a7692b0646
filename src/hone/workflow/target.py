"""Load the object that `package.module:function` or `file.py:function` names.

In:   a target as YAML writes it; the directory of the YAML
Out:  the Python object it names

The directory is on sys.path while the target loads, so that an agent can import the files beside
it. A file is loaded under its own name if no other module has that name.
"""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from hone.errors import ConfigError, HoneError, did_you_mean


def load_target(target: str, directory: Path, *, where: str = "target") -> Any:
    """The object that the target names; `where` is the key of the target, for messages."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name.replace(".", "_").isidentifier():
        raise ConfigError(
            f"{where} is {target!r}; it must be package.module:function, or file.py:function with "
            "the file relative to the YAML"
        )
    with _importable(directory):
        try:
            if place.endswith(".py"):
                module = _from_file(directory / place, where, target)
            else:
                module = importlib.import_module(place)
        except ImportError as error:
            raise ConfigError(
                f"{where}: {target!r} cannot be imported: {error}. Modules are looked for in "
                f"{directory} and where Python finds its packages."
            ) from error
        except (
            Exception,
            SystemExit,
        ) as error:  # a user's module may raise anything when it is loaded
            if isinstance(error, HoneError):
                raise
            raise ConfigError(
                f"{where}: {target!r} cannot be loaded: {error_at(error, directory)}"
            ) from error
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            maybe = did_you_mean(part, getattr(value, "__dict__", ()))
            raise ConfigError(
                f"{where}: {target!r}: {module.__file__ or place} has no {part!r}.{maybe}"
            )
        value = getattr(value, part)
    return value


def source_of(target: str, directory: Path) -> Path | None:
    """The Python file that a target is loaded from; None if there is none."""
    place = target.rpartition(":")[0]
    if place.endswith(".py"):
        file = (directory / place).resolve()
        return file if file.is_file() else None
    try:
        with _importable(directory):
            spec = importlib.util.find_spec(place)
    except (ImportError, ValueError, AttributeError):
        return None  # load_target reports why
    origin = None if spec is None or not spec.has_location else spec.origin
    return Path(origin).resolve() if origin and origin.endswith(".py") else None


def error_at(error: BaseException, directory: Path) -> str:
    """The error with its file and line: the innermost line beside the YAML, if there is one."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: SyntaxError: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if Path(f.filename).is_relative_to(directory.resolve())]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}: {type(error).__name__}: {error}"


@contextmanager
def _importable(directory: Path) -> Iterator[None]:
    entry = str(directory.resolve())
    sys.path.insert(0, entry)
    importlib.invalidate_caches()  # for files that were written after the directory was first read
    try:
        yield
    finally:
        # The loaded module may have changed sys.path; remove only our own entry.
        if entry in sys.path:
            sys.path.remove(entry)


def _from_file(file: Path, where: str, target: str) -> ModuleType:
    file = file.resolve()
    if not file.is_file():
        raise ConfigError(f"{where}: {target!r}: there is no file {file}")
    for name in (file.stem, f"{file.stem}_{sha256(str(file).encode()).hexdigest()[:8]}"):
        loaded = sys.modules.get(name)
        if loaded is None and (name != file.stem or _finds(name, file)):
            return _load(name, file)
        if loaded is not None and _file_of(loaded) == file:
            return loaded
    raise AssertionError(f"two modules of one name at {file}")


def _finds(name: str, file: Path) -> bool:
    """Whether `import name` would load this file, and not another module."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == file


def _load(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, f"{file} is a Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _file_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None
