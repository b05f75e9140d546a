"""Attacks on `strop serve`, mostly over raw sockets.

Each ends in a 4xx (or a closed connection) in OpenAI's form within a bound of time. Afterwards a good request is answered, and the
server's memory is bounded.
"""

import contextlib
import json
import resource
import socket
import threading
import time

import pytest
from chat_templates import tokenizer as tokenizer_of
from tiny_models import llama
from tiny_tokenizers import hugging_face

from strop.data.tool_calls import parser_of
from strop.models import as_policy
from strop.rollout import http_guard, openai_server
from strop.rollout.openai_server import OpenAIServer
from strop.rollout.served_model import ServedModel

SECONDS = 20  # an attack must be over by then, on a machine that does other work too
MEGABYTES = 200  # that all attacks together may add to the process
KEY = "a-secret"


@pytest.fixture(scope="module")
def served():
    tokenizer = hugging_face()
    policy = as_policy(llama(vocab_size=len(tokenizer), scale=4.0, max_position_embeddings=4096), tokenizer)
    model = ServedModel(policy, "tiny", max_batch=4)
    yield model
    model.close()


@pytest.fixture(scope="module")
def server(served):
    """With short times, so that the slow clients are not waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_guard, "HEAD_SECONDS", 1)
        patch.setattr(openai_server, "BODY_SECONDS", 1)
        running = OpenAIServer(served, allow_sync=True).start()
        yield running
        running.stop()


@pytest.fixture(autouse=True)
def answers_afterwards(server):
    yield
    status, answer = post(server, b'{"prompt": [5, 6], "max_tokens": 1}')
    assert (status, len(answer["choices"])) == (200, 1)


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS)


def exchange(server, *parts):
    """Send the parts and return what comes back until the server closes, or has answered in full."""
    with connect(server) as client:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for part in parts:
                client.sendall(part)
        return read_answer(client)


def read_answer(client):
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := client.recv(1 << 16):
            found += chunk
            head, end, body = found.partition(b"\r\n\r\n")
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            if end and lengths and len(body) >= int(lengths[0].split(b":")[1]):
                break
    return found


def http(body, *headers, method="POST", path="/v1/completions", host="127.0.0.1", kind="application/json", length=None):
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", f"Content-Type: {kind}", *headers]
    if not any(line.lower().startswith("transfer-encoding") for line in headers):
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def parsed(found):
    head, _, body = found.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def post(server, body, *headers, **options):
    return parsed(exchange(server, http(body, *headers, **options)))


def check_refused(found, statuses=range(400, 500)):
    """A 4xx in OpenAI's form, or nothing because the server closed."""
    if found:
        status, answer = parsed(found)
        assert status in statuses, found[:300]
        assert answer["error"]["code"] == status
        assert answer["error"]["message"]


def deep(opening, closing, num=200_000):
    return opening * num + closing * num


PROMPT = b'{"prompt": [5, 6], "max_tokens": 2'
CHAT = "/v1/chat/completions"
BODIES = {
    "nothing": b"",
    "half an object": b'{"prompt": [5',
    "no object": b"[1, 2]",
    "null": b"null",
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": "ab"}'.encode("utf-16"),
    "half a surrogate": b'{"prompt": "\\ud800"}',
    "a NUL in the model": PROMPT + b', "model": "\\u0000"}',
    "a surrogate in the model": PROMPT + b', "model": "\\udfff"}',
    "deep lists": deep(b"[", b"]"),
    "deep objects": deep(b'{"a":', b"}"),
    "a deep prompt": b'{"prompt": ' + deep(b"[", b"]", 900) + b"}",
    "a deep stop": PROMPT + b', "stop": ' + deep(b"[", b"]", 900) + b"}",
    "infinite temperature": PROMPT + b', "temperature": 1e400}',
    "minus infinite temperature": PROMPT + b', "temperature": -1e400}',
    "NaN": PROMPT + b', "temperature": NaN}',
    "Infinity": PROMPT + b', "top_p": Infinity}',
    "a temperature of 400 digits": PROMPT + b', "temperature": ' + b"9" * 400 + b"}",
    "a seed of 5000 digits": PROMPT + b', "seed": ' + b"9" * 5000 + b"}",
    "a temperature that is text": PROMPT + b', "temperature": "hot"}',
    "a negative min_p": PROMPT + b', "min_p": -1}',
    "a top_p of 0": PROMPT + b', "top_p": 0}',
    "n of 200,000": PROMPT + b', "n": 200000}',
    "n of 4000 digits": PROMPT + b', "n": ' + b"9" * 4000 + b"}",
    "negative n": PROMPT + b', "n": -1}',
    "n that is true": PROMPT + b', "n": true}',
    "max_tokens of 10^18": b'{"prompt": [5], "max_tokens": 1000000000000000000}',
    "negative max_tokens": b'{"prompt": [5], "max_tokens": -5}',
    "no prompt": b'{"prompt": []}',
    "an empty text": b'{"prompt": ""}',
    "100,000 prompts": b'{"prompt": [' + b"[5]," * 99_999 + b"[5]]}",
    "mixed prompts": b'{"prompt": ["a", [5], {"a": 1}]}',
    "a huge id": b'{"prompt": [99999999999999999999999999]}',
    "a negative id": b'{"prompt": [-1]}',
    "ids and texts": b'{"prompt": [5, "a"]}',
    "ids beyond the model": b'{"prompt": [' + b"5," * 9999 + b"5]}",
    "a prompt of 800,000 characters": b'{"prompt": "' + b"a" * 800_000 + b'"}',
    "a stop of 10,000 texts": PROMPT + b', "stop": [' + b'"a",' * 9999 + b'"a"]}',
    "a stop of 100,000 characters": PROMPT + b', "stop": "' + b"a" * 100_000 + b'"}',
    "stop ids of 10,000": PROMPT + b', "stop_token_ids": [' + b"5," * 9999 + b"5]}",
    "stop ids that are texts": PROMPT + b', "stop_token_ids": ["a"]}',
    "a model that is a list": PROMPT + b', "model": ["tiny"]}',
    "another model": PROMPT + b', "model": "gpt-4"}',
    "logprobs of 1000": PROMPT + b', "logprobs": 1000}',
    "a stream of two": PROMPT + b', "n": 2, "stream": true}',
    "logit_bias": PROMPT + b', "logit_bias": {"5": 100}}',
}  # fmt: skip
CHATS = {
    "no messages": b"{}",
    "a message without a role": b'{"messages": [{"content": "a"}]}',
    "a role that is a number": b'{"messages": [{"role": 5, "content": "a"}]}',
    "a message that is text": b'{"messages": ["a"]}',
    "no content": b'{"messages": [{"role": "user"}]}',
    "content that is a number": b'{"messages": [{"role": "user", "content": 5}]}',
    "an image": b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}]}',
    "a million empty messages": b'{"messages": [' + b"{}," * 300_000 + b"{}]}",
    "a message of 800,000 characters": b'{"messages": [{"role": "user", "content": "' + b"a" * 800_000 + b'"}]}',
    "calls that are no list": b'{"messages": [{"role": "assistant", "content": null, "tool_calls": 5}]}',
    "a call without a name": b'{"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}]}',
    "a past call that is no JSON": b'{"messages": [{"role": "assistant", "tool_calls": '
    b'[{"function": {"name": "f", "arguments": "{"}}]}]}',
    "a forced call": b'{"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}',
    "a named call": b'{"messages": [{"role": "user", "content": "a"}], '
    b'"tool_choice": {"type": "function", "function": {"name": "f"}}}',
    "a call forced by a number": b'{"messages": [{"role": "user", "content": "a"}], "tool_choice": 5}',
    "tools without names": b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}',
    "deep tools": b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"function": {"name": "f", "a": '
    + deep(b"[", b"]", 900)
    + b"}}]}",
    "JSON mode": b'{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}}',
    "top_logprobs without logprobs": b'{"messages": [{"role": "user", "content": "a"}], "top_logprobs": 3}',
    "top_logprobs of 10^9": b'{"messages": [{"role": "user", "content": "a"}], "logprobs": true, "top_logprobs": 1000000000}',
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_bad_bodies_are_refused(server, name):
    check_refused(exchange(server, http(BODIES[name])))


@pytest.mark.parametrize("name", CHATS)
def test_bad_chats_are_refused(server, name):
    check_refused(exchange(server, http(CHATS[name], path=CHAT)))


GOOD = b'{"prompt": [5, 6], "max_tokens": 1}'
REQUESTS = {
    "noise": b"\x00\x01\x02\xff" * 100 + b"\r\n\r\n",
    "TLS": bytes.fromhex("160301020001000001fc0303") + b"a" * 500,
    "no HTTP": b"hello\r\n\r\n",
    "HTTP/9.9": b"GET /health HTTP/9.9\r\nHost: 127.0.0.1\r\n\r\n",
    "no Host": b"GET /health HTTP/1.1\r\n\r\n",
    "two Hosts": b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n",
    "no Host in HTTP/1.0": b"GET /health HTTP/1.0\r\n\r\n",
    "another Host": http(GOOD, host="evil.example"),
    "another Host with a port": http(GOOD, host="evil.example:8000"),
    "a Host that begins like ours": http(GOOD, host="127.0.0.1.evil.example"),
    "a Host that is no name": http(GOOD, host="[::::]:99999999"),
    "a Content-Length of 5000 digits": http(GOOD, length="9" * 5000),
    "a Content-Length of 19 digits": http(GOOD, length="9" * 19),
    "a Content-Length of 10 GB": http(GOOD, length=10**10),
    "a negative Content-Length": http(GOOD, length=-1),
    "a Content-Length that is text": http(GOOD, length="many"),
    "two Content-Lengths": http(GOOD, "Content-Length: 3"),
    "a chunk size that is none": http(b"xyz\r\nabc\r\n0\r\n\r\n", "Transfer-Encoding: chunked"),
    "a chunk size of 100 digits": http(b"f" * 100 + b"\r\nabc\r\n0\r\n\r\n", "Transfer-Encoding: chunked"),
    "an unknown encoding": http(b"abc", "Transfer-Encoding: gzip"),
    "a line of 1 MB": b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "headers of 1 MB": http(GOOD, *(f"X-{n}: {'a' * 1000}" for n in range(1000))),
    "a header that never ends": http(GOOD, "X: " + "a" * (1 << 20)),
    "a header with a NUL": http(GOOD, "X: a\x00b"),
    "a header that goes on": http(GOOD, "X: a\r\n\tb", "Host : evil"),
    "text": http(GOOD, kind="text/plain"),
    "a form": http(GOOD, kind="application/x-www-form-urlencoded"),
    "no Content-Type": http(GOOD).replace(b"Content-Type: application/json\r\n", b""),
    "JSON in name alone": http(GOOD, kind="application/jsonp"),
    "a foreign Origin": http(GOOD, "Origin: http://evil.example"),
    "the Origin null": http(GOOD, "Origin: null"),
    "an Origin on another port": http(GOOD, "Origin: http://127.0.0.1:1"),
    "a preflight": http(b"", "Origin: http://evil.example", "Access-Control-Request-Method: POST", method="OPTIONS"),
    "a GET with a body": http(GOOD, method="GET", path="/health"),
    "a GET of completions": http(b"", method="GET"),
    "DELETE": http(GOOD, method="DELETE"),
    "a method of 1000 letters": http(GOOD, method="A" * 1000),
    "another path": http(GOOD, path="/v1/embeddings"),
    "a path of dots": http(GOOD, path="/../../etc/passwd"),
    "a path with %00": http(GOOD, path="/v1/%00"),
    "a whole address": http(GOOD, path="http://evil.example/v1/completions", host="evil.example"),
    "CONNECT": b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example\r\n\r\n",
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_bad_requests_are_refused(server, name):
    check_refused(exchange(server, REQUESTS[name]))


def test_a_body_that_is_too_long_is_refused_before_it_is_read(server):
    for headers, length in (((), server.max_body + 1), (("Transfer-Encoding: chunked",), None)):
        head = http(b"", *headers, length=length)
        chunks = b"" if length else b"".join(b"100000\r\n" + b"a" * 0x100000 + b"\r\n" for _ in range(70))
        check_refused(exchange(server, head, chunks), [413])


def test_a_chunked_body_is_one_request(server):
    body = b"".join(b"%x\r\n%c\r\n" % (1, byte) for byte in GOOD) + b"0\r\n\r\n"
    request = http(body, "Transfer-Encoding: chunked")
    with connect(server) as client:
        for _ in range(2):  # and the connection goes on
            client.sendall(request)
            assert parsed(read_answer(client))[0] == 200


def test_a_chunk_that_looks_like_a_request_is_none(server):
    hidden = http(b'{"lora_name": "x"}', path="/v1/unload_lora_adapter")
    body = b"%x\r\n" % len(hidden) + hidden + b"\r\n0\r\n\r\n"
    found = exchange(server, http(body, "Transfer-Encoding: chunked"))
    check_refused(found, [400])
    assert found.count(b"HTTP/1.1") == 1
    assert b"must be JSON" in found


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /hea", b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: ", http(GOOD, length=1000),
     http(b"ff\r\nabc", "Transfer-Encoding: chunked")],
    ids=["nothing", "half a line", "half a head", "half a body", "half a chunk"],
)  # fmt: skip
def test_slow_clients_are_closed(server, sent):
    began = time.monotonic()
    check_refused(exchange(server, sent), [408])
    assert time.monotonic() - began < SECONDS


def test_a_trickle_is_closed(server):
    began = time.monotonic()
    with connect(server) as client, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        client.sendall(b"GET /health HTTP/1.1\r\n")
        while time.monotonic() - began < SECONDS:
            client.sendall(b"X")
            time.sleep(0.1)
    assert time.monotonic() - began < SECONDS


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_cancelled(server, served, stream):
    body = {"prompt": [5, 6], "max_tokens": 4000, "ignore_eos": True, "n": 1 if stream else 4, "stream": stream}
    client = connect(server)
    client.sendall(http(json.dumps(body).encode()))
    wait_for(lambda: served.queue._active)
    client.close()
    wait_for(lambda: not served.queue._active and not served.queue._waiting)
    drawn = served.queue.num_drawn
    time.sleep(0.3)
    assert served.queue.num_drawn == drawn
    assert drawn < 4000


def wait_for(true):
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_200_connections_are_served(server):
    found = []

    def ask(number):
        body = {"prompt": [5, 6, number % 40], "max_tokens": 2, "temperature": 0}
        found.append(post(server, json.dumps(body).encode())[0])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [200] * 200


def test_connections_beyond_the_most_are_told_so(server, monkeypatch):
    monkeypatch.setattr(http_guard, "MAX_CONNECTIONS", 3)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(server)) for _ in range(8)]
        assert sum(b" 503 " in read_answer(client)[:20] for client in clients[4:]) >= 4
    monkeypatch.undo()


def test_a_client_that_reads_nothing_holds_up_nobody(server):
    body = {"prompt": [5, 6], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            client = stack.enter_context(connect(server))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            client.sendall(http(json.dumps(body).encode()))
        assert post(server, GOOD)[0] == 200


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/collective_rpc"])
@pytest.mark.parametrize("where", ["hub", "relative", "outside", "link", "link inside", "dots", "nul", "none"])
def test_weights_come_from_the_sync_folder_alone(served, server, tmp_path, monkeypatch, path, where):
    inside, outside = tmp_path / "sync", tmp_path / "outside"
    for folder in (inside, outside):
        folder.mkdir()
    monkeypatch.setattr(served, "sync_folder", inside)
    (outside / "config.json").write_text("{}")
    (inside / "link").symlink_to(outside)
    (inside / "links").mkdir()
    (inside / "links" / "config.json").symlink_to(outside / "config.json")
    folder = {"hub": "hf-internal-testing/tiny-random-gpt2", "relative": "outside", "outside": str(outside),
              "link": str(inside / "link"), "link inside": str(inside / "links"), "nul": "/a\0b",
              "dots": f"{inside}/../outside", "none": str(inside / "none")}[where]  # fmt: skip
    body = {"lora_name": "x", "lora_path": folder, "method": "reload_weights", "kwargs": {"weights_path": folder}}
    monkeypatch.setattr(served.queue, "call", None)  # nothing may come so far
    check_refused(exchange(server, http(json.dumps(body).encode(), path=path)))


def test_memory_stays_bounded(server):
    """The longest bodies that are allowed, as text and as small lists, from many clients at once."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    long = b'{"prompt": "' + b"a" * (server.max_body - 100) + b'"}'

    def attack():
        for _ in range(4):
            exchange(server, http(long))
        exchange(server, http(b"[" + b"[]," * (server.max_body // 3 - 9) + b"[]]"))

    threads = [threading.Thread(target=attack) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < MEGABYTES


# ---- with a key ----


@pytest.fixture(scope="module")
def guarded(served):
    running = OpenAIServer(served, host="0.0.0.0", api_key=KEY, allowed_hosts=["gpu1"]).start()
    yield running
    running.stop()


@pytest.mark.parametrize(
    "given", [None, "Bearer", "Bearer ", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", KEY, "Bearer \xff"]
)
def test_a_wrong_key_is_refused(guarded, given):
    check_refused(exchange(guarded, http(GOOD, *([f"Authorization: {given}"] if given else []))), [401])


def test_the_right_key_is_answered(guarded):
    for host in ("127.0.0.1", "gpu1", "GPU1:80"):
        assert post(guarded, GOOD, f"Authorization: Bearer {KEY}", host=host)[0] == 200
    check_refused(exchange(guarded, http(GOOD, f"Authorization: Bearer {KEY}", host="gpu2")), [403])


def test_other_machines_need_a_key(served):
    with pytest.raises(ValueError, match=r"api_key must be given where other machines can ask \(host 0.0.0.0\)"):
        OpenAIServer(served, host="0.0.0.0")
    with pytest.raises(ValueError, match="api_key must be ASCII characters"):
        OpenAIServer(served, api_key="")


def test_calls_of_tools_that_cannot_be_read_stay_text():
    """The parser never raises, whatever a model says."""
    parse = parser_of(hugging_face())
    deep = "[" * 100_000
    for text in ("<tool_call>", "<tool_call>{</tool_call>", f"<tool_call>{deep}</tool_call>", "</tool_call>"):
        assert all(call.error for call in parse(text))


# ---- grammars ----


@pytest.fixture(scope="module")
def caller():
    pytest.importorskip("llguidance")
    tokenizer = tokenizer_of("qwen")
    policy = as_policy(llama(vocab_size=len(tokenizer), scale=4.0, max_position_embeddings=8192), tokenizer)

    model = ServedModel(policy, "tiny")
    running = OpenAIServer(model).start()
    yield running
    running.stop()
    model.close()


def nested(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


SCHEMAS = {
    "nothing": {},
    "a type that is none": {"type": "no"},
    "a type that is a number": {"type": 5},
    "properties that are a list": {"type": "object", "properties": [1]},
    "another machine": {"$ref": "http://evil.example/schema.json"},
    "a file": {"$ref": "file:///etc/passwd"},
    "a schema of itself": {"$ref": "#"},
    "two schemas of one another": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "100 levels": nested(100),
    "an enum of 50,000 texts": {"enum": [f"{i:06d}" for i in range(50_000)]},
    "5,000 properties": {"type": "object", "properties": {f"a{i}": {"type": "string"} for i in range(5_000)}},
    "all of 500": {"allOf": [{"type": "object", "properties": {f"a{i}": {"type": "integer"}}} for i in range(500)]},
    "any of any of any": {"anyOf": [{"anyOf": [{"anyOf": [{"type": "string"}] * 30}] * 30}] * 30},
    "a pattern that explodes": {"type": "string", "pattern": "^(a|a?)+$"},
    "a pattern of 10^5 times 10^5": {"type": "string", "pattern": "^((a{100000}){100000})$"},
    "a pattern that is none": {"type": "string", "pattern": "((("},
    "a text of 10^9 letters": {"type": "string", "minLength": 10**9},
    "a list of 10^9": {"type": "array", "minItems": 10**9, "items": {"type": "integer"}},
    "a number from 10^300": {"type": "number", "minimum": 1e300, "maximum": 1.0000001e300},
    "numbers that exclude one another": {"type": "integer", "minimum": 5, "maximum": 4},
    "a multiple of a tiny number": {"type": "number", "multipleOf": 1e-300},
    "an option of the library": {"type": "object", "x-guidance": {"whitespace_pattern": "(a|a?)+", "coerce_one_of": 5}},
    "rules in a name": {"type": "object", "properties": {'"\nstart: /.*/\n"': {"type": "integer"}}},
}  # fmt: skip


@pytest.mark.parametrize("way", ["reply", "call"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_followed_or_refused_in_time(caller, name, way):
    """A reply may be cut by its length. Another client is answered meanwhile."""
    schema = SCHEMAS[name]
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 24}
    if way == "reply":
        body["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    else:
        body |= {"tools": [{"function": {"name": "f", "parameters": schema}}], "tool_choice": "required"}
    data, status = json.dumps(body).encode(), []
    asking = threading.Thread(target=lambda: status.append(post(caller, data, path=CHAT)[0]))
    start = time.perf_counter()
    asking.start()
    assert exchange(caller, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n").startswith(b"HTTP/1.1 200")
    assert time.perf_counter() - start < SECONDS / 4
    asking.join(SECONDS)
    assert status
    assert status[0] in (200, 400)
    assert post(caller, b'{"prompt": [5, 6], "max_tokens": 1}')[0] == 200


def test_a_thousand_tools_are_followed_or_refused_in_time(caller):
    tools = [{"function": {"name": f"f{i}", "parameters": nested(5)}} for i in range(1000)]
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 60, "tools": tools, "tool_choice": "required"}
    start = time.perf_counter()
    status, answer = post(caller, json.dumps(body).encode(), path=CHAT)
    assert time.perf_counter() - start < SECONDS
    assert status in (200, 400), answer
