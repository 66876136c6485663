"""The report page about runs, in one self-contained HTML file."""
