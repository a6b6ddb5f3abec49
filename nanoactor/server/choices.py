"""From a model's text to the answer of one choice, in pieces or as a whole."""

from __future__ import annotations

import copy
import secrets
from typing import Any

from nanoactor.server.reasoning import ReasoningParser
from nanoactor.server.tool_calls import Arguments, Call, Piece, ToolCallParser

Delta = dict[str, Any]


def _choice(index: int, reason: str | None, **content: Any) -> Delta:
    return {"index": index, **content, "logprobs": None, "finish_reason": reason}


class TextChoice:
    """Of a completion."""

    def __init__(self, index: int, echo: str = "") -> None:
        """`echo`: the prompt, where it is to stand before the answer."""
        self._index = index
        self._echo = echo
        self._text: list[str] = []
        self._reason: str | None = None

    def begin(self) -> list[Delta]:
        """The prompt."""
        return self.push(self._echo) if self._echo else []

    def push(self, text: str) -> list[Delta]:
        """The text itself."""
        if not text:
            return []
        self._text.append(text)
        return [_choice(self._index, None, text=text)]

    def finish(self, reason: str) -> list[Delta]:
        """The reason alone."""
        self._reason = reason
        return [_choice(self._index, reason, text="")]

    def whole(self) -> Delta:
        """The text, with the prompt if it was asked for."""
        return _choice(self._index, self._reason, text="".join(self._text))


class ChatChoice:
    """Of a conversation: content, thoughts and calls."""

    def __init__(
        self,
        index: int,
        reasoning: ReasoningParser | None,
        tools: ToolCallParser | None,
        one_call: bool = False,
    ) -> None:
        """Without a parser, what it would find stays in the content; with `one_call` calls after
        the first are dropped."""
        self._one_call = one_call
        self._index = index
        self._reasoning = reasoning
        self._tools = tools
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._reason: str | None = None

    def begin(self) -> list[Delta]:
        """Return the delta that names the speaker."""
        return [self._member({"role": "assistant", "content": ""})]

    def push(self, text: str) -> list[Delta]:
        """Return what is certain now."""
        thoughts = ""
        if self._reasoning is not None:
            thoughts, text = self._reasoning.push(text)
        return self._deltas(thoughts, self._pieces(text))

    def _pieces(self, text: str) -> list[Piece]:
        if self._tools is not None:
            return self._tools.push(text)
        return [text] if text else []

    def finish(self, reason: str) -> list[Delta]:
        """Return what the parsers held back, then the reason."""
        thoughts = text = ""
        if self._reasoning is not None:
            thoughts, text = self._reasoning.finish()
        pieces = self._pieces(text)
        if self._tools is not None:
            pieces += self._tools.finish()
        deltas = self._deltas(thoughts, pieces)
        self._reason = "tool_calls" if self._calls and reason == "stop" else reason
        return [*deltas, self._member({}, self._reason)]

    def _deltas(self, thoughts: str, pieces: list[Piece]) -> list[Delta]:
        deltas = []
        if thoughts:
            self._thoughts.append(thoughts)
            deltas.append(self._member({"reasoning_content": thoughts}))
        if self._one_call:
            pieces = [piece for piece in pieces if isinstance(piece, str) or piece.index == 0]
        return deltas + [self._member(self._delta(piece)) for piece in pieces]

    def _delta(self, piece: Piece) -> Delta:
        if isinstance(piece, Call):
            call: dict[str, Any] = {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": piece.name, "arguments": ""},
            }
            self._calls.append(call)
            # A copy: arguments are added to the call that is kept.
            return {"tool_calls": [{"index": piece.index, **copy.deepcopy(call)}]}
        if isinstance(piece, Arguments):
            self._calls[piece.index]["function"]["arguments"] += piece.text
            return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
        self._content.append(piece)
        return {"content": piece}

    def _member(self, delta: Delta, reason: str | None = None) -> Delta:
        return _choice(self._index, reason, delta=delta)

    def whole(self) -> Delta:
        """The message."""
        content = "".join(self._content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not self._calls else None,
            "refusal": None,
        }
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = self._calls
        return _choice(self._index, self._reason, message=message)


Choice = TextChoice | ChatChoice
