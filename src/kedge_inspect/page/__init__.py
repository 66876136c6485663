"""The report page: what runs did, in one self-contained HTML file."""
