"""Adapters that run inside the processes of others. They import nothing else of Outrider that needs a package."""
