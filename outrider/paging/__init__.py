"""Paged KV memory: who owns which page. Page ids are host integers; the pools themselves belong to the services."""
