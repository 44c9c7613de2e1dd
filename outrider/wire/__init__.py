"""The protocol: generated stubs in v1/, and the codec between them and the domain types."""
