"""Translates configurations of other libraries: `kedge config from-verl`, `kedge config from-trl`.

reading: files, scripts and arithmetic. translate: settings, by the tables of `kedge_base.libraries`.
"""

from kedge.config.translation.reading import read_settings
from kedge.config.translation.translate import as_yaml, translate

__all__ = ["as_yaml", "read_settings", "translate"]
