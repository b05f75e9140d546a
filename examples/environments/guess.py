"""Guess a number from "higher" and "lower".

The model reads a range, as 2D for 2 to 13, and says one digit a turn. It hears + (higher) or - (lower) until it is right.
Found at the first turn it earns 1; `turn_discount` makes every further turn cost. The first guess alone cannot know the
answer, so what is learned is to search: the best it can do is to halve what is left.
"""

from strop.environments import Environment, Turn
from strop.tasks import CharTokenizer, split_of

DIGITS = "0123456789ABCDEF"
SMALLEST = 8  # numbers in a range


class GuessANumber(Environment):
    tokenizer = CharTokenizer(DIGITS + "+-?")
    stop_ids = tuple(tokenizer.encode(DIGITS))  # a turn is one digit

    @staticmethod
    def rows(split="train", limit=None, *, seed=0):
        """Every range and secret; one in ten is held out."""
        every = [
            {"low": low, "high": high, "secret": secret}
            for low in range(16)
            for high in range(low + SMALLEST - 1, 16)
            for secret in range(low, high + 1)
        ]
        return [row for row in every if split_of(str(row)) == split][:limit]

    def reset(self, row):
        self.secret = row["secret"]
        return f"{DIGITS[row['low']]}{DIGITS[row['high']]}?"

    def step(self, reply):
        if reply not in DIGITS or len(reply) != 1:
            return Turn(done=True, info={"guesses": 1, "found": 0})
        guess = DIGITS.index(reply)
        if guess == self.secret:
            return Turn(done=True, reward=1.0, info={"guesses": 1, "found": 1})
        return Turn("+" if guess < self.secret else "-", info={"guesses": 1, "found": 0})


def fewest(low, high):
    """Guesses that binary search needs on average for a secret of this range: Σ depth / count."""
    count, depth, total = high - low + 1, 1, 0
    left = count
    while left:
        level = min(2 ** (depth - 1), left)
        total, left, depth = total + level * depth, left - level, depth + 1
    return total / count
