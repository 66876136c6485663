"""Judges over an API among the people: they answer their share of the questions before the page is served."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

from kedge.config import Config
from kedge.runs.judges import open_judge
from kedge_base.machine.progress import Progress
from kedge_base.texts import names_judge
from kedge_people.assignments import Assignments
from kedge_people.labels import Answer, AnswerFile, read_labels
from kedge_people.server import now


def ask_judges(folder: Path, assignments: Assignments, file: AnswerFile, config: Config) -> None:
    """Let the judges rank what they have not answered, each item once: they compare in both orders anyway. An
    item without a usable answer is skipped.

    Raises:
        RewardError: A judge cannot be reached. Its answers so far are kept.
    """
    labels = read_labels(folder)
    for name in filter(names_judge, assignments.people):
        answered = {answer.item for answer in labels.answers if answer.person == name}
        questions = assignments.questions(name, labels.items)
        waiting = {question.item: question for question in questions if question.item not in answered}
        if not waiting:
            continue
        judge = open_judge(name, config, folder)
        with Progress(name, total=len(waiting)) as progress:
            for number, question in enumerate(waiting.values(), 1):
                started = time.monotonic()
                item = labels.items[question.item]
                ranks = judge.rank(item.prompt, item.responses)
                seconds = round(time.monotonic() - started, 2)
                kept = f"{name}-{uuid.uuid4()}", item.id, name, now(), seconds, question.order
                file.add(Answer(*kept, "ranked" if ranks else "skipped", tuple(ranks or ())))
                progress.update(number)
