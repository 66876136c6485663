"""Tools that a policy can call: their schemas, and parsing of calls in its text."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kedge_base.errors import EnvError
from kedge_base.texts import error_text
from kedge_base.thoughts import answer_of

RESERVED = frozenset({"reset", "step", "get_reward", "privileged", "close"})
"""Public methods of an environment that are not tools."""

HERMES = "tool_call"
"""The tag of Hermes, Qwen 2.5 and later, GLM, and others."""
UNQUOTED = re.compile(r"<function=([^>\s]+)>(.*)</function>|([\w.-]+)\s*((?:<arg_key>.*)?)", re.DOTALL)
"""A call in this tag without JSON, as Qwen 3.5 and GLM 4.5 write it: a name, and arguments in tags."""
ARGUMENT = re.compile(
    r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>|\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>",
    re.DOTALL,
)
PYTHON = {"True": True, "False": False, "None": None}
MISTRAL = re.compile(r"\[TOOL_CALLS\]\s*(?=\[)")
LLAMA = re.compile(r"\A\s*(?:<\|python_tag\|>\s*)?(\{.*\})\s*\Z", re.DOTALL)
LLAMA_ARGUMENTS = re.compile(r"\"(?:parameters|arguments)\"")
"""In Llama 3, the whole turn is a call."""


@dataclass(frozen=True)
class Call:
    """A call of a tool.

    Attributes:
        name: The tool; empty if the call cannot be read.
        arguments: Its arguments by name.
        fault: The reason why the call cannot be made, for the policy to read; empty if it can.
    """

    name: str
    arguments: Mapping[str, Any]
    fault: str = ""


@dataclass(frozen=True)
class Tools:
    """The tools of an environment: its public methods.

    Attributes:
        schemas: The JSON schema of each tool, in the form for chat templates.
    """

    schemas: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, environment: Any, name: str) -> Tools:
        """The tools of an environment.

        Raises:
            EnvError: It has no tool, or one without a docstring or type hints; transformers is not installed.
        """
        try:
            from transformers.utils.chat_template_utils import get_json_schema
        except ImportError as error:
            raise EnvError(f"{name} has tools, whose description needs the package transformers") from error
        schemas: list[Mapping[str, Any]] = []
        for each in dir(type(environment)):
            static = inspect.getattr_static(environment, each)  # properties may need `reset` first
            is_method = inspect.isfunction(static) or isinstance(static, (staticmethod, classmethod))
            if each.startswith("_") or each in RESERVED or not is_method:
                continue
            try:
                schemas.append(get_json_schema(getattr(environment, each)))
            except Exception as error:
                raise EnvError(
                    f"{name}.{each} is not a tool: {error_text(error)}; a tool has type hints and a docstring with "
                    "Args:, and a method that is not a tool a name that starts with _"
                ) from error
        if not schemas:
            raise EnvError(
                f"{name} is not an environment: it has neither reset(row, seed) with step(text), nor a public method "
                "that is a tool, nor is it an agent: a function that takes a row and a client"
            )
        return cls(schemas)

    @property
    def names(self) -> list[str]:
        """The names of the tools."""
        return list(self._functions)

    @property
    def _functions(self) -> dict[str, Mapping[str, Any]]:
        """The description of each tool, by its name."""
        return {str(schema["function"]["name"]): schema["function"] for schema in self.schemas}

    @property
    def description(self) -> str:
        """Description of the tools, for a template that does not show them or writes calls that kedge cannot read."""
        listed = "\n".join(f"- {_signature(schema['function'])}" for schema in self.schemas)
        return (
            "You can use tools. To use one, write its arguments as JSON in a tag with its name, such as "
            f"{self.sample_text}, and stop: the next message has the result.\n{listed}"
        )

    @property
    def sample(self) -> dict[str, Any]:
        """A call of the first tool, with an example of each argument: its `name` and `arguments`."""
        function = self.schemas[0]["function"]
        return {"name": function["name"], "arguments": _example(function)}

    @property
    def sample_text(self) -> str:
        """The sample call written with plain tags."""
        name = self.sample["name"]
        return f"<{name}>{json.dumps(self.sample['arguments'])}</{name}>"

    def reads_sample(self, text: str) -> bool:
        """True if the only call in a turn is the sample."""
        return self.calls_in(text) == [Call(**self.sample)]

    def calls_in(self, text: str) -> list[Call]:
        """Parse the calls in a turn, in the order of the text.

        The formats are those of Hermes and Qwen (`<tool_call>{"name": …, "arguments": {…}}</tool_call>`), Qwen 3.5 and
        Nemotron (`<tool_call><function=NAME><parameter=KEY>…`), GLM (`<tool_call>NAME<arg_key>…`), Mistral
        (`[TOOL_CALLS][…]`), Llama 3 (the turn is one JSON object) and plain tags (`<NAME>{…}</NAME>`, or the only
        argument as text). Unclosed calls and calls in a thought are ignored. All others are made, even in prose or in a
        block of code.
        """
        text = answer_of(text) or ""
        if marked := list(_closed(text, [HERMES])):
            return [self._read(inner) for _, inner in marked]
        if mistral := MISTRAL.search(text):
            try:
                entries, _ = json.JSONDecoder().raw_decode(text, mistral.end())
                return [self._call(entry) for entry in entries]
            except (ValueError, RecursionError) as error:
                return [_unreadable(error)]
        if (llama := LLAMA.match(text)) and LLAMA_ARGUMENTS.search(llama[1]):
            return [self._read(llama[1])]
        return list(self._tagged(text))

    def text_before_calls(self, text: str) -> str:
        """Return the text before the first call in a turn, with its thought."""
        answer = answer_of(text) or ""
        tags = "|".join(map(re.escape, [HERMES, *self.names]))
        before = re.split(rf"<(?:{tags})>|\[TOOL_CALLS\]|\A\s*(?:<\|python_tag\|>\s*)?{{", answer)[0]
        return f"{text[: text.rfind(answer)]}{before}".rstrip()

    def call(self, environment: Any, call: Call) -> Any:
        """Call a tool; return its result, which may have to be awaited.

        Raises:
            ValueError: The call cannot be made; the message is for the policy.
        """
        if call.fault:
            raise ValueError(call.fault)
        method = getattr(environment, call.name)
        try:
            inspect.signature(method).bind(**call.arguments)
        except TypeError as error:
            raise ValueError(f"{call.name}: {error}") from None
        return method(**call.arguments)

    def _read(self, text: str) -> Call:
        if match := UNQUOTED.fullmatch(text):
            name, written = match[1] or match[3], match[2] or match[4] or ""
            arguments: dict[str, Any] = {}
            at = 0
            while argument := ARGUMENT.match(written, at):
                key, value, other, inner = argument.groups("")
                arguments[key or other] = self._typed(name, key or other, value or inner)
                at = argument.end()
            if not written[at:].strip():
                return self._checked(name, arguments)
        try:
            return self._call(json.loads(text))
        except (ValueError, RecursionError) as error:
            return _unreadable(error)

    def _call(self, entry: Any) -> Call:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
            return Call("", {}, 'a call is {"name": ..., "arguments": {...}}')
        arguments = entry.get("arguments", entry.get("parameters", {}))
        if isinstance(arguments, str):  # as OpenAI writes them
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                return _unreadable(error)
        return self._checked(entry["name"], arguments)

    def _checked(self, name: str, arguments: Any) -> Call:
        if name not in self.names:
            return Call("", {}, f"there is no tool {name[:60]!r}; the tools are {', '.join(self.names)}")
        if not isinstance(arguments, Mapping):
            return Call(name, {}, f"{name}: the arguments are a JSON object")
        return Call(name, {str(key): value for key, value in arguments.items()})

    def _typed(self, name: str, key: str, text: str) -> Any:
        """Parse an argument that is written as text; one that is not JSON stays a text."""
        if _parameters(self._functions.get(name, {})).get(key, {}).get("type") == "string":
            return text
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return PYTHON.get(text, text)

    def _tagged(self, text: str) -> Iterator[Call]:
        for name, inner in _closed(text, self.names):
            parameters = _parameters(self._functions[name])
            try:
                value = json.loads(inner) if inner else {}
            except (ValueError, RecursionError) as error:
                value = inner
                if len(parameters) != 1:
                    yield _unreadable(error)
                    continue
            if not isinstance(value, Mapping) and len(parameters) == 1:
                [(key, about)] = parameters.items()
                value = {key: inner if about.get("type") == "string" else value}
            yield self._checked(name, value)


def _closed(text: str, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Find closed tags of these names and the texts in them; of two consecutive opening tags, the second one counts."""
    tags = "|".join(map(re.escape, names))
    for match in re.finditer(rf"<({tags})>((?:(?!<\1>).)*?)</\1>", text, re.DOTALL):
        yield match[1], match[2].strip()


def _unreadable(error: Exception) -> Call:
    return Call("", {}, f"the call cannot be read as JSON ({error_text(error)[:80]})")


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    return function.get("parameters", {}).get("properties", {})


def _signature(function: Mapping[str, Any]) -> str:
    properties = _parameters(function)
    required = function.get("parameters", {}).get("required", [])
    arguments = ", ".join(
        f"{name}{'' if name in required else '?'}: {_kind(about)}" for name, about in properties.items()
    )
    described = "; ".join(
        f"{name}: {about['description']}" for name, about in properties.items() if "description" in about
    )
    return f"{function['name']}({arguments}): {function.get('description', '')}" + (
        f" ({described})" if described else ""
    )


def _kind(about: Mapping[str, Any]) -> str:
    """The type of an argument, or the values that it allows."""
    if choices := about.get("enum"):
        return " | ".join(map(json.dumps, choices))
    kinds = about.get("type", "any")
    return " | ".join(map(str, kinds)) if isinstance(kinds, list) else str(kinds)


def _example(function: Mapping[str, Any]) -> dict[str, Any]:
    values = {"string": "...", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}
    return {
        name: about["enum"][0] if about.get("enum") else values.get(str(about.get("type")), "...")
        for name, about in _parameters(function).items()
    }
