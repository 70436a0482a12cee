"""Bodies to parameters: prompts, messages, limits across fields."""

import pytest

from headrace.serving.edge.bodies import DEFAULT_COMPLETION_TOKENS, ParsedBody, parse_body
from headrace.serving.edge.errors import ApiError
from headrace.serving.edge.fields import MAX_MESSAGES, MAX_PROMPTS, Endpoint
from headrace.serving.edge.pacing import Pacing

HI = [{"role": "user", "content": "hi"}]


def chat(**fields: object) -> ParsedBody:
    return parse_body(Endpoint.CHAT, {"messages": HI} | fields)


def completion(**fields: object) -> ParsedBody:
    return parse_body(Endpoint.COMPLETION, {"prompt": "hi"} | fields)


def refusal(endpoint: Endpoint, **fields: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_body(endpoint, fields)
    return caught.value


def refused_message(**message: object) -> ApiError:
    return refusal(Endpoint.CHAT, messages=[*HI, message])


def content_of(**message: object) -> object:
    parsed = chat(messages=[*HI, message])
    assert parsed.chat is not None
    return parsed.chat.messages[1]["content"]


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("a", ("a",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["a", [1]], ("a", (1,))),
        ([[]], ((),)),
    ],
)
def test_prompts(prompt: object, parsed: object) -> None:
    assert completion(prompt=prompt).prompts == parsed


@pytest.mark.parametrize(
    ("prompt", "code", "param"),
    [
        ([], "empty_prompt", "prompt"),
        (5, "invalid_type", "prompt"),
        ({}, "invalid_type", "prompt"),
        ([1, "a"], "invalid_type", "prompt[1]"),
        ([True], "invalid_type", "prompt[0]"),
        ([1.0], "invalid_type", "prompt[0]"),
        ([-1], "invalid_value", "prompt[0]"),
        ([2**40], "invalid_value", "prompt[0]"),
        (["a", 5], "invalid_type", "prompt[1]"),
        ([[1], [None]], "invalid_type", "prompt[1][0]"),
        (["x"] * (MAX_PROMPTS + 1), "invalid_value", "prompt"),
    ],
)
def test_odd_prompts(prompt: object, code: str, param: str) -> None:
    error = refusal(Endpoint.COMPLETION, prompt=prompt)
    assert (error.code, error.param) == (code, param)


def test_defaults_of_the_two_endpoints() -> None:
    assert completion().max_tokens == DEFAULT_COMPLETION_TOKENS == 16
    assert chat().max_tokens is None
    for parsed in (chat(), completion()):
        assert parsed.sampling.temperature == 1.0
        assert parsed.sampling.num_logprobs is None
        assert not parsed.has_seed


def test_max_completion_tokens_is_another_name() -> None:
    assert chat(max_completion_tokens=5).max_tokens == 5
    assert completion(max_completion_tokens=5, max_tokens=5).max_tokens == 5
    error = refusal(Endpoint.CHAT, messages=HI, max_tokens=4, max_completion_tokens=5)
    assert error.code == "conflicting_fields"


def test_logprobs() -> None:
    assert completion(logprobs=0).sampling.num_logprobs == 0
    assert completion(logprobs=20).sampling.num_logprobs == 20
    assert chat(logprobs=True).sampling.num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).sampling.num_logprobs == 3
    assert chat(logprobs=False, top_logprobs=0).sampling.num_logprobs is None
    assert refusal(Endpoint.COMPLETION, prompt="x", logprobs=21).param == "logprobs"
    assert refusal(Endpoint.COMPLETION, prompt="x", logprobs=True).param == "logprobs"
    assert refusal(Endpoint.CHAT, messages=HI, logprobs=1).param == "logprobs"
    assert refusal(Endpoint.CHAT, messages=HI, top_logprobs=3).param == "top_logprobs"


def test_stop_strings() -> None:
    assert completion(stop="a").stop == ("a",)
    assert completion(stop=["a", "b", "a"]).stop == ("a", "b")
    assert completion(stop=[]).stop == ()
    for stop in ("", ["a", ""], ["a"] * 17, "x" * 257, [5], 5, {"a": 1}):
        error = refusal(Endpoint.COMPLETION, prompt="x", stop=stop)
        assert error.param is not None
        assert error.param.startswith("stop")


@pytest.mark.parametrize(
    "bias",
    [{"x": 1}, {"1": 101}, {"1": "1"}, {"-1": 1}, {"1": None}, {"1": True}, {"01": 1, "1": 1}, [1], {"1" * 11: 1}],
)
def test_odd_logit_bias(bias: object) -> None:
    error = refusal(Endpoint.COMPLETION, prompt="x", logit_bias=bias)
    assert error.param is not None
    assert error.param.startswith("logit_bias")


def test_streaming_options() -> None:
    options = chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}).options
    assert (options.stream, options.include_usage, options.continuous_usage) == (True, True, True)
    assert refusal(Endpoint.CHAT, messages=HI, stream_options={"continuous_usage_stats": True}).status == 400
    assert refusal(Endpoint.CHAT, messages=HI, stream_options=[]).code == "invalid_type"


def test_options_of_the_pace_and_the_size_of_chunks() -> None:
    plain = chat(stream_options={"chunk_tokens": None, "include_obfuscation": None}).options
    assert (plain.pacing, plain.include_obfuscation) == (Pacing(), False)
    options = chat(stream_options={"chunk_tokens": 1024, "chunk_ms": 10_000, "include_obfuscation": True}).options
    assert (options.pacing, options.include_obfuscation) == (Pacing(tokens=1024, ms=10_000), True)
    for name, value in (("chunk_tokens", 0), ("chunk_tokens", 1025), ("chunk_ms", 0), ("chunk_ms", 10_001)):
        error = refusal(Endpoint.COMPLETION, prompt="x", stream_options={name: value})
        assert (error.param, error.code) == (f"stream_options.{name}", "invalid_value")


TEXT = {"type": "text", "text": "a"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_text_parts_are_joined_alike_for_every_role(role: str) -> None:
    assert content_of(role=role, content="a") == "a"
    assert content_of(role=role, content="") == ""
    assert content_of(role=role, content=[TEXT, {"type": "text", "text": "b"}]) == "ab"


def test_null_content_goes_with_tool_calls_only() -> None:
    assert content_of(role="assistant", content=None, tool_calls=[CALL]) == ""
    assert content_of(role="assistant", tool_calls=[CALL]) == ""
    for message in ({"content": None}, {}, {"content": None, "tool_calls": []}, {"content": None, "tool_calls": None}):
        assert refused_message(role="assistant", **message).param == "messages[1].content"


@pytest.mark.parametrize(
    "content", [None, 5, {}, [], True, ["a"], [5], [{"type": "text"}], [{"text": "a"}], [TEXT | {"x": 1}]]
)
def test_odd_content_names_the_message(content: object) -> None:
    error = refused_message(role="user", content=content)
    assert error.status == 400
    assert error.param is not None
    assert error.param.startswith("messages[1].content")


def test_an_image_part_names_its_place() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:secret"}}
    error = refused_message(role="user", content=[TEXT, image])
    assert (error.code, error.param) == ("invalid_message", "messages[1].content[1]")
    assert "secret" not in error.message


@pytest.mark.parametrize("role", ["Developer", "DEVELOPER", "", None, 5, "x" * 100_000, ["user"]])
def test_roles_are_named(role: object) -> None:
    error = refused_message(role=role, content="a")
    assert (error.code, error.param) == ("invalid_message", "messages[1].role")
    assert len(error.message) < 200


def test_what_the_template_would_drop_is_refused() -> None:
    assert refused_message(role="user", content="a", name="bob").param == "messages[1].name"
    assert refused_message(role="assistant", content="a", reasoning_content="hm").code == "unsupported_field"
    assert refused_message(role="user", content="a", contents="b").code == "unknown_field"
    assert refused_message(role="user", content="a", tool_calls=[CALL]).code == "invalid_message"
    assert refused_message(role="user", content="a", tool_call_id="c").code == "invalid_message"
    assert refused_message(role="assistant", content="a", tool_calls=[CALL | {"x": 1}]).code == "unknown_field"
    assert refused_message(role="assistant", content="a", tool_calls=[{}]).code == "invalid_type"


def test_messages_as_the_sdk_echoes_them_are_taken() -> None:
    echoed = {"role": "assistant", "content": "a", "refusal": None, "audio": None, "function_call": None,
              "tool_calls": None, "annotations": []}  # fmt: skip
    assert content_of(**echoed) == "a"
    tool = {"role": "tool", "content": "b", "tool_call_id": "c"}
    parsed = chat(messages=[*HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}, tool])
    assert parsed.chat is not None
    assert parsed.chat.messages[1]["tool_calls"] == [CALL]
    assert parsed.chat.messages[2] == tool


@pytest.mark.parametrize("messages", [[], {}, "hi", 5, [None], ["hi"], HI * (MAX_MESSAGES + 1)])
def test_odd_message_lists(messages: object) -> None:
    assert refusal(Endpoint.CHAT, messages=messages).status == 400


def test_prefill_and_generation_prompt_contradict() -> None:
    prefill = [*HI, {"role": "assistant", "content": "The answer is "}]
    parsed = chat(messages=prefill, continue_final_message=True)
    assert parsed.chat is not None
    assert (parsed.chat.continue_final_message, parsed.chat.add_generation_prompt) == (True, False)
    both = refusal(Endpoint.CHAT, messages=prefill, continue_final_message=True, add_generation_prompt=True)
    assert both.code == "conflicting_fields"
    assert refusal(Endpoint.CHAT, messages=HI, continue_final_message=True).code == "conflicting_fields"


def test_template_arguments_are_scalars() -> None:
    parsed = chat(chat_template_kwargs={"a": False, "b": 1, "c": "x", "d": None})
    assert parsed.chat is not None
    assert parsed.chat.variables == {"a": False, "b": 1, "c": "x"}
    for value in ([1], {"a": 1}, "x" * 1025, 10**400):
        error = refusal(Endpoint.CHAT, messages=HI, chat_template_kwargs={"a": value})
        assert (error.code, error.param) == ("invalid_value", "chat_template_kwargs")
    assert refusal(Endpoint.CHAT, messages=HI, chat_template_kwargs=[]).code == "invalid_type"
    assert refusal(Endpoint.CHAT, messages=HI, chat_template_kwargs={str(i): 1 for i in range(17)}).status == 400


@pytest.mark.parametrize("name", ["chat_template", "Chat_Template", "chat_Template"])
def test_a_template_in_the_body_is_refused(name: str) -> None:
    loop = "{% for a in range(99999) %}x{% endfor %}"
    error = refusal(Endpoint.CHAT, messages=HI, **{name: loop})
    assert error.status == 400
    assert "chat_template" in error.message
    assert loop not in error.message


def test_required_fields() -> None:
    assert refusal(Endpoint.CHAT).code == "missing_field"
    assert refusal(Endpoint.COMPLETION).param == "prompt"
    assert refusal(Endpoint.COMPLETION, messages=HI).code == "unknown_field"


def test_a_warm_up_is_held_to_the_same_rules() -> None:
    with pytest.raises(ApiError) as refused:
        parse_body(Endpoint.COMPLETION, {"prompt": "x", "generate": False, "max_tokens": 1, "max_completion_tokens": 2})
    assert refused.value.code == "conflicting_fields"
