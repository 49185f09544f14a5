"""The tokenizer of the toy model: Qwen2's with a vocabulary for this task, and chat templates."""

import json
from collections.abc import Sequence

from tokenizers import AddedToken, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

END_OF_TURN, PADDING, START_OF_TURN = "<|im_end|>", "<|endoftext|>", "<|im_start|>"
CALL, END_OF_CALL = "<tool_call>", "</tool_call>"

# Qwen2.5's ChatML without the system prompt, which would double the length of the prompts.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# The same template with tools. To save tokens, it lists only a tool's name and the names of its arguments. A call has
# one argument per line:
#
#     <|im_start|>system                  <|im_start|>assistant                         <|im_start|>tool
#     calculator(expression)<|im_end|>    <tool_call>calculator                         421<|im_end|>
#                                         expression=512-91</tool_call><|im_end|>
#
# Each message is rendered independently of the others, so the text of the first messages is a prefix of the whole text.
# The model's text stands between `generation` tags: `apply_chat_template` returns a mask of the tokens between them.
TOOL_CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system' }}"
    "{% for tool in tools %}"
    "{{ '\n' + tool['function']['name'] + '(' + tool['function']['parameters']['properties'] | join(',') + ')' }}"
    "{% endfor %}{{ '<|im_end|>' + '\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + call['function']['name'] }}"
    "{% for name, value in call['function']['arguments'] | items %}{{ '\n' + name + '=' }}{{ value }}{% endfor %}"
    "{{ '</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>' }}"
    "{% endgeneration %}{% else %}"
    "{{ message['content'] }}{{ '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Describes a message of the assistant for `parse_response` of Transformers, which finds the calls in the message and
# converts the values from text to the types of the tool's arguments.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<tool_call>(?P<name>\w+)(?:\n|(?=</tool_call>))",
            "close": END_OF_CALL,
            "repeats": True,
            "content": "kv-lines",
            "content_args": {"kv_sep": "="},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": END_OF_TURN, "content": "text"},
    },
}


def arithmetic_tokenizer(words: Sequence[str] = ("The answer is", "Wait"), *, tools: bool = False) -> Qwen2Tokenizer:
    """Makes Qwen2's byte-level BPE tokenizer with few merges: each word of the task and each digit is one token.

    Everything except the merges must be as in Qwen2. The reason is that `AutoTokenizer`, which vLLM uses too, loads the
    tokenizer of a model of type qwen2 as a `Qwen2Tokenizer` and ignores the pre-tokenizer that was saved with it.

    Args:
        words: texts of the task. Each word of a text becomes one token, together with the space before it.
        tools: True = use a chat template with tools, and set a response template, which finds tool calls.
    """
    roles = ["user", "assistant", *(["system", "tool"] if tools else [])]
    backend = Qwen2Tokenizer().backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=512,  # upper limit; the few words need less
        special_tokens=[PADDING, START_OF_TURN, END_OF_TURN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([*words, *roles], trainer)
    learned = json.loads(backend.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(merge) for merge in learned["merges"]],
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        extra_special_tokens=[START_OF_TURN],
        padding_side="left",
        chat_template=TOOL_CHAT_TEMPLATE if tools else CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    if tools:
        tokenizer.response_template = RESPONSE_TEMPLATE
        # As in Qwen: one token each, and not special, so that decoded completions show the calls.
        tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in (CALL, END_OF_CALL)])
    return tokenizer
