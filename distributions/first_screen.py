"""Runs the first Python example of the description on PyPI with a tiny model: `make try-wheels`.

It runs where the wheels are installed and no clone is on the path, in a folder of its own, and prints what importing
kedge costs.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import distribution
from pathlib import Path

MODEL = "path/or/hub-id"
END = 'out="runs/first"'
"""The last argument of the example; more updates than two would show nothing new."""
IMPORTS = "import sys; before = set(sys.modules); import kedge as k; print(len(set(sys.modules) - before), k.__file__)"


def main() -> None:
    """Run it."""
    description = str(distribution("kedge-rl").read_text("METADATA"))
    example = re.findall(r"^```python\n(.*?)^```$", description, re.MULTILINE | re.DOTALL)[0]
    with tempfile.TemporaryDirectory() as folder:
        _timed(folder, "import kedge", "-c", IMPORTS)
        _timed(folder, "kedge --help", "-m", "kedge", "--help", is_shown=False)
        _save_model(Path(folder, MODEL))
        assert END in example
        Path(folder, "first.py").write_text(example.replace(END, f"{END}, num_updates=2"), encoding="utf-8")
        _timed(folder, "first screen", "first.py")
        made = [Path(folder, "runs", "first", name) for name in ("report.html", "model")]
        assert all(path.exists() for path in made), made


def _timed(folder: str, what: str, *arguments: str, is_shown: bool = True) -> None:
    start = time.perf_counter()
    ended = subprocess.run([sys.executable, *arguments], cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    print(
        f"{what}: {time.perf_counter() - start:.2f} s", ended.stdout.strip().replace("\n", "\n  ") if is_shown else ""
    )


def _save_model(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({token: number for number, token in enumerate(["<eos>", *letters])}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>")
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=256, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
