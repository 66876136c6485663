"""One architecture as a reward model: loaded, scored from in a batch, trained on, saved; all against `alone`."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from kedge.models import ModelCard, ScalarModel, TokenRows, load_scalar_model, save_scalar_model, score_rows
from kedge_base.errors import KedgeError
from tests.models.registry.alone import gradients, relative_error, scores_alone
from tests.models.registry.builder import save_reward_folder
from tests.models.registry.checks import GRADIENT_TOLERANCE, check, layout, one_line, phase, random_rows
from tests.models.registry.outcome import Fault, Refused, RewardModel
from tests.models.registry.sizes import EOS
from tests.models.registry.tokenizer import word_tokenizer

# A model that shortens its input, such as CANINE, needs a few tokens; every row ends in EOS.
ROWS = [[*row, EOS] for row in random_rows((8, 11, 18, 9, 12))]
SCORE_TOLERANCE = 1e-4


BATCHES = {"right": "padded", "left": "padded on the left", "equal": "equal lengths"}


def try_reward_model(architecture: str, folder: Path) -> RewardModel | Refused:
    """Put an architecture through everything that a reward model goes through.

    Raises:
        Fault: Something differs from plain transformers, or fails with another error than kedge's.
    """
    plain = save_reward_folder(architecture, folder)
    try:
        with phase("load"):
            model = load_scalar_model(folder, tokenizer=word_tokenizer())
    except KedgeError as error:
        return Refused(one_line(error, folder))
    with torch.no_grad(), phase("scores"):
        check("scores", [score_rows(model, ROWS)], [scores_alone(plain, ROWS)], SCORE_TOLERANCE)
        check("one score", [score_rows(model, [row]) for row in ROWS], list(scores_alone(plain, ROWS)), SCORE_TOLERANCE)
    check_gradient(model, plain)
    check_saving(model, folder.with_name("trained"))
    read = BATCHES[model.batching] if model.trunk is None else layout(model.trunk)
    return RewardModel(read, critic=model.has_values)


def check_gradient(model: ScalarModel, plain: PreTrainedModel) -> None:
    """The gradient of the summed scores is that of plain passes over each row."""
    with phase("gradient"):
        theirs = gradients(plain, scores_alone(plain, ROWS).sum())
        ours = gradients(model.classifier, model.scores(TokenRows.of(ROWS)).sum())
        error = relative_error(ours, theirs)
    if not error <= GRADIENT_TOLERANCE:
        raise Fault(f"gradient: up to {error:.1g} of it")


def check_saving(model: ScalarModel, folder: Path) -> None:
    """The saved model gives the same scores, shifted as its configuration says."""
    with torch.no_grad(), phase("saving"):
        expected = score_rows(model, ROWS)
        save_scalar_model(model, word_tokenizer(), folder, card=ModelCard("reward", "tiny"))
        plain = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        check("saving", [scores_alone(plain, ROWS)], [expected], SCORE_TOLERANCE)
        again = load_scalar_model(folder, tokenizer=word_tokenizer())
        check("loading again", [score_rows(again, ROWS)], [expected], SCORE_TOLERANCE)
