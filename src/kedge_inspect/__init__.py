"""Readers of run folders: doctor, report page and live view. They need nothing but the folder."""
