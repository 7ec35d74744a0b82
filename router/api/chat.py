"""Chat and ChatStream of cohort.v1.GenerationService."""

from __future__ import annotations

from collections.abc import Sequence

from cohort.v1 import generation_pb2 as pb

from router.api import convert
from router.api.answers import StreamAnswer, StreamEvents, UnaryAnswer
from router.api.calls import Call
from router.api.encoding import EncodingPool
from router.api.requests import Encode, Requests
from router.chat import ChatMessage, ChatTemplates
from router.errors import ContextLengthExceeded, InvalidArgument

ROLES = {
    pb.CHAT_ROLE_SYSTEM: "system",
    pb.CHAT_ROLE_USER: "user",
    pb.CHAT_ROLE_ASSISTANT: "assistant",
    pb.CHAT_ROLE_TOOL: "tool",
}
EVENTS = StreamEvents(
    started=lambda started: pb.ChatStreamResponse(started=started),
    delta=lambda delta: pb.ChatStreamResponse(text_delta=delta),
    finished=lambda finished: pb.ChatStreamResponse(finished=finished),
    done=lambda done: pb.ChatStreamResponse(done=done),
)


class ChatCalls:
    """The chat calls: as Generate, with the prompt made of messages."""

    def __init__(self, requests: Requests, templates: ChatTemplates, pool: EncodingPool) -> None:
        self._requests = requests
        self._limits = requests.limits
        self._templates = templates
        self._pool = pool

    async def chat(self, message: pb.ChatRequest, call: Call) -> pb.ChatResponse:
        """One conversation turn, answered when every answer is finished."""
        answer = UnaryAnswer(message.output.return_token_ids)
        done = await self._requests.run(convert.to_request(message), self._encoder(message), answer, call)
        return pb.ChatResponse(
            request_id=call.request_id,
            answers=[_answer(sequence) for sequence in answer.sequences()],
            usage=convert.to_usage(done),
            timing=convert.to_timing(done),
        )

    async def chat_stream(self, message: pb.ChatStreamRequest, call: Call) -> None:
        """One conversation turn, streamed."""
        convert.refuse_unknown_fields(message)
        request = message.request
        answer = StreamAnswer(call, EVENTS, self._limits.model_name, request.output.return_token_ids)
        await answer.end(await self._requests.run(convert.to_request(request), self._encoder(request), answer, call))

    def _encoder(self, message: pb.ChatRequest) -> Encode:
        async def encode() -> Sequence[int]:
            messages = _messages(message)
            limit = self._limits.max_prompt_bytes
            if sum(len(entry.content) for entry in messages) > limit:
                description = f"more than {limit} characters cannot fit {self._limits.max_total_tokens} tokens"
                raise ContextLengthExceeded("messages", description, self._limits.max_total_tokens)
            return await self._pool.run(lambda: self._templates.encode(messages, message.chat_template, limit))

        return encode


def _messages(message: pb.ChatRequest) -> list[ChatMessage]:
    if not message.messages:
        raise InvalidArgument("messages", "must not be empty")
    found = []
    for index, entry in enumerate(message.messages):
        convert.refuse_unknown_fields(entry, f"messages[{index}].")
        if entry.role not in ROLES:
            known = ", ".join(pb.ChatRole.Name(role) for role in ROLES)
            raise InvalidArgument(f"messages[{index}].role", f"must be one of {known}, not {entry.role}")
        if not entry.content:
            raise InvalidArgument(f"messages[{index}].content", "must have at least one part")
        for number, part in enumerate(entry.content):
            if not part.HasField("part"):
                raise InvalidArgument(f"messages[{index}].content[{number}]", "must be a text")
        found.append(ChatMessage(ROLES[entry.role], "".join(part.text for part in entry.content)))
    return found


def _answer(sequence: pb.GeneratedSequence) -> pb.ChatAnswer:
    message = pb.ChatMessage(role=pb.CHAT_ROLE_ASSISTANT, content=[pb.ContentPart(text=sequence.text)])
    return pb.ChatAnswer(
        index=sequence.index,
        message=message,
        token_ids=sequence.token_ids,
        logprobs=sequence.logprobs,
        finish_reason=sequence.finish_reason,
        matched_stop=sequence.matched_stop if sequence.HasField("matched_stop") else None,
    )
