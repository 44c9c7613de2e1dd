"""The page size of the services that a test routes to."""

PAGE = 16
