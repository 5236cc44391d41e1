"""A word tokenizer for the tiny target: ``"w0 w1 ..."``, one word per id, with a chat template."""

from __future__ import annotations

import json
from pathlib import Path

#: Each message is a role word, its content, and ``w4``; the answer starts after ``w3``.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ {'system': 'w1', 'user': 'w2', 'assistant': 'w3'}[message['role']] }} {{ message['content'] }} w4 "
    "{% endfor %}"
    "{% if add_generation_prompt %}w3 {% endif %}"
)


def words(ids: list[int]) -> str:
    """The text of ``ids``, the same as the tokenizer decodes them to."""
    return " ".join(f"w{i}" for i in ids)


def save_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` for ids ``0 .. vocab_size - 1``.

    There are no special tokens and no end token, so answers run to ``max_tokens``. An unknown word is ``w0``.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"w{i}": i for i in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 1 << 20,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
