"""The page in the browser: static files, served as they are."""
