"""The table of all studies, read from their folders; with the extra `ledger`, pushed to a database too."""
