"""Names of the user's own classes: `package.module:Name`, looked up and checked before they are called."""

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder, all_suffixes
from types import ModuleType
from typing import Any

from largetrain.errors import ConfigError


def load_target(path: str, key: str) -> Any:
    """Import what `path` names; modules in the current directory are found too.

    Args:
        path: `package.module:Name`; the name may be dotted (`module:Outer.Inner`).
        key: where the path was written, for messages ("model.target").

    Raises:
        ConfigError: the path is malformed, the module cannot be imported, or it has no such name.
    """
    module_name, attributes = _split(path, key)
    found: Any = _import(module_name, path, key)
    for name in attributes.split("."):
        if not hasattr(found, name):
            nearest = difflib.get_close_matches(name, dir(found), n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else "check the spelling."
            raise ConfigError(f"{key}: {path!r}: {module_name} ({_file_of(module_name)}) has no {name!r}; {hint}")
        found = getattr(found, name)
    return found


def find_target(path: str, key: str) -> None:
    """Check, importing nothing, that the module which `path` names can be found.

    Raises:
        ConfigError: the path is malformed, or there is no such module in the current directory or on Python's path.
    """
    module_name, _ = _split(path, key)
    if module_name in sys.modules:
        return
    first, *below = module_name.split(".")
    # a top-level name may also be known to a finder of an editable install; neither finder imports anything
    spec = PathFinder.find_spec(first, [os.getcwd()]) or importlib.util.find_spec(first)
    if spec is None:
        raise ConfigError(f"{key}: {path!r}: {_no_module(first)}")
    found, folders = first, list(spec.submodule_search_locations or ())
    for name in below:
        if not folders:
            raise ConfigError(f"{key}: {path!r}: {found} is a single file, so it holds no module {name!r}.")
        found = f"{found}.{name}"
        places = [os.path.join(folder, name) for folder in folders]
        folders = [place for place in places if os.path.isdir(place)]
        if not folders and not any(os.path.isfile(place + suffix) for place in places for suffix in all_suffixes()):
            raise ConfigError(f"{key}: {path!r}: {_no_module(found)}")


def _split(path: str, key: str) -> tuple[str, str]:
    module_name, colon, attributes = path.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module_name.split("."), *attributes.split("."))):
        raise ConfigError(f"{key}: {path!r} is not of the form package.module:Name.")
    return module_name, attributes


def _no_module(name: str) -> str:
    return f"there is no module {name!r} in {os.getcwd()} or on PYTHONPATH; start in its folder or install it."


def _import(module_name: str, path: str, key: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:  # `python -m` has it there, the console script has not
        sys.path.insert(0, here)
        importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            reason = _no_module(error.name)
        else:
            reason = f"importing {module_name} failed: {error}."
        raise ConfigError(f"{key}: {path!r}: {reason}") from error
    except Exception as error:  # whatever the user's file raises: report it under the key that named the file
        raise ConfigError(
            f"{key}: {path!r}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error


def _file_of(module_name: str) -> str:
    return getattr(sys.modules[module_name], "__file__", None) or "built in"


def check_arguments(target: Callable[..., Any], args: Mapping[str, Any], path: str, key: str) -> None:
    """Check keyword arguments against the signature of `target` before it is called.

    So that a TypeError raised inside the user's own code is not mistaken for a wrong argument.

    Args:
        target: what `load_target` gave.
        args: the keyword arguments.
        path: `package.module:Name`, for messages.
        key: the key that holds `args` ("model.args").

    Raises:
        ConfigError: one line for each unknown or missing argument, or `target` cannot be called.
    """
    if not callable(target):
        raise ConfigError(f"{key}: {path!r} is of type {type(target).__name__}, not a class or function to call.")
    try:
        parameters = inspect.signature(target).parameters.values()
    except ValueError:  # some built-in callables have no signature: the call itself will tell
        return
    keyword = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [p.name for p in keyword]
    problems = []
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name in args:
            if name not in names:
                nearest = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {nearest[0]!r}?" if nearest else f"it takes: {', '.join(names) or 'nothing'}."
                problems.append(f"{key}.{name}: {path!r} has no such parameter; {hint}")
    for parameter in keyword:
        if parameter.default is parameter.empty and parameter.name not in args:
            problems.append(f"{key}.{parameter.name}: is missing; {path!r} requires it.")
    if problems:
        raise ConfigError(problems)
