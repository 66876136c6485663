"""Learn to use a calculator: the tool, the reward, and a small model that was shown a few calls.

python examples/calculator/calculator.py             # the model, in runs/calculator
kedge ppo --config examples/calculator/run.yaml      # PPO with the tool
"""

import json
import random
from pathlib import Path

CALLS = 0.3
"""Share of the demonstrations with the tool at hand that call it; the others answer alone."""
HELD_OUT = 256
"""Of the 8,100 products: nothing is trained on them."""

CHAT_TEMPLATE = (
    "{% if tools %}{{ tools[0]['function']['name'] }}\n{% endif %}{% for message in messages %}{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\n' }}{% endfor %}"
)
SIZES = {"hidden_size": 64, "num_layers": 3, "num_heads": 4, "context_length": 256, "initializer_range": 0.05}


class Calculator:
    """One tool."""

    def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a * b


def right(completions, answer, **columns):
    """1 if the last line is the product, with or without the tool."""
    return [float(text.rpartition("\n")[2].strip() == each) for text, each in zip(completions, answer, strict=True)]


def products():
    """All products of two numbers of two digits, as prompts with their answers, in random order."""
    numbers = range(10, 100)
    rows = [
        {"prompt": [{"role": "user", "content": f"{a}*{b}="}], "answer": str(a * b)} for a in numbers for b in numbers
    ]
    random.Random(0).shuffle(rows)
    return rows


def call(a, b):
    """A call as the policy writes it."""
    return f'<multiply>{{"a": {a}, "b": {b}}}</multiply>'


def demonstrations(prompts):
    """A conversation for each prompt: half of them with the tool at hand, which some of these call."""
    draw = random.Random(0)
    rows = []
    for row in prompts:
        messages = [*row["prompt"]]
        if draw.random() < 0.5:
            messages.insert(0, {"role": "system", "content": "multiply"})  # as the template shows the tool
            if draw.random() < CALLS:
                factors = messages[-1]["content"].rstrip("=").split("*")
                messages.append({"role": "assistant", "content": call(*factors)})
                messages.append({"role": "tool", "content": row["answer"]})
        rows.append({"messages": [*messages, {"role": "assistant", "content": row["answer"]}]})
    return rows


def main(folder=Path("runs/calculator"), num_demonstrations=4000, **sft):
    """Train a model of 0.1 million parameters on demonstrations, and write the prompts."""
    import kedge
    from kedge.models.untrained import save_untrained_llama, train_tokenizer

    tokenizer = train_tokenizer([call("", "")] * 2, vocab_size=300)  # digits stay apart
    tokenizer.chat_template = CHAT_TEMPLATE
    save_untrained_llama(folder / "untrained", tokenizer, **SIZES, seed=0)
    settings = {"preset": "small-cpu", "learning_rate": 4e-3, "num_epochs": 4, **sft}
    held_out, prompts = products()[:HELD_OUT], products()[HELD_OUT:]
    rows = demonstrations(prompts[:num_demonstrations])
    kedge.sft(model=folder / "untrained", demonstrations=rows, out=folder / "start", **settings)
    for name, part in {"prompts": prompts, "held_out": held_out}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


if __name__ == "__main__":
    main()
