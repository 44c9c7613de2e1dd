"""Bookkeeping of paged KV memory. Page ids are host integers; the pools themselves belong to the services."""
