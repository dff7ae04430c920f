"""Small real tokenizers, trained on the spot, and folders in the published layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "Hello there, how are you today? The capital of France is Paris.",
    "你好,世界。今天天气很好。日本語の文章もあります。",
    "Emoji 😀😃👩‍👩‍👧‍👦🇫🇷 and accents: é à ü ñ",
] * 4

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments | tojson }})"
    "{% endfor %}{% endif %}{% endfor %}"
    "{% if tools %}TOOLS {{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

EOS = "<|im_end|>"


def byte_level() -> Tokenizer:
    """BPE over bytes, as GPT-2's and SmolLM's; a vocabulary so small that most characters take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", EOS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Words that begin with U+2581, bytes for what is unknown, the first space dropped: as Llama's."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁Helotherwd,.é", "▁H", "He", "▁t", "th"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("▁", "H"), ("H", "e"), ("▁", "t"), ("t", "h")]
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    bos = ("<s>", vocab["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[bos])
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must exist."""
    found = tokenizer.token_to_id(token)
    assert found is not None
    return int(found)


def write_folder(
    folder: Path, tokenizer: Tokenizer | None = None, template: str | None = TEMPLATE, **config: Any
) -> Path:
    """Write *tokenizer*, by default one of bytes, to *folder* in the published layout, *config* as its settings."""
    tokenizer = tokenizer or byte_level()
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {"eos_token": {"content": EOS}, "bos_token": "<|im_start|>"}
    if template is not None:
        facts["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    merged = {"max_position_embeddings": 200, "vocab_size": tokenizer.get_vocab_size(), **config}
    (folder / "config.json").write_text(json.dumps(merged))
    return folder
