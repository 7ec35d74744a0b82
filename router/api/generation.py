"""cohort.v1.GenerationService: prompts as text or token ids. Chat's two calls are in `chat`."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from cohort.v1 import generation_pb2 as pb

from router import validation
from router.api import convert
from router.api.answers import StreamAnswer, StreamEvents, UnaryAnswer
from router.api.calls import Call, Calls, Limit
from router.api.chat import ChatCalls
from router.api.encoding import EncodingPool, encode_within
from router.api.requests import Encode, Requests
from router.errors import InvalidArgument
from router.request import Limits
from router.tokenizer import Tokenizer
from router.validation import TOKEN_ID_BYTES

SERVICE = "cohort.v1.GenerationService"
MAX_OTHER_BYTES = 2**20  # of a request beside its prompt
EVENTS = StreamEvents(
    started=lambda started: pb.GenerateStreamResponse(started=started),
    delta=lambda delta: pb.GenerateStreamResponse(delta=delta),
    finished=lambda finished: pb.GenerateStreamResponse(finished=finished),
    done=lambda done: pb.GenerateStreamResponse(done=done),
)


class GenerationService:
    """Generate, GenerateStream, Tokenize and Detokenize."""

    def __init__(self, requests: Requests, tokenizer: Tokenizer, pool: EncodingPool, chat: ChatCalls) -> None:
        self._requests = requests
        self._limits = requests.limits
        self._tokenizer = tokenizer
        self._pool = pool
        self._chat = chat

    def handlers(self, calls: Calls) -> grpc.GenericRpcHandler:
        """What to register with the server."""
        limit = request_limit(self._limits)
        methods = {
            "Generate": calls.unary(f"{SERVICE}/Generate", pb.GenerateRequest, self.generate, limit),
            "GenerateStream": calls.stream(
                f"{SERVICE}/GenerateStream", pb.GenerateStreamRequest, self.generate_stream, limit
            ),
            "Chat": calls.unary(f"{SERVICE}/Chat", pb.ChatRequest, self._chat.chat, limit),
            "ChatStream": calls.stream(f"{SERVICE}/ChatStream", pb.ChatStreamRequest, self._chat.chat_stream, limit),
            "Tokenize": calls.unary(f"{SERVICE}/Tokenize", pb.TokenizeRequest, self.tokenize, limit),
            "Detokenize": calls.unary(f"{SERVICE}/Detokenize", pb.DetokenizeRequest, self.detokenize, limit),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def generate(self, message: pb.GenerateRequest, call: Call) -> pb.GenerateResponse:
        """One prompt, answered when every sequence is finished."""
        answer = UnaryAnswer(message.output.return_token_ids)
        done = await self._requests.run(convert.to_request(message), self._encoder(message), answer, call)
        return pb.GenerateResponse(
            request_id=call.request_id,
            sequences=answer.sequences(),
            usage=convert.to_usage(done),
            timing=convert.to_timing(done),
        )

    async def generate_stream(self, message: pb.GenerateStreamRequest, call: Call) -> None:
        """One prompt, streamed."""
        convert.refuse_unknown_fields(message)
        request = message.request
        answer = StreamAnswer(call, EVENTS, self._limits.model_name, request.output.return_token_ids)
        await answer.end(await self._requests.run(convert.to_request(request), self._encoder(request), answer, call))

    async def tokenize(self, message: pb.TokenizeRequest, call: Call) -> pb.TokenizeResponse:
        """Token ids of a text that could be a prompt."""
        convert.refuse_unknown_fields(message)
        validation.check_model(message.model, self._limits)
        add_special_tokens = message.add_special_tokens if message.HasField("add_special_tokens") else True
        text = message.text
        if not text:
            return pb.TokenizeResponse()
        validation.check_text("text", text, self._limits)
        ids = await self._encode_text("text", text, add_special_tokens)
        return pb.TokenizeResponse(token_ids=ids)

    async def detokenize(self, message: pb.DetokenizeRequest, call: Call) -> pb.DetokenizeResponse:
        """The text of token ids."""
        convert.refuse_unknown_fields(message)
        validation.check_model(message.model, self._limits)
        ids = message.token_ids
        if not ids:
            return pb.DetokenizeResponse()
        validation.check_token_ids("token_ids", ids, self._limits)
        skip = message.skip_special_tokens if message.HasField("skip_special_tokens") else True
        plain = list(ids)
        return pb.DetokenizeResponse(text=await self._pool.run(lambda: self._tokenizer.decode(plain, skip)))

    def _encoder(self, message: pb.GenerateRequest) -> Encode:
        async def encode() -> Sequence[int]:
            if not message.HasField("prompt"):
                raise InvalidArgument("prompt", "one of text and token_ids is required")
            if message.HasField("token_ids"):
                validation.check_token_ids("token_ids", message.token_ids.ids, self._limits)
                return message.token_ids.ids
            add_special_tokens = message.add_special_tokens if message.HasField("add_special_tokens") else True
            validation.check_text("text", message.text, self._limits)
            return await self._encode_text("text", message.text, add_special_tokens)

        return encode

    async def _encode_text(self, field: str, text: str, add_special_tokens: bool) -> list[int]:
        def encode(part: str) -> list[int]:
            return self._tokenizer.encode(part, add_special_tokens)

        return await self._pool.run(lambda: encode_within(text, encode, field, self._limits))


def request_limit(limits: Limits) -> Limit:
    """No request with more bytes can fit; a token id takes at most 5 bytes, and a text has its own bound."""
    prompt_bytes = max(limits.max_prompt_bytes, TOKEN_ID_BYTES * limits.max_total_tokens)
    return Limit(prompt_bytes + MAX_OTHER_BYTES, limits.max_total_tokens)
