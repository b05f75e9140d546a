"""What chat templates of well-known models write, with a tokenizer of bytes: in a short form of our own, and as they are.

The latter are files of the package trl, which `make` lays into the environment's folder `peers`: nothing imports it.
"""

import functools
import sys
from pathlib import Path

QWEN = r"""
{%- if tools %}<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.' }}

# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
Calls stand in <tool_call></tool_call>.<|im_end|>
{% elif messages[0].role != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- elif m.role == 'assistant' and m.tool_calls %}<|im_start|>assistant
{{- '\n' + m.content if m.content }}
{%- for call in m.tool_calls %}{{ '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{% endfor %}<|im_end|>
{% elif not (loop.first and m.role == 'system' and tools) %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA = r"""{{ bos_token }}
{%- set start = '<|start_header_id|>' %}{% set end = '<|end_header_id|>\n\n' %}
{%- if tools %}{{ start + 'system' + end }}Environment: ipython
Cutting Knowledge Date: December 2023<|eot_id|>{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ start + 'ipython' + end + (m.content | tojson) + '<|eot_id|>' }}
{%- elif m.tool_calls %}{{ start + 'assistant' + end }}
{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' + (m.tool_calls[0].function.arguments | tojson) + '}<|eot_id|>' }}
{%- else %}{{ start + m.role + end }}
{%- if tools and m.role == 'user' and loop.index0 <= 1 %}Given the following functions:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}
{%- endif %}{{ m.content | trim }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ start + 'assistant' + end }}{% endif %}"""

SMOLLM2 = """
{%- for m in messages %}
{%- if loop.first and m.role != 'system' %}<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
{% endif %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

MISTRAL = """{{ bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}[INST] {{ m.content }} [/INST]
{%- elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content | tojson }} [/TOOL_RESULTS]
{%- else %} {{ m.content | trim }}{{ eos_token }}{% endif %}
{%- endfor %}"""

PHI = """
{%- for m in messages %}<|{{ m.role }}|>
{{ m.content }}<|end|>
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% else %}{{ eos_token }}{% endif %}"""

GEMMA = """{{ bos_token }}
{%- for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

# thinks, and forgets what it thought in earlier turns
QWEN3 = SMOLLM2.replace(
    "{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else m.content.split('</think>')[-1].lstrip() }}"
)

TEMPLATES = {
    # name: template, its special tokens, the EOS of the tokenizer, the token that ends a turn
    "qwen": (QWEN, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<|im_end|>", "<|im_end|>"),
    "llama": (
        LLAMA,
        ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"],
        "<|eot_id|>",
        "<|eot_id|>",
    ),
    "smollm2": (SMOLLM2, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<|im_end|>", "<|im_end|>"),
    "mistral": (MISTRAL, ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"], "</s>", "</s>"),
    "phi": (PHI, ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"], "<|endoftext|>", "<|end|>"),
    "gemma": (GEMMA, ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], "<eos>", "<end_of_turn>"),
    "qwen3": (QWEN3, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<|im_end|>", "<|im_end|>"),
}


IM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PEERS = Path(sys.prefix) / "peers" / "trl" / "chat_templates"
REAL = {
    # file of PEERS: special tokens, the EOS of the tokenizer, the token that ends a turn
    "qwen2_5": (IM, "<|im_end|>", "<|im_end|>"),
    "qwen3_instruct_2507": (IM, "<|im_end|>", "<|im_end|>"),
    "llama3_1": ([*TEMPLATES["llama"][1], "<|eom_id|>"], "<|eot_id|>", "<|eot_id|>"),
    "llama3": (TEMPLATES["llama"][1], "<|eot_id|>", "<|eot_id|>"),
    "lfm2": (["<|startoftext|>", "<|im_start|>", "<|im_end|>", "<|tool_list_start|>", "<|tool_list_end|>",
              "<|tool_response_start|>", "<|tool_response_end|>"], "<|im_end|>", "<|im_end|>"),
    "phi3": (TEMPLATES["phi"][1], "<|endoftext|>", "<|end|>"),
    "glm4moe": (["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
                "<|endoftext|>", None),
}  # fmt: skip


def tokenizer(name):
    template, special, eos, _ = TEMPLATES[name]
    return of_bytes(template, tuple(special), eos)


def real_tokenizer(name):
    special, eos, _ = REAL[name]
    template = (PEERS / f"{name}.jinja").read_text(encoding="utf-8")
    return of_bytes(template, tuple(special), eos)


@functools.cache
def of_bytes(template, special, eos):
    """Bytes, a few merges of words, the model's special tokens; what it writes has any characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("Ċ", "Ċ"), ("o", "o"), ("l", "l")]
    words = [*special, *letters, *map("".join, merges)]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=special[0],
        eos_token=eos,
        pad_token=special[0],
        additional_special_tokens=list(special),
        chat_template=template,
    )
