"""Small tokenizers made here: a Hugging Face one with merges across the boundary, and the plainest there can be."""

CHATML = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% if not (loop.last and continue_final_message) %}{{ '<eos>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL = ["<bos>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>"]


class Letters:
    """One id per character; no special tokens, no templates."""

    eos_token_id = 0
    pad_token_id = 0

    def encode(self, text):
        return [ord(c) for c in text]

    def decode(self, ids):
        return "".join(chr(i) for i in ids)


def hugging_face(bos=False, template=CHATML):
    """Characters, and the merges "ab" and "cd": `"a" + "b"` is one token where the texts are joined, two where ids are."""
    from tokenizers import Tokenizer, models, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(set("abcdefghijklmnopqrstuvwxyz0123456789+=?!.,: \n"))
    words = [*SPECIAL, *letters, "ab", "cd"]
    model = models.BPE({w: i for i, w in enumerate(words)}, [("a", "b"), ("c", "d")])
    tokenizer = Tokenizer(model)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A <eos>", special_tokens=[("<bos>", 0), ("<eos>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<eos>",
        additional_special_tokens=SPECIAL[2:],
        chat_template=template,
    )
