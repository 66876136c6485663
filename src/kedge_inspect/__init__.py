"""Readers of run folders: doctor, report page and live view. They only need the folder."""
