"""JSONPath, as `result_json_path`, json_match and http workflows use it.

In:   a path (RFC 9535; the library's additions are allowed) and a value of JSON
Out:  the values at the path, in order
"""

from typing import Any

from hone.errors import ConfigError


def json_path(path: str) -> str:
    """The parsed path; raises ConfigError if it is not a JSONPath."""
    if path == "$":
        return path
    import jsonpath  # imported here: most runs use only `$`, which needs no library

    try:
        jsonpath.compile(path)
    except jsonpath.JSONPathError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{path!r} is not a JSONPath ({reason}); for example $.answer") from None
    return path


def values_at(path: str, value: Any) -> list[Any]:
    """The values at a valid path; `$` is the value itself."""
    if path == "$":
        return [value]
    import jsonpath

    return list(jsonpath.findall(path, value)) if isinstance(value, dict | list) else []
