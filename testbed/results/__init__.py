"""What a run leaves behind: files, report, charts."""
