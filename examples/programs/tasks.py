"""Small functions to write, with their tests: about numbers and texts for training, about lists to measure on."""

import json
import random
import sys
from pathlib import Path

NUMBERS = [0, 1, 2, 3, 5, 8, 10, 12, 17, 30, -4]
TEXTS = ["a", "kedge", "Small boat", "noon", "level", "The sea is calm", "Anna", "x1y2"]
LISTS = [[3, 1, 2], [5, 5, 8, 2], [10, -4, 7, 7, 1], [6, 9], [2, 4, 6, 8, 10], [-1, 12, 3, 0, 5]]

# What it does, its name, and how: with each of the constants where there is a K.
ABOUT_NUMBERS = [
    ("returns x plus K", "add_K", lambda x, k: x + k),
    ("returns x minus K", "minus_K", lambda x, k: x - k),
    ("returns x multiplied by K", "times_K", lambda x, k: x * k),
    ("returns the remainder of x divided by K", "remainder_K", lambda x, k: x % k),
    ("returns True if x is a multiple of K, else False", "is_multiple_of_K", lambda x, k: x % k == 0),
    ("returns True if x is larger than K, else False", "is_above_K", lambda x, k: x > k),
    ("returns the smaller of x and K", "at_most_K", lambda x, k: min(x, k)),
    ("returns the larger of x and K", "at_least_K", lambda x, k: max(x, k)),
    ("returns the distance between x and K, never negative", "distance_to_K", lambda x, k: abs(x - k)),
    ("returns K minus x", "left_to_K", lambda x, k: k - x),
    ("returns x squared plus K", "square_plus_K", lambda x, k: x * x + k),
    ("returns x if x is at least K, else 0", "keep_from_K", lambda x, k: x if x >= k else 0),
    ("returns a list of the first K multiples of x, starting with x", "first_K_multiples",
     lambda x, k: [x * n for n in range(1, k + 1)]),
]  # fmt: skip
ABOUT_TEXTS = [
    ("returns the text s repeated K times", "repeat_K", lambda s, k: s * k),
    ("returns the first K characters of the text s", "first_K", lambda s, k: s[:k]),
    ("returns the last K characters of the text s", "last_K", lambda s, k: s[-k:]),
    ("returns the text s without its first K characters", "without_first_K", lambda s, k: s[k:]),
    ("returns True if the text s has more than K characters, else False", "is_longer_than_K", lambda s, k: len(s) > k),
    ("returns the number of characters in the text s", "size", lambda s, k: len(s)),
    ("returns the text s in capital letters", "loud", lambda s, k: s.upper()),
    ("returns the text s backwards", "backwards", lambda s, k: s[::-1]),
    ("returns the number of words in the text s", "count_words", lambda s, k: len(s.split())),
    ("returns the first word of the text s", "first_word", lambda s, k: s.split()[0]),
    ("returns the text s with every space removed", "without_spaces", lambda s, k: s.replace(" ", "")),
    ("returns True if the text s reads the same backwards, else False", "is_palindrome", lambda s, k: s == s[::-1]),
    ("returns how often the letter e occurs in the text s", "count_e", lambda s, k: s.count("e")),
    ("returns the text s between two stars, such as *s*", "starred", lambda s, k: f"*{s}*"),
]
ABOUT_LISTS = [
    ("returns the first K numbers of a list", "first_K_of", lambda a, k: a[:k]),
    ("returns a list without its first K numbers", "drop_K", lambda a, k: a[k:]),
    ("returns a list with K added to each number", "add_K_to_each", lambda a, k: [x + k for x in a]),
    ("returns a list with each number multiplied by K", "scale_by_K", lambda a, k: [x * k for x in a]),
    ("returns how many numbers of a list are larger than K", "count_above_K", lambda a, k: sum(x > k for x in a)),
    ("returns the numbers of a list that are larger than K", "only_above_K", lambda a, k: [x for x in a if x > k]),
    ("returns True if K is in a list, else False", "has_K", lambda a, k: k in a),
    ("returns a list with the number K put at its end", "append_K", lambda a, k: [*a, k]),
    ("returns the sum of the numbers of a list plus K", "sum_plus_K", lambda a, k: sum(a) + k),
    ("returns the largest number of a list", "largest", lambda a, k: max(a)),
    ("returns the smallest number of a list", "smallest", lambda a, k: min(a)),
    ("returns the numbers of a list in rising order", "sort_up", lambda a, k: sorted(a)),
    ("returns the numbers of a list in falling order", "sort_down", lambda a, k: sorted(a, reverse=True)),
    ("returns a list backwards", "reverse_list", lambda a, k: a[::-1]),
    ("returns the last number of a list", "last_of", lambda a, k: a[-1]),
    ("returns the even numbers of a list", "only_even", lambda a, k: [x for x in a if x % 2 == 0]),
    ("returns the difference of the largest and the smallest number of a list", "spread", lambda a, k: max(a) - min(a)),
]


def rows_of(kinds, parameter, values, constants, draw):
    """A row of the columns `prompt` and `test_list` for each kind and constant."""
    rows = []
    for says, name, function in kinds:
        for k in constants if "K" in name else [0]:
            called = name.replace("K", str(k))
            asked = f"Write a Python function {called}({parameter}) that {says.replace('K', str(k))}."
            tests = [f"assert {called}({value!r}) == {function(value, k)!r}" for value in draw.sample(values, 4)]
            rows.append({"prompt": [{"role": "user", "content": asked}], "test_list": tests, "kind": name})
    return rows


def main(folder):
    """Write the prompts to train on and those that are held out."""
    draw = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    about_numbers = rows_of(ABOUT_NUMBERS, "x", NUMBERS, [2, 3, 4, 5, 6, 7, 9, 10], draw)
    about_texts = rows_of(ABOUT_TEXTS, "s", TEXTS, [2, 3, 4, 5], draw)
    held_out = rows_of(ABOUT_LISTS, "numbers", LISTS, [1, 2, 3, 5], draw)
    for name, rows in (("prompts", about_numbers + about_texts), ("held_out", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/programs"))
