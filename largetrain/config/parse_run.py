"""The run YAML: safe tags only, repeated keys refused, the line of every key kept.

One departure from YAML 1.1: `2e-5` is a number, as its writer means it (the standard asks for `2.0e-5`).
"""

import math
import re
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from largetrain.config.document import Document, KeyPath, dotted, one_line
from largetrain.errors import ConfigError

CORE_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "map", "seq", "merge")}
MAX_NODES = 100_000
DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9_]*)")  # not 010 (octal) nor 1:30 (base 60), which YAML 1.1 reads as numbers


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads an exponent without a dot as a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_run_text(file: str, text: str) -> Document:
    """Parse a run YAML.

    Raises:
        ConfigError: a syntax error, repeated keys, a tag beyond plain data, a non-finite number, or no mapping.
    """
    reader = _Reader(file)
    data = reader.read(text)
    if data is None:
        data = {}
    if not reader.problems and not isinstance(data, dict):
        reader.problems.append(f"{file}: holds {shown_kind(data)} at the top; `key: value` lines are needed.")
    if reader.problems:
        raise ConfigError(reader.problems)
    return Document(file, data, reader.origins)


def parse_value(text: str) -> Any:
    """The value of `--set KEY=VALUE`, by the same rules: `4`, `2e-5`, `true`, `[0.9, 0.95]`, `{stage: 3}`, text.

    Raises:
        ValueError: it cannot be read; the message says why.
    """
    reader = _Reader("--set")
    try:
        value = reader.read(text)
    except ConfigError as error:
        raise ValueError(error.problems[0].partition(": ")[2]) from None
    if reader.problems:
        raise ValueError(reader.problems[0].partition(": ")[2])
    return value


def shown_kind(value: Any) -> str:
    """What a value is, in words for an error message."""
    kinds = {list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return kinds.get(type(value), "another kind of value")


class _Reader:
    """Builds plain data from YAML nodes and collects every problem on the way."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[str] = []
        self.origins: dict[KeyPath, str] = {}
        self.nodes = 0
        self.open_nodes: list[Node] = []

    def read(self, text: str) -> Any:
        """Data of the one document in `text`; None when it is empty."""
        if not _printable(text):
            raise ConfigError(f"{self.file}: holds control characters: not a YAML text file.")
        self.loader = _Loader(text)
        try:
            node = self.loader.get_single_node()
            return None if node is None else self._build(node, ())
        except yaml.YAMLError as error:
            raise ConfigError(self._syntax(error)) from None

    def _build(self, node: Node, path: KeyPath) -> Any:
        self.nodes += 1
        if self.nodes > MAX_NODES or node in self.open_nodes:
            raise ConfigError(f"{self._at(node)}: aliases expand without end; write the values out.")
        if node.tag not in CORE_TAGS:
            self.problems.append(f"{self._at(node)}: {_tag_problem(node, path)}")
            return None
        self.open_nodes.append(node)
        try:
            if isinstance(node, MappingNode):
                return self._mapping(node, path)
            if isinstance(node, SequenceNode):
                return [self._build(below, (*path, index)) for index, below in enumerate(node.value)]
            assert isinstance(node, ScalarNode)
            return self._scalar(node, path)
        finally:
            self.open_nodes.pop()

    def _mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, ScalarNode) else None
            if key in seen and key is not None:
                where = f"{self._at(key_node)}:{key_node.start_mark.column + 1}"
                name = dotted((*path, key))
                self.problems.append(f"{where}: {name}: written twice (first in line {seen[key]}). Remove one.")
            elif key is not None:
                seen[key] = key_node.start_mark.line + 1
            if key == "<<" and not isinstance(value_node, MappingNode):
                raise ConfigError(f"{self._at(key_node)}: `<<` merges one mapping; write others out.")
        self.loader.flatten_mapping(node)
        built: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                self.problems.append(f"{self._at(key_node)}: a key must be a single word.")
                continue
            key = key_node.value
            place = (*path, key)
            self.origins[place] = self._at(key_node)
            built[key] = self._build(value_node, place)
        return built

    def _scalar(self, node: ScalarNode, path: KeyPath) -> Any:
        try:
            value = self.loader.construct_object(node)
        except (ValueError, OverflowError, TypeError, KeyError, IndexError) as error:
            self.problems.append(f"{self._at(node)}: {dotted(path)}: {node.value!r} cannot be read: {error}.")
            return None
        if isinstance(value, int) and not isinstance(value, bool) and not DECIMAL.fullmatch(node.value):
            way_out = f"write {value}, or quote it to keep the text"
            self.problems.append(f"{self._at(node)}: {dotted(path)}: {node.value} is read as {value}; {way_out}.")
        if isinstance(value, float) and not math.isfinite(value):
            self.problems.append(f"{self._at(node)}: {dotted(path)}: {node.value} is not a finite number.")
        return value

    def _at(self, node: Node) -> str:
        return f"{self.file}:{node.start_mark.line + 1}" if self.file != "--set" else self.file

    def _syntax(self, error: yaml.YAMLError) -> str:
        mark = getattr(error, "problem_mark", None)
        where = f"{self.file}:{mark.line + 1}:{mark.column + 1}" if mark and self.file != "--set" else self.file
        reason = getattr(error, "problem", None) or getattr(error, "reason", None) or "not valid YAML"
        if "\\t" in str(reason):
            reason = "a tab stands where spaces are needed"
        return f"{where}: {one_line(str(reason))}."


def _tag_problem(node: Node, path: KeyPath) -> str:
    name = f"{dotted(path)}: " if path else ""
    if node.tag.endswith(":timestamp"):
        return f"{name}{one_line(node.value)} is read as a date; quote it to keep the text."
    tag = one_line(node.tag.replace("tag:yaml.org,2002:", "!!"))
    return f"{name}the tag {tag} is not accepted: only plain data is read."


def _printable(text: str) -> bool:
    return yaml.reader.Reader.NON_PRINTABLE.search(text) is None
