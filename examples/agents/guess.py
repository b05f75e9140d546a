"""The game of examples/environments/guess.py, played by a program that talks to the model over HTTP.

It knows the openai package and nothing of strop; `pip install openai`. Any framework that takes a base_url and a key does.
The model's text grows by one digit and one answer a call, so that strop joins all calls to one sequence.
"""

import sys
from pathlib import Path

from openai import AsyncOpenAI

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "environments"))
from guess import DIGITS, GuessANumber

GUESSES, DISCOUNT = 8, 0.8


async def play(row, client):
    """Return 1 for a number found at once, and less for every further guess."""
    text = f"{DIGITS[row['low']]}{DIGITS[row['high']]}?"
    async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as openai:
        for turn in range(GUESSES):
            answer = await openai.completions.create(model="strop", prompt=text, max_tokens=1)
            guess = answer.choices[0].text
            if guess not in DIGITS or len(guess) != 1:
                break
            if guess == DIGITS[row["secret"]]:
                return DISCOUNT**turn
            text += guess + ("+" if guess < DIGITS[row["secret"]] else "-")
    return 0.0


play.rows, play.tokenizer = GuessANumber.rows, GuessANumber.tokenizer  # in the place of --data and --tokenizer
