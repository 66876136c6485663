"""Thumbs and corrections of single responses, such as those of a chat."""

from __future__ import annotations

import uuid
from contextlib import ExitStack
from pathlib import Path

from kedge_base.errors import DataError
from kedge_base.machine.durable import make_folder
from kedge_base.run_folder.output import check_creatable, writing
from kedge_people.labels import ITEMS_FILE, Answer, AnswerFile, Item, read_labels, write_items
from kedge_people.server import now


class Corrections(ExitStack):
    """Takes a person's thumbs and corrections into a folder of labels; use it as a context.

    Args:
        folder: The folder, which is made if it does not exist.
        person: Who gives them.

    Raises:
        OutputError: The folder cannot be written.
        DataError: It is damaged, or in use.
    """

    def __init__(self, folder: str | Path, person: str) -> None:
        super().__init__()
        self.folder = check_creatable(folder)
        with writing(self.folder):
            make_folder(self.folder)
        self._person = person
        self._file = self.enter_context(AnswerFile(self.folder))
        found = (self.folder / ITEMS_FILE).is_file()
        self._items = dict(read_labels(self.folder).items) if found else {}
        write_items(self.folder, self._items.values())
        self._answers: dict[str, str] = {}

    def take(self, item: Item, *, thumb: object, edit: object, seconds: float) -> None:
        """Write the person's feedback on a response, replacing their earlier feedback on it.

        Args:
            item: The prompt and the response.
            thumb: 1 for up, −1 for down, 0 for none.
            edit: The corrected response, or None.
            seconds: Time from the display of the response.

        Raises:
            DataError: It is neither a thumb nor a text.
        """
        if type(thumb) is not int or thumb not in (-1, 0, 1):
            raise DataError("thumb must be -1, 0 or 1")
        if edit is not None and not (isinstance(edit, str) and edit.strip()):
            raise DataError("edit must be a text that is not blank, or null")
        if item.id not in self._items:
            self._items[item.id] = item
            write_items(self.folder, self._items.values())
        name = f"{self._person}-{uuid.uuid4()}"
        edits = (edit,) if isinstance(edit, str) and edit != item.responses[0] else ()
        self._file.add(
            Answer(
                name,
                item.id,
                self._person,
                now(),
                round(seconds, 2),
                (0,),
                "skipped",
                thumbs=(thumb,) if thumb else (),
                edits=edits,
                replaces=self._answers.get(item.id),
            )
        )
        self._answers[item.id] = name
