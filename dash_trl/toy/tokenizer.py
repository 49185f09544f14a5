"""The tokenizer of the toy model: Qwen2's with a vocabulary for this task, and a chat template."""

from collections.abc import Sequence

from transformers import Qwen2Tokenizer

END_OF_TURN = "<|im_end|>"
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
    blank = Qwen2Tokenizer(extra_special_tokens=[START_OF_TURN], padding_side="left", chat_template=CHAT_TEMPLATE)
    tokenizer = blank.train_new_from_iterator(
        [[*words, "user", "assistant"]],
        vocab_size=512,  # upper limit; the few words need less
        new_special_tokens=[END_OF_TURN],
        show_progress=False,
    )
    tokenizer.eos_token = END_OF_TURN
    return tokenizer
