"""Worker scripts, which run in the Python environments of other systems and import nothing of Outrider."""
