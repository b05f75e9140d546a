"""What the tests of sizes measure on: tokenizers, conversations and runs of real sizes, made here."""

import json
import random
import subprocess
import sys
from pathlib import Path

CHAT = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def write_tokenizer(folder, num_tokens):
    """Write a byte-level BPE of so many tokens, as the Hub has them: its vocabulary and merges are made, not learned."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    draw = random.Random(0)
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    while len(vocab) < num_tokens - 3:  # and the three special tokens
        word = "Ġ"
        for c in draw.choices(LETTERS, k=draw.randint(2, 6)):
            if word + c not in vocab and len(vocab) < num_tokens - 3:
                vocab[word + c] = len(vocab)
                merges.append((word, c))
            if word + c not in vocab:
                break
            word += c
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT, **special)
    assert len(made) == num_tokens
    made.save_pretrained(folder)


def sentences(draw, num_words):
    return " ".join("".join(draw.choices(LETTERS, k=4)) for _ in range(num_words))


def write_rows(path, num_rows, row_of):
    """Write rows to a JSONL file, of which 100 are unlike each other."""
    draw = random.Random(0)
    lines = [json.dumps(row_of(draw)) + "\n" for _ in range(100)]
    with open(path, "w") as file:
        for start in range(0, num_rows, 100):
            file.writelines(lines[: num_rows - start])


def chat(draw, num_turns=1, num_words=20):
    turns = [(role, sentences(draw, num_words)) for _ in range(num_turns) for role in ("user", "assistant")]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def prompt(draw):
    return {"prompt": [{"role": "user", "content": sentences(draw, 40)}], "answer": "4"}


MEMORY = """
import os, resource, sys, time
def peak_memory():
    "The most memory of this process, in MB. Linux counts that of the process it was forked from in ru_maxrss."
    if os.path.exists("/proc/self/status"):
        line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
"""


def measured(prepare, work, folder):
    """Run `prepare`, then `work`, both Python text, in a process of its own; return the CPU seconds that `work` took, and by
    how many megabytes it raised the most memory of the process."""
    lines = [
        MEMORY,
        f"sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]}",
        prepare,
        "before, start = peak_memory(), time.process_time()",
        work,
        "print('measured', time.process_time() - start, peak_memory() - before)",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    seconds, megabytes = map(float, done.stdout.split("measured")[1].split())
    print(f"{work}: {seconds:.2f} s, {megabytes:.0f} MB")  # shown by pytest -s
    return seconds, megabytes
