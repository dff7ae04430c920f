"""``/tokenize`` and ``/detokenize`` with a real tokenizer."""

from __future__ import annotations

import json

import pytest

from mstar.processing.chat import TextProcessor
from mstar.processing.tokenizer import TextTokenizer
from mstar.spec.processor import ProcessorContext
from mstar.testing.tiny_tokenizers import sentencepiece, write_folder


@pytest.fixture
def service(kit, tmp_path):
    """A model that reads texts and chats; its tokenizer puts ``<s>`` before a text."""
    service = kit.Service(abilities=("chat", "completion", "generate"))
    service.processor = TextProcessor(ProcessorContext(service.spec, write_folder(tmp_path, sentencepiece())))
    return service


@pytest.fixture
def tokenizer(service) -> TextTokenizer:
    return service.processor.tokenizer


@pytest.mark.parametrize("special", [None, True, False])
async def test_a_prompt_there_and_back(kit, service, tokenizer, special):
    body = {"model": "tiny", "prompt": "Hello there, é🙂"} | (
        {} if special is None else {"add_special_tokens": special}
    )
    async with kit.client(service) as client:
        answer = (await client.post("/tokenize", json=body)).json()
        back = (await client.post("/detokenize", json={"model": "tiny", "tokens": answer["tokens"]})).json()
    ids = tokenizer.encode("Hello there, é🙂", special=special is not False)
    assert answer == {"count": len(ids), "max_model_len": 200, "tokens": ids, "token_strs": None}
    assert back["prompt"] == tokenizer.decode(ids, skip_special=False)
    assert back["prompt"].removeprefix("<s>").strip() == "Hello there, é🙂"
    assert (ids[0] == tokenizer.id_of("<s>")) == (special is not False)


async def test_how_the_vocabulary_writes_them(kit, service):
    async with kit.client(service) as client:
        body = {"prompt": "He", "add_special_tokens": True, "return_token_strs": True}
        answer = (await client.post("/tokenize", json=body)).json()
    assert "".join(answer["token_strs"]) == "<s>▁He"
    assert len(answer["token_strs"]) == answer["count"]


@pytest.mark.parametrize("generation", [None, True, False])
async def test_a_chat_is_what_the_chat_route_would_read(kit, service, tokenizer, generation):
    messages = [{"role": "system", "content": "He"}, {"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    body = {"messages": messages} | ({} if generation is None else {"add_generation_prompt": generation})
    async with kit.client(service) as client:
        answer = (await client.post("/tokenize", json=body)).json()
    plain = [{"role": "system", "content": "He"}, {"role": "user", "content": "Hello"}]
    assert answer["tokens"] == tokenizer.encode_chat(plain, add_generation_prompt=generation is not False)


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "said"),
    [
        ("/tokenize", {}, 400, "prompt", "either 'prompt' or 'messages'"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "prompt", "either"),
        ("/tokenize", {"messages": []}, 400, "messages", "empty"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, 400, "add_generation_prompt", "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}, 400,
         "add_special_tokens", "template"),
        ("/tokenize", {"prompt": "x" * 101}, 400, "prompt", "limit of 100"),
        ("/tokenize", {"prompt": "\ud800"}, 400, None, "Unicode"),
        ("/tokenize", {"promt": "a"}, 400, "promt", "unknown parameter"),
        ("/tokenize", {"model": "tinny", "prompt": "a"}, 404, "model", "tiny"),
        ("/detokenize", {}, 400, "tokens", "required"),
        ("/detokenize", {"tokens": [10**6]}, 400, "tokens[0]", "no token id"),
        ("/detokenize", {"tokens": [1, -1]}, 400, "tokens[1]", "no token id"),
        ("/detokenize", {"tokens": ["1"]}, 400, "tokens[0]", "integer"),
        ("/detokenize", {"tokens": [1] * 101}, 400, "tokens", "limit of 100"),
    ],
)  # fmt: skip
async def test_bad_bodies(kit, service, path, body, status, param, said):
    async with kit.client(service, max_text_chars=100) as client:
        answer = await client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert said in error["message"]


async def test_a_model_without_a_tokenizer(kit):
    async with kit.client(kit.Service()) as client:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})):
            answer = await client.post(path, json=body)
            assert answer.status_code == 400
            assert "'tiny' has no tokenizer" in answer.json()["error"]["message"]
