"""Choices of an answer: conversion of a model's text to deltas, or to a complete choice of the
response."""

from __future__ import annotations

import copy
from typing import Any

from nanoactor.requests.outputs import RequestOutput
from nanoactor.server.logprobs import ChatLogprobs, TextLogprobs
from nanoactor.server.reasoning import ReasoningParser
from nanoactor.server.tool_calls import Arguments, Call, CallFinder, Piece, new_id

Delta = dict[str, Any]


def _choice(index: int, reason: str | None, logprobs: Any = None, **content: Any) -> Delta:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}


class TextChoice:
    """A choice of a text completion, that is, one of its continuations."""

    def __init__(
        self,
        index: int,
        echo: str = "",
        logprobs: TextLogprobs | None = None,
        is_muted: bool = False,
    ) -> None:
        """Create the choice. `echo` is the prompt if the client asked to repeat it. `is_muted`
        omits the generated text."""
        self._index = index
        self._echo = echo
        self.logprobs = logprobs
        self.is_muted = is_muted
        self.prompt_logprobs: list[Any] | None = None
        """Prompt log-probabilities as in the response; None unless requested."""
        self._text: list[str] = []
        self._reason: str | None = None

    def begin(self) -> list[Delta]:
        """Return a delta with the echoed prompt, if any. If its log-probabilities are requested,
        `push_prompt` returns the prompt instead."""
        return self.push(self._echo) if self._echo and self.logprobs is None else []

    def push_prompt(self, output: RequestOutput) -> list[Delta]:
        """Return a delta with the echoed prompt and its log-probabilities, which the first output
        contains. Return no delta if there is no echo, or if log-probabilities are not requested."""
        if self.logprobs is None or not self._echo or output.prompt_logprobs is None:
            return []
        self.logprobs.add_prompt(output.prompt_token_ids, output.prompt_logprobs, self._echo)
        return self.push(self._echo)

    def push(self, text: str) -> list[Delta]:
        """Return a delta with the new text, or no delta if the text is empty."""
        if not text:
            return []
        self._text.append(text)
        return [_choice(self._index, None, self._new_logprobs(), text=text)]

    def reasoning_share(self, tokens: int) -> int:
        """Return 0, because a text completion has no separate reasoning."""
        return 0

    def _new_logprobs(self) -> Any:
        return None if self.logprobs is None else self.logprobs.pop_new()

    def finish(self, reason: str) -> list[Delta]:
        """Return the final delta, which has the finish reason but no text."""
        self._reason = reason
        return [_choice(self._index, reason, self._new_logprobs(), text="")]

    def complete(self) -> Delta:
        """Return the complete choice of the response, including an echoed prompt."""
        logprobs = None if self.logprobs is None else self.logprobs.all_entries()
        choice = _choice(self._index, self._reason, logprobs, text="".join(self._text))
        if self.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self.prompt_logprobs
        return choice


class ChatChoice:
    """A choice of a chat completion: the message's content, reasoning and tool calls."""

    def __init__(
        self,
        index: int,
        reasoning: ReasoningParser | None,
        tools: CallFinder | None,
        single_call: bool = False,
        logprobs: ChatLogprobs | None = None,
        *,
        named_call: bool = False,
    ) -> None:
        """Create the choice. With `reasoning=None`, reasoning stays in the content; with
        `tools=None`, calls do.

        `single_call` drops all calls after the first. `named_call` is True if the request names the
        function to call; the finish reason of a call is then "stop" instead of "tool_calls".
        """
        self.logprobs = logprobs
        self.is_muted = False
        self._single_call = single_call
        self._named_call = named_call
        self._index = index
        self._reasoning = reasoning
        self._tools = tools
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[dict[str, Any]] = []
        """Calls without their arguments."""
        self._arguments: list[list[str]] = []
        """Pieces of the arguments of each call."""
        self._reason: str | None = None
        self._latest = (0, 0)
        """Number of reasoning characters, and of other characters, in the latest piece of text."""

    def begin(self) -> list[Delta]:
        """Return the initial delta, which contains the role."""
        return [self._chat_delta({"role": "assistant", "content": ""})]

    def push_prompt(self, output: RequestOutput) -> list[Delta]:
        """Return no deltas, because the prompt of a chat is not echoed."""
        return []

    def push(self, text: str) -> list[Delta]:
        """Process new text. Return the deltas that can be sent now."""
        thoughts = ""
        if self._reasoning is not None:
            thoughts, text = self._reasoning.push(text)
        self._latest = len(thoughts), len(text)
        return self._with_logprobs(self._deltas(thoughts, self._pieces(text)))

    def reasoning_share(self, tokens: int) -> int:
        """Estimate how many of `tokens`, the tokens of the latest piece of text, are reasoning
        tokens. The estimate is based on the share of reasoning characters. If these tokens have
        not produced any text yet, all of them count if the output is still in its reasoning, and
        none otherwise."""
        if self._reasoning is None:
            return 0
        thoughts, other_characters = self._latest
        if not thoughts and not other_characters:
            return tokens if self._reasoning.is_thinking else 0
        return round(tokens * thoughts / (thoughts + other_characters))

    def _pieces(self, text: str) -> list[Piece]:
        if self._tools is not None:
            return self._tools.push(text)
        return [text] if text else []

    def finish(self, reason: str) -> list[Delta]:
        """Return deltas for the text that the parsers held back, and a final delta with the finish
        reason."""
        thoughts = text = ""
        if self._reasoning is not None:
            thoughts, text = self._reasoning.finish()
        pieces = self._pieces(text)
        if self._tools is not None:
            pieces += self._tools.finish()
        deltas = self._deltas(thoughts, pieces)
        # As in OpenAI's API, the finish reason stays "stop" if the request named the function to
        # call.
        has_calls = self._calls and reason == "stop" and not self._named_call
        self._reason = "tool_calls" if has_calls else reason
        return self._with_logprobs([*deltas, self._chat_delta({}, self._reason)])

    def _with_logprobs(self, deltas: list[Delta]) -> list[Delta]:
        """Add the log-probabilities of all tokens since the previous deltas to the first delta in
        `deltas`, and return `deltas`."""
        if self.logprobs is not None and deltas:
            deltas[0]["logprobs"] = self.logprobs.pop_new()
        return deltas

    def _deltas(self, thoughts: str, pieces: list[Piece]) -> list[Delta]:
        deltas = []
        if thoughts:
            self._thoughts.append(thoughts)
            deltas.append(self._chat_delta({"reasoning_content": thoughts}))
        if self._single_call:
            pieces = [piece for piece in pieces if isinstance(piece, str) or piece.index == 0]
        return deltas + [self._chat_delta(self._delta(piece)) for piece in pieces]

    def _delta(self, piece: Piece) -> Delta:
        if isinstance(piece, Call):
            call: dict[str, Any] = {
                "id": self._tools.new_id() if self._tools is not None else new_id(),
                "type": "function",
                "function": {"name": piece.name, "arguments": ""},
            }
            self._calls.append(call)
            self._arguments.append([])
            # A copy, because `complete` fills in the arguments of the stored call.
            return {"tool_calls": [{"index": piece.index, **copy.deepcopy(call)}]}
        if isinstance(piece, Arguments):
            self._arguments[piece.index].append(piece.text)
            return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
        self._content.append(piece)
        return {"content": piece}

    def _chat_delta(self, delta: Delta, reason: str | None = None) -> Delta:
        return _choice(self._index, reason, delta=delta)

    def complete(self) -> Delta:
        """Return the complete choice, with the message."""
        content = "".join(self._content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not self._calls else None,
            "refusal": None,
        }
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        if self._calls:
            for call, arguments in zip(self._calls, self._arguments, strict=True):
                call["function"]["arguments"] = "".join(arguments)
            message["tool_calls"] = self._calls
        logprobs = None if self.logprobs is None else self.logprobs.all_entries()
        return _choice(self._index, self._reason, logprobs, message=message)


Choice = TextChoice | ChatChoice
