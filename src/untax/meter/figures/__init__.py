"""Records in, files out; one file for each figure."""
