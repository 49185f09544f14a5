"""The tokenizer of the toy model: Qwen2's with a vocabulary for this task, and a chat template."""

import json
from collections.abc import Sequence

from tokenizers import pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"
START_OF_TURN = "<|im_start|>"

# Qwen2.5's ChatML without the system prompt, which would double the length of the prompts.
CHAT_TEMPLATE = """\
{% for message in messages %}\
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}\
{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def arithmetic_tokenizer(words: Sequence[str] = ("The answer is", "Wait")) -> Qwen2Tokenizer:
    """Make Qwen2's byte-level BPE tokenizer with few merges: each word of the task and each digit is one token.

    Everything else must be as in Qwen2: `AutoTokenizer` ignores the saved pre-tokenizer of a qwen2 model.

    Args:
        words: texts of the task. Each word becomes one token, together with the space before it.
    """
    backend = Qwen2Tokenizer().backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=512,  # upper limit; the few words need less
        special_tokens=[PADDING, START_OF_TURN, END_OF_TURN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([*words, "user", "assistant"], trainer)
    learned = json.loads(backend.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(merge) for merge in learned["merges"]],
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        extra_special_tokens=[START_OF_TURN],
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
