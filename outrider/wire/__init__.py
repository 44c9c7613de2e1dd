"""The wire: generated stubs in v1/, and the one codec between them and the domain's types."""
